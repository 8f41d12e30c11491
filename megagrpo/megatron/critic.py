"""PPO's critic on one rank: a model of its own with a value head, in the layout of the policy.

The value at the position that predicts a token estimates the return from that token on, before the token is chosen.
A critic costs as much memory as the policy: weights, gradients and optimizer (train.offload: [critic] keeps them in
host memory while engines generate).

Every method is collective: all ranks call the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.algorithm.critic import ValueLoss, explained_variance, value_loss
from megagrpo.layout.parallel import RankCoordinates
from megagrpo.megatron.batch import Batch, Minibatch, ResponseTokens, TokenTensors, sum_over_ranks
from megagrpo.megatron.metrics import steps_taken
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.rank_results import CriticMetrics
from megagrpo.recipe.schema import CriticConfig, TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import critic_of


class Critic:
    def __init__(
        self,
        settings: CriticConfig,
        train: TrainConfig,
        where: RankCoordinates,
        directory: str | Path,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Builds this rank's part and loads it from a model directory: a language model, or one with a value head.

        A new head starts from zeros. So all values are 0 at first, in every layout, and advantages are those without a
        critic, not noise. Raises ModelError or RecipeError.
        """
        self._clip = settings.value_clip
        self._device = device
        self.model = TrainedModel(critic_of(read_architecture(directory)), train, where, directory, dtype, device.type)

    def compute_values(self, batch: Batch) -> TokenTensors:
        """Computes the values of the response tokens by the critic's current weights, float32."""
        return self.model.read_tokens(batch, _values)

    def update(
        self, batch: Batch, values: TokenTensors, returns: TokenTensors, epochs: int, lr: float
    ) -> CriticMetrics | None:
        """Takes an optimizer step on each minibatch, `epochs` times over.

        values: the critic's before the update; returns: what it learns to predict; float32. Ranks of earlier pipeline
        stages return None. Raises RankError as TrainedModel.optimizer_step does.
        """
        sums = CriticSums(self._device)
        grad_norms = []
        for _ in range(epochs):
            for minibatch in batch.minibatches:
                if minibatch.packed:
                    self.compute_gradients(minibatch, values, returns, sums)
                    grad_norms.append(self.model.optimizer_step(lr))
        if self.model.where.pipeline != self.model.layout.pipeline - 1:
            return None
        return sums.reduce(values, returns, grad_norms)

    def compute_gradients(
        self, minibatch: Minibatch, values: TokenTensors, returns: TokenTensors, sums: CriticSums
    ) -> None:
        """Computes gradients of a minibatch's mean loss over response tokens, on all ranks, in the chunks' buffers."""
        old_values, targets = minibatch.own(values), minibatch.own(returns)

        def loss(index: int, output: Tensor) -> Tensor:
            new_values = _values(output, minibatch.responses[index])
            found = value_loss(new_values, old_values[index], targets[index], self._clip)
            sums.add(found)
            return found.loss.sum() / max(minibatch.tokens, 1)

        self.model.compute_gradients(minibatch.packed, loss)


def _values(output: Tensor, response: ResponseTokens) -> Tensor:
    """Selects float32 [tokens] from the last stage's output [positions, 1]."""
    return output[response.positions, 0]


class CriticSums:
    """Sums over this rank's tokens, kept on its device so that no microbatch waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._trained = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, found: ValueLoss) -> None:
        """Adds one microbatch that was trained on."""
        per_token = torch.stack([found.loss.detach(), found.clipped.float(), torch.ones_like(found.loss)])
        self._trained += per_token.sum(1, dtype=torch.float64)

    def reduce(self, values: TokenTensors, returns: TokenTensors, grad_norms: Sequence[float]) -> CriticMetrics:
        """Computes means over all ranks' tokens. Collective over the ranks that hold them.

        values: the critic's before its update; returns: what it learns to predict; both for the whole batch.
        """
        seen = torch.zeros(6, dtype=torch.float64, device=self._trained.device)
        for before, target in zip(values, returns, strict=True):
            v, r = before.double(), target.double()
            seen += torch.stack([torch.ones_like(v), v, r, r.square(), r - v, (r - v).square()]).sum(1)
        sums = torch.cat([self._trained, seen])
        sum_over_ranks(sums)
        loss, clipped, trained, tokens, value, total, squares, residual, residual_squares = sums.tolist()
        grad_norm, skipped = steps_taken(grad_norms)
        return CriticMetrics(
            loss=loss / max(trained, 1.0),
            clip_fraction=clipped / max(trained, 1.0),
            value_mean=value / max(tokens, 1.0),
            return_mean=total / max(tokens, 1.0),
            explained_variance=explained_variance(tokens, (total, squares), (residual, residual_squares)),
            grad_norm=grad_norm,
            skipped_steps=skipped,
        )
