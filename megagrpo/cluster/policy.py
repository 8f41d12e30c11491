"""The policy as the trainer sees it: the training ranks of GRPO or PPO as one object. Every call has a deadline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.cluster.actors import RankActor
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.recipe.schema import Recipe

if TYPE_CHECKING:
    from megagrpo.rank_results import CriticMetrics, StepMetrics


class Policy(TrainRanks):
    actor_class = RankActor

    def __init__(
        self, runtime: Runtime, recipe: Recipe, model_directory: Path, critic_directory: Path | None = None
    ) -> None:
        """critic_directory: of a recipe with a critic; by default it starts from the policy's model."""
        super().__init__(runtime, recipe, model_directory)
        if recipe.algorithm.critic is not None:
            self.call("add_critic", str((critic_directory or model_directory).absolute()))

    def compute_old_logprobs(self) -> None:
        """Logprobs of the loaded batch under the policy as it is before the update; they stay on the ranks."""
        self.call("compute_old_logprobs")

    def compute_reference_logprobs(self) -> None:
        """Logprobs of the loaded batch under the reference policy; they stay on the ranks."""
        self.call("compute_reference_logprobs")

    def use_rollout_logprobs_as_old(self) -> None:
        """Instead of compute_old_logprobs: ratios will be to what the engines sampled from."""
        self.call("use_rollout_logprobs_as_old")

    def token_kl(self, lengths: np.ndarray) -> Ragged:
        """KL estimates against the reference, by response token. Old and reference logprobs must have been computed.

        lengths: int64 [rows], response tokens of every sample of the step; those not loaded get zeros.
        """
        return self._ragged("token_kl", lengths)

    def update(self, advantages: np.ndarray | Ragged, lr: float, kl_coefficient: float, step: int) -> StepMetrics:
        """All minibatches and epochs over the loaded batch.

        advantages: float [rows], or by response token. kl_coefficient: of the loss term. step: seeds random choices.
        """
        found = self.call("update", advantages, lr, kl_coefficient, step)
        return next(metrics for metrics in found if metrics is not None)

    def compute_values(self) -> None:
        """The critic's estimates for the loaded batch, before its update; they stay on the ranks."""
        self.call("compute_values")

    def token_values(self, lengths: np.ndarray) -> Ragged:
        """The critic's estimates by response token: of the return from that token on, before it was chosen.

        lengths: int64 [rows], response tokens of every sample of the step; those not loaded get zeros.
        """
        return self._ragged("token_values", lengths)

    def update_critic(self, returns: Ragged, lr: float) -> CriticMetrics:
        """All minibatches and epochs over the loaded batch, towards these returns. The policy stays as it is."""
        found = self.call("update_critic", returns, lr)
        return next(metrics for metrics in found if metrics is not None)

    def update_reference(self) -> None:
        """Moves the reference towards the policy by the recipe's share."""
        self.call("update_reference")

    def _ragged(self, method: str, lengths: np.ndarray) -> Ragged:
        """Numbers by token, which the ranks hold in parts."""
        ragged = ragged_zeros(lengths, np.float32)
        for part in self.call(method):
            if part is not None:
                ragged.values[ragged.offsets[part.rows] + part.index] = part.values
        return ragged
