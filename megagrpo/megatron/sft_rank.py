"""One training rank of supervised fine-tuning, which loads a step's batch as one minibatch."""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.megatron.batch import Minibatch, ResponseTokens, sum_over_ranks
from megagrpo.megatron.model_rank import ModelRank
from megagrpo.rank_results import SftUpdate, TokenLoss


class SftRank(ModelRank):
    def update(self, lr: float) -> SftUpdate | None:
        """Takes one optimizer step on the loaded batch. One rank returns loss and gradient norm, the others None.

        Raises RankError as TrainedModel.optimizer_step does.
        """
        nats = self.compute_gradients()
        grad_norm = self.policy.optimizer_step(lr)
        loss = self._over_ranks(nats)
        return None if loss is None else SftUpdate(loss, grad_norm)

    def evaluate(self) -> TokenLoss | None:
        """Returns the loss of the loaded batch on one rank, None on the others."""
        total = self._zero()
        for nats in self.policy.read_tokens(self.batch, self._nats):
            total += nats.sum()
        return self._over_ranks(total)

    def compute_gradients(self) -> Tensor:
        """Computes the gradients of the mean loss of the batch's tokens, summed over all ranks and not clipped.

        Returns the sum of this rank's tokens' losses.
        """
        batch, total = self._minibatch, self._zero()

        def loss(index: int, output: Tensor) -> Tensor:
            nats = self._nats(output, batch.responses[index])
            total.add_(nats.detach().sum())
            return nats.sum() / max(batch.tokens, 1)  # of all ranks and microbatches

        self.policy.compute_gradients(batch.packed, loss)
        return total

    def _nats(self, output: Tensor, response: ResponseTokens) -> Tensor:
        """Returns -log p of each of the assistant's tokens of one microbatch, float32 [tokens]."""
        return -self.logprobs(output, response, entropy=False)[0]

    @property
    def _minibatch(self) -> Minibatch:
        (minibatch,) = self.batch.minibatches
        return minibatch

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _over_ranks(self, total: Tensor) -> TokenLoss | None:
        """Returns the loss of all ranks' tokens on the rank that answers, None on the others."""
        if self.has_logits:
            sum_over_ranks(total)
        return TokenLoss(total.item(), self._minibatch.tokens) if self.answers else None
