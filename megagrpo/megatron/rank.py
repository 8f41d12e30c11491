"""One training rank of GRPO or PPO: the policy, its reference and a step's work. Knows neither Ray nor torchrun.

Every method is collective: all ranks call the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.kl import kl_estimate
from megagrpo.algorithm.objective import ObjectiveInputs, ObjectiveSettings, grpo_objective
from megagrpo.algorithm.ragged import Ragged
from megagrpo.batching.rank_batches import RankBatch
from megagrpo.checkpoint.store import SavedFile
from megagrpo.errors import Problem, RankError
from megagrpo.megatron.batch import InferenceBatch, Minibatch, ResponseTokens, inference_batch, of_tokens, prepare
from megagrpo.megatron.critic import Critic, stored_values
from megagrpo.megatron.metrics import MetricSums, reduce_mismatch
from megagrpo.megatron.model import forward, forward_backward
from megagrpo.megatron.model_rank import ModelRank
from megagrpo.megatron.offload import Offload, Part
from megagrpo.megatron.reference import Reference
from megagrpo.rank_results import CriticMetrics, StepMetrics, TokenNumbers
from megagrpo.recipe.defaults import dtype_name
from megagrpo.recipe.passes import prepares_by_old_logprobs
from megagrpo.recipe.schema import Recipe

RowOrTokenValues = np.ndarray | Ragged
"""float [rows of the step], one for each sample; or one for each response token."""


class TrainRank(ModelRank):
    def __init__(self, recipe: Recipe, rank: int, init_method: str, model_directory: str, device: str) -> None:
        """As ModelRank; with the reference policy if the recipe has a KL penalty."""
        super().__init__(recipe, rank, init_method, model_directory, device)
        self.recipe = recipe
        algorithm = recipe.algorithm
        self.reference: Reference | None = None
        if algorithm.kl.coefficient > 0:
            follows = algorithm.reference.update_every_steps is not None
            self.reference = Reference(self.policy.chunks, share=algorithm.reference.share if follows else None)
            self.offload = Offload(self.policy.chunks, self.policy.optimizer, self.reference.tensors)
            if follows:
                self.policy.save_reference(self.reference)
        self._loss = GrpoLoss(self._readout)
        self._divisor = algorithm.aggregation_divisor or float(recipe.rollout.response_tokens_max)
        self._minibatches: list[Minibatch] = []
        self._inference = InferenceBatch([], [], [])
        self._critic: Critic | None = None

    def add_critic(self, directory: str) -> None:
        """Builds PPO's critic and loads it from a model directory. Raises ModelError or RecipeError."""
        settings = self.recipe.algorithm.critic
        if settings is None:
            raise RankError(Problem("add_critic", "algorithm.critic: null", "a critic in the recipe"))
        dtype = getattr(torch, dtype_name(self.recipe, self.device.type))
        self._critic = Critic(settings, self.recipe.train, self.where, directory, dtype, self.device)

    # --- the step -----------------------------------------------------------------------------------------------------

    def load_batch(self, batch: RankBatch) -> None:
        """Takes this data rank's part of a step, and forgets the one before."""
        self._minibatches = self.minibatches(batch)
        self._inference = self._joined(batch)

    def compute_old_logprobs(self) -> None:
        """Logprobs of the loaded batch under the policy as it is now; they stay here."""
        self._compute_logprobs("old_logprobs")
        for response in self._responses():
            response.before_update = response.old_logprobs

    def use_rollout_logprobs_as_old(self) -> None:
        """Ratios of the loaded batch will be to what the engines sampled from."""
        for response in self._responses():
            response.old_logprobs = response.rollout_logprobs

    def compute_reference_logprobs(self) -> None:
        """Logprobs of the loaded batch under the reference; they stay here."""
        if self.reference is None:
            raise RankError(Problem("reference logprobs", "algorithm.kl.coefficient: 0", "a KL coefficient above 0"))
        self.offload.require(["reference"])
        with self.reference.in_place_of(self.policy.chunks):
            self._compute_logprobs("reference_logprobs")

    def token_kl(self) -> TokenNumbers | None:
        """KL estimates of the loaded batch's response tokens. Old and reference logprobs must be there.

        Each token comes from one rank; ranks that have none return None.
        """
        old, reference = self._stored("old_logprobs"), self._stored("reference_logprobs")
        return self._token_numbers(kl_estimate(old, reference, self.recipe.algorithm.kl.estimator))

    def update(self, advantages: RowOrTokenValues, lr: float, kl_coefficient: float, step: int) -> StepMetrics | None:
        """All minibatches and epochs of the loaded batch. kl_coefficient: of the loss term, 0 if there is none.

        With more than one optimizer step the ratio is to the policy before the first: old logprobs must be there, as
        they must for a correction and losses by covariance; and reference logprobs, if there is a reference. `step`
        seeds random choices. One rank returns the metrics of all, the others None. Raises RankError if one of these
        passes is missing or a gradient is not finite.
        """
        self.offload.require(["parameters", "gradients", "optimizer"])
        algorithm = self.recipe.algorithm
        minibatches = [minibatch for minibatch in self._minibatches if minibatch.packed]
        if self.has_logits and (len(minibatches) * algorithm.epochs > 1 or prepares_by_old_logprobs(algorithm)):
            self._require("old_logprobs")
        if self.has_logits and self.reference is not None:
            self._require("reference_logprobs")
        of_token = self._reader(advantages)
        metrics = MetricSums(self.device)
        settings = self.objective_settings(kl_coefficient)
        for minibatch in minibatches:
            metrics.add_correction(self.prepare(minibatch, of_token, step))
        grad_norms = []
        for _ in range(algorithm.epochs):
            for minibatch in minibatches:
                self.compute_gradients(minibatch, of_token, settings, metrics)
                grad_norms.append(self.policy.optimizer_step(lr))
        if not self.has_logits:
            return None
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        mismatch = reduce_mismatch(self._responses(), group, self.recipe.rollout.mismatch.worst_tokens, self.device)
        result = metrics.reduce(group, grad_norms, algorithm.epochs, mismatch)
        where = self.where
        return None if where.tensor or where.context or where.data else result

    def objective_settings(self, kl_coefficient: float) -> ObjectiveSettings:
        algorithm = self.recipe.algorithm
        return ObjectiveSettings(
            loss=algorithm.loss,
            kl_coefficient=kl_coefficient,
            kl_estimator=algorithm.kl.estimator,
            kl_straight_through=algorithm.kl.straight_through,
            entropy_coefficient=algorithm.entropy_coefficient,
        )

    def prepare(self, minibatch: Minibatch, advantages: Callable[[ResponseTokens], Tensor], step: int) -> Tensor | None:
        """What the loss of a minibatch needs to know of all its tokens, on all ranks, before the first gradient."""
        return prepare(
            minibatch, advantages, self.recipe.algorithm, self._divisor, self.recipe.seed + step, self.device
        )

    def compute_gradients(
        self,
        minibatch: Minibatch,
        advantages: Callable[[ResponseTokens], Tensor],
        settings: ObjectiveSettings,
        metrics: MetricSums,
    ) -> None:
        """Gradients of one minibatch in the chunks' buffers, summed over all ranks and not clipped."""
        self.policy.zero_gradients()

        def loss(index: int, output: Tensor) -> Tensor:
            response = minibatch.responses[index]
            return self._loss.loss(output, response, advantages(response), settings, metrics)

        forward_backward(self.policy.chunks, minibatch.packed, loss)

    def compute_values(self) -> None:
        """The critic's estimates for the loaded batch; they stay here."""
        self.critic.compute_values(self._inference.packed, self._inference.responses)
        self._inference.share_out("values")

    def token_values(self) -> TokenNumbers | None:
        """What compute_values found. Each token comes from one rank; ranks that have none return None."""
        parts = [stored_values(response) for response in self._responses()]
        return self._token_numbers(torch.cat(parts)) if parts else None

    def update_critic(self, returns: Ragged, lr: float) -> CriticMetrics | None:
        """All minibatches and epochs of the loaded batch, towards these returns; compute_values must have been called.

        One rank returns the metrics of all, the others None. Raises RankError if a gradient is not finite.
        """
        return self.critic.update(self._minibatches, self._reader(returns), self.recipe.algorithm.epochs, lr)

    @property
    def critic(self) -> Critic:
        if self._critic is None:
            raise RankError(Problem("the critic", "add_critic was not called", "a recipe with algorithm.critic"))
        return self._critic

    def update_reference(self) -> None:
        """Moves the reference towards the policy by the recipe's share."""
        if self.reference is None:
            raise RankError(Problem("update of the reference", "algorithm.kl.coefficient: 0", "a reference policy"))
        self.offload.require(["parameters", "reference"])
        self.reference.follow(self.policy.chunks)

    # --- checkpoints and memory, with the critic ----------------------------------------------------------------------

    def save(self, directory: Path) -> tuple[SavedFile, ...]:
        """As ModelRank; the critic's state lies in a directory of its own in this one."""
        self._require_reference()
        files = super().save(directory)
        return files + self._critic.save(directory) if self._critic else files

    def load(self, directory: Path) -> None:
        self._require_reference()
        super().load(directory)
        if self._critic:
            self._critic.load(directory)

    def release(self, parts: Iterable[Part | Literal["critic"]]) -> None:
        """As ModelRank; `critic` is all of the critic."""
        parts = list(parts)
        super().release(part for part in parts if part != "critic")
        if self._critic and "critic" in parts:
            self._critic.release()

    def restore(self, parts: Iterable[Part | Literal["critic"]]) -> None:
        parts = list(parts)
        super().restore(part for part in parts if part != "critic")
        if self._critic and "critic" in parts:
            self._critic.restore()

    def _require_reference(self) -> None:
        """A reference that follows the policy is in checkpoints."""
        if self.reference is not None and self.reference.follows:
            self.offload.require(["reference"])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _readout(self, output: Tensor, positions: Tensor, labels: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        temperature = self.recipe.rollout.temperature
        return self.logprobs(output, positions, labels, temperature=temperature, entropy=entropy)

    def _compute_logprobs(self, name: Literal["old_logprobs", "reference_logprobs"]) -> None:
        self.offload.require(["parameters"])
        batch = self._inference
        forward(
            self.policy.chunks, batch.packed, lambda index, output: self._store(name, batch.responses[index], output)
        )
        batch.share_out(name)

    def _store(self, name: str, response: ResponseTokens, output: Tensor) -> Tensor:
        logprobs = self._loss.logprobs(output, response)
        setattr(response, name, logprobs)
        return logprobs.sum()

    def _stored(self, name: Literal["old_logprobs", "reference_logprobs"]) -> Tensor:
        self._require(name)
        parts = [getattr(response, name) for response in self._responses()]
        return torch.cat(parts) if parts else torch.empty(0, device=self.device)

    def _require(self, name: Literal["old_logprobs", "reference_logprobs"]) -> None:
        if any(getattr(response, name) is None for response in self._responses()):
            raise RankError(Problem(f"compute_{name} was not called for this batch"))

    def _reader(self, values: RowOrTokenValues) -> Callable[[ResponseTokens], Tensor]:
        """Looks up each response token's of numbers that the driver made for rows or tokens of the step."""
        flat = values.values if isinstance(values, Ragged) else values
        on_device = torch.as_tensor(flat, dtype=torch.float32, device=self.device)
        offsets = torch.as_tensor(values.offsets, device=self.device) if isinstance(values, Ragged) else None
        return lambda response: of_tokens(on_device, offsets, response)

    def _token_numbers(self, values: Tensor) -> TokenNumbers | None:
        """`values` [tokens of all microbatches here] for the driver."""
        responses = self._responses()
        if not responses or not self.speaks:
            return None
        return TokenNumbers(
            rows=torch.cat([response.rows for response in responses]).cpu().numpy(),
            index=torch.cat([response.index for response in responses]).cpu().numpy(),
            values=values.float().cpu().numpy(),
        )

    def _joined(self, batch: RankBatch) -> InferenceBatch:
        train, responses = self.recipe.train, self._responses()
        at_once = (train.logprob_tokens_per_microbatch or train.tokens_per_microbatch) // train.tokens_per_microbatch
        if at_once == 1:
            packed = [packed for minibatch in self._minibatches for packed in minibatch.packed]
            return InferenceBatch(packed, responses, [[response] for response in responses])
        microbatches = [microbatch for minibatch in batch.minibatches for microbatch in minibatch]
        return inference_batch(microbatches, responses, at_once, self.layout, self.where.context, self.device)

    def _responses(self) -> list[ResponseTokens]:
        return [response for minibatch in self._minibatches for response in minibatch.responses]


Readout = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""(output of the last stage, positions int64 [n], labels int64 [n], whether entropies are wanted) -> logprobs and
entropies of the policy at the sampling temperature, float32 [n] each.
"""


@dataclass(frozen=True)
class GrpoLoss:
    """What stays the same over a run."""

    readout: Readout

    def logprobs(self, output: Tensor, response: ResponseTokens) -> Tensor:
        """Logprobs of the response tokens, float32 [tokens]."""
        return self.readout(output, response.positions, response.labels, False)[0]

    def loss(
        self,
        output: Tensor,
        response: ResponseTokens,
        advantages: Tensor,
        settings: ObjectiveSettings,
        metrics: MetricSums,
    ) -> Tensor:
        """This microbatch's part of the loss, a scalar: the sum over all microbatches and ranks is the loss.

        advantages: float32 [tokens]. Without old logprobs the policy has not moved since they would have been computed,
        and the forward pass's own serve.
        """
        if response.weights is None:
            raise ValueError("the minibatch was not prepared")
        logprobs, entropy = self.readout(output, response.positions, response.labels, True)
        if response.before_update is None:
            response.before_update = logprobs.detach()
        inputs = ObjectiveInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if response.old_logprobs is None else response.old_logprobs,
            advantages=advantages,
            weights=response.weights,
            entropy=entropy,
            reference_logprobs=response.reference_logprobs,
            sequences=response.sequences,
            importance=response.importance,
            chosen=response.chosen,
        )
        objective = grpo_objective(inputs, settings)
        metrics.add(objective, inputs)
        return objective.loss
