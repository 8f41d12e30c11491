"""One training rank of supervised fine-tuning. Knows neither Ray nor torchrun.

Every method is collective: all ranks call the same ones in the same order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.megatron.batch import Minibatch
from megagrpo.megatron.model import forward, forward_backward
from megagrpo.megatron.model_rank import ModelRank
from megagrpo.rank_results import SftUpdate, TokenLoss
from megagrpo.recipe.schema import SftRecipe


class SftRank(ModelRank):
    def __init__(self, recipe: SftRecipe, rank: int, init_method: str, model_directory: str, device: str) -> None:
        super().__init__(recipe, rank, init_method, model_directory, device)
        self._minibatch: Minibatch | None = None

    def load_batch(self, batch: RankBatch) -> None:
        """Takes this data rank's part of a step, one minibatch, and forgets the one before."""
        (self._minibatch,) = self.minibatches(batch)

    def update(self, lr: float) -> SftUpdate | None:
        """One optimizer step on the loaded batch. One rank returns what it was, the others None.

        Raises RankError if a gradient is not finite.
        """
        nats = self.compute_gradients()
        grad_norm = self.policy.optimizer_step(lr)
        loss = self._over_ranks(nats)
        return None if loss is None else SftUpdate(loss, grad_norm)

    def evaluate(self) -> TokenLoss | None:
        """Loss of the loaded batch. One rank returns it, the others None."""
        batch, total = self._batch(), self._zero()
        forward(
            self.policy.chunks, batch.packed, lambda index, output: total.add_(self._nats(batch, index, output).sum())
        )
        return self._over_ranks(total)

    def compute_gradients(self) -> Tensor:
        """Gradients of the mean loss of the batch's tokens, in the chunks' buffers, summed over all ranks, not clipped.

        Returns the sum of this rank's tokens' losses.
        """
        batch, total = self._batch(), self._zero()

        def loss(index: int, output: Tensor) -> Tensor:
            nats = self._nats(batch, index, output)
            total.add_(nats.detach().sum())
            return nats.sum() / max(batch.tokens, 1)  # of all ranks and microbatches

        self.policy.zero_gradients()
        forward_backward(self.policy.chunks, batch.packed, loss)
        return total

    def _nats(self, batch: Minibatch, index: int, output: Tensor) -> Tensor:
        """-log p of each of the assistant's tokens of one microbatch, float32 [tokens]."""
        response = batch.responses[index]
        logprobs, _ = self.logprobs(output, response.positions, response.labels, temperature=1.0, entropy=False)
        return -logprobs

    def _batch(self) -> Minibatch:
        if self._minibatch is None:
            raise ValueError("no batch is loaded")
        return self._minibatch

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _over_ranks(self, total: Tensor) -> TokenLoss | None:
        """The sum over the ranks that hold other tokens, on the first of them."""
        if not self.has_logits:
            return None
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(total, group=group)
        if self.where.tensor or self.where.context or self.where.data:
            return None
        return TokenLoss(total.item(), self._batch().tokens)
