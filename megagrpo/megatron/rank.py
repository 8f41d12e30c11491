"""One training rank of GRPO or PPO: the policy, its reference, its critic, and a step's work on them.

A critic is a model of its own with a value head, in the layout of the policy. It costs as much memory: weights,
gradients and optimizer (train.offload: [critic] keeps them in host memory while engines generate).

Every method is collective: all ranks call the same ones in the same order. It knows neither Ray nor torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megagrpo.algorithm.critic import value_loss
from megagrpo.algorithm.kl import kl_estimate
from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.algorithm.policy_losses import ObjectiveInputs, grpo_objective
from megagrpo.algorithm.token_advantages import token_energy
from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import DIVERGED_FIX, Problem, RankError
from megagrpo.megatron.batch import (
    Minibatch,
    Passes,
    ResponseTokens,
    RowOrTokenValues,
    TokenTensors,
    TokenWeights,
    of_tokens,
    weigh,
)
from megagrpo.megatron.metrics import CriticSums, MetricSums, reduce_mismatch
from megagrpo.megatron.model import unwrapped
from megagrpo.megatron.model_rank import ModelRank
from megagrpo.megatron.replay import RoutesOnRank
from megagrpo.megatron.served_weights import ServedWeights
from megagrpo.megatron.teacher import RanksTeacher, Teachers
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.processes.store import StoreAddress
from megagrpo.rank_results import CriticMetrics, StepMetrics, TokenNumbers
from megagrpo.recipe.defaults import replayed_routes, train_config
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import critic_of


@dataclass(frozen=True)
class Update:
    """The inputs that the losses of one update share, made before the first gradient, and the metrics' sums."""

    minibatches: list[tuple[Minibatch, TokenWeights]]
    advantages: TokenTensors
    kl_coefficient: float
    metrics: MetricSums
    before_update: dict[int, Tensor] = field(default_factory=dict)
    """The trainer's logprobs of each microbatch before the update, [response tokens]."""
    entropies: dict[int, Tensor] = field(default_factory=dict)
    """The policy's entropies of each microbatch at the update's first pass, [response tokens]; none: not computed."""


class TrainRank(ModelRank):
    def __init__(
        self, recipe: Recipe, rank: int, meeting: StoreAddress | str, model_directory: str, device: str
    ) -> None:
        """Joins the other ranks, loads the policy, and keeps a copy as the reference if the recipe has a KL penalty."""
        super().__init__(recipe, rank, meeting, model_directory, device)
        self.recipe = recipe
        self.passes = Passes()
        self.own_routes: Mismatch | None = None
        train, algorithm = recipe.train, recipe.algorithm
        inference_tokens = train.logprob_tokens_per_microbatch or train.tokens_per_microbatch
        self.microbatches_at_once = inference_tokens // train.tokens_per_microbatch
        self.temperature = recipe.rollout.temperature
        if sizes := replayed_routes(recipe, self.policy.architecture):
            chunks = [unwrapped(chunk) for chunk in self.policy.chunks]
            tensor, where = self.layout.tensor, self.where
            self.routes = RoutesOnRank(chunks, self.policy.architecture, sizes, tensor, where, self.device)
        self.served: ServedWeights | None = None
        """The policy's weights in passes that train it; None: its own."""
        if train.quantization is not None:
            self.served = ServedWeights(self.policy.chunks, self.policy.manifest(), self.policy.architecture)
        self.teachers = Teachers(recipe, self)
        if recipe.keeps_reference:
            follows = algorithm.reference.update_every_steps is not None
            self.policy.keep_reference(algorithm.reference.share if follows else None)

    def add_critic(self, directory: str) -> None:
        """Builds PPO's critic and loads it from a model directory: a language model, or one with a value head.

        A new head starts from zeros. So all values are 0 at first, in every layout, and advantages are those without a
        critic, not noise. Raises ModelError or RecipeError.
        """
        self.models["critic"] = TrainedModel(
            critic_of(read_architecture(directory)),
            train_config(self.recipe),
            self.where,
            directory,
            self.dtype,
            self.device.type,
        )

    def add_teacher(self, name: str, directory: str) -> None:
        """Builds a teacher of kind ranks and loads it. Raises ModelError or RecipeError."""
        of_rank = self.policy, self.device.type, self.timeout_seconds
        self.teachers.add(name, RanksTeacher(directory, name, self.recipe, *of_rank))

    # --- the step -----------------------------------------------------------------------------------------------------

    def load_batch(self, batch: RankBatch) -> None:
        super().load_batch(batch)
        if self.routes is not None:
            self.routes.begin_batch()
        self.passes, self.own_routes = Passes(), None
        self.teachers.begin_batch()

    def compute_old_logprobs(self) -> None:
        """Computes logprobs of the batch under the policy's current weights, and energies if advantages are made from
        them; they stay on this rank."""
        with self._as_served():
            logprobs, energy = self._compute_logprobs("policy", energy=self.recipe.algorithm.advantage.reads_energy)
        self.passes = replace(self.passes, before_update=logprobs, old_logprobs=logprobs, energy=energy)

    def use_rollout_logprobs_as_old(self) -> None:
        """Uses the engines' logprobs as old logprobs: ratios will be relative to these."""
        rollout = tuple(response.rollout_logprobs for response in self.batch.responses)
        self.passes = replace(self.passes, old_logprobs=rollout)

    def compute_reference_logprobs(self) -> None:
        """Computes logprobs of the batch under the reference; they stay on this rank."""
        with self.policy.reference_here() as reference, reference.in_place_of_policy(), self.by_own_routes():
            self.passes = replace(self.passes, reference_logprobs=self._compute_logprobs("reference")[0])

    def compute_teachers(self, batches: Mapping[str, Sequence[RankBatch] | None]) -> None:
        """Runs the passes of these teachers on the ranks; what they find stays with the ranks that train on it.

        batches: of a teacher's own, for each data rank of its layout; None: it reads the policy's.
        """
        self.teachers.read(batches, self.batch, self.passes.reference_logprobs)

    def compare_own_routes(self) -> None:
        """Computes the mismatch of the batch with experts that the trainer's routers choose, for the next update's
        metrics. Without replay it does nothing."""
        if self.routes is not None:
            with self._as_served(), self.routes.left_out():
                logprobs, _ = self._compute_logprobs("policy, by its own routes,")
            if self.has_logits:
                self.own_routes = reduce_mismatch(self.batch, logprobs, 0, self.device)

    def by_own_routes(self) -> AbstractContextManager[None]:
        """Lets the policy's routers choose inside the block."""
        return nullcontext() if self.routes is None else self.routes.left_out()

    def token_kl(self) -> TokenNumbers | None:
        """Returns KL estimates of the batch's response tokens. Raises RankError without old and reference logprobs."""
        old = _computed("old_logprobs", self.passes.old_logprobs)
        reference = _computed("reference_logprobs", self.passes.reference_logprobs)
        estimator = self.recipe.algorithm.kl.estimator
        return self.token_numbers(tuple(kl_estimate(o, r, estimator) for o, r in zip(old, reference, strict=True)))

    def token_teacher(self) -> TokenNumbers | None:
        """Returns logprobs by teachers on the ranks, of compute_teachers or the update, NaN for tokens without."""
        return self.token_numbers(self.teachers.logprobs or self.teachers.seen("of_teacher"))

    def token_divergence(self) -> TokenNumbers | None:
        """Returns the divergences from teachers that the update first saw, NaN for tokens without."""
        return self.token_numbers(self.teachers.seen("divergence"))

    def token_agreement(self) -> TokenNumbers | None:
        """Returns 1 where the policy's most likely id is its teacher's, 0 elsewhere, NaN for tokens without."""
        return self.token_numbers(self.teachers.seen("agrees"))

    def token_energy(self) -> TokenNumbers | None:
        """Returns the energies that compute_old_logprobs found."""
        return self.token_numbers(_computed("energy", self.passes.energy))

    def update(self, advantages: RowOrTokenValues, lr: float, kl_coefficient: float, step: int) -> StepMetrics | None:
        """Takes an optimizer step on each minibatch of the batch, algorithm.epochs times over.

        kl_coefficient: of the loss term, 0 if there is none. `step` seeds random choices. One rank returns the metrics
        of all, the others None. Raises RankError if a pass over the batch is missing (see begin_update), and as
        TrainedModel.optimizer_step does.
        """
        update = self.begin_update(advantages, kl_coefficient, step)
        grad_norms = []
        steps = self.recipe.algorithm.epochs * update.minibatches
        for number, (minibatch, weights) in enumerate(steps, start=1):
            self.compute_gradients(minibatch, weights, update)
            grad_norms.append(self.policy.optimizer_step(lr, more=number < len(steps)))
        self.teachers.end_update()
        differences = None if self.routes is None else self.routes.differences(self.batch.routed_tokens)
        if not self.has_logits:
            return None
        seen = tuple(update.before_update[index] for index in sorted(update.before_update))
        entropies = tuple(update.entropies[index] for index in sorted(update.entropies))
        self.passes = replace(self.passes, before_update=seen, entropies=entropies or None)
        worst = self.recipe.rollout.mismatch.worst_tokens
        mismatch = reduce_mismatch(self.batch, seen, worst, self.device)
        metrics = update.metrics.reduce(grad_norms, mismatch)
        metrics = replace(metrics, route_differences=differences, own_routes=self.own_routes)
        return metrics if self.answers else None

    def begin_update(self, advantages: RowOrTokenValues, kl_coefficient: float, step: int) -> Update:
        """Weighs the tokens of every minibatch. Raises RankError if a pass that the update needs was not made.

        With more than one optimizer step the ratio is to the policy before the first: then old logprobs must be there,
        as for a correction and for losses by covariance. Reference logprobs must be there if there is a reference.
        """
        algorithm, passes = self.recipe.algorithm, self.passes
        minibatches = [minibatch for minibatch in self.batch.minibatches if minibatch.packed]
        if len(minibatches) * algorithm.epochs > 1 or algorithm.prepares_by_old_logprobs:
            _computed("old_logprobs", passes.old_logprobs)
        if algorithm.kl.coefficient > 0:
            _computed("reference_logprobs", passes.reference_logprobs)
        of_token = of_tokens(self.batch, advantages, self.device)
        metrics = MetricSums(self.device, entropy=algorithm.computes_entropy)
        weighed = []
        for minibatch in minibatches:
            old = None if passes.old_logprobs is None else minibatch.part_of(passes.old_logprobs)
            weights = weigh(minibatch, minibatch.part_of(of_token), old, self.recipe, self.recipe.seed + step)
            metrics.add_correction(weights.correction)
            weighed.append((minibatch, weights))
        return Update(weighed, of_token, kl_coefficient, metrics, dict(enumerate(passes.before_update or ())))

    def compute_gradients(self, minibatch: Minibatch, weights: TokenWeights, update: Update) -> None:
        """Computes gradients of one minibatch's loss in the chunks' buffers, summed over all ranks and not clipped."""
        algorithm = self.recipe.algorithm
        computes_entropy = algorithm.computes_entropy

        def loss(index: int, output: Tensor) -> Tensor:
            response, of_batch = minibatch.responses[index], minibatch.first + index
            found = self.teachers.compare(output, response, of_batch, entropy=computes_entropy)
            logprobs, entropy, divergence = found
            update.before_update.setdefault(of_batch, logprobs.detach())
            if computes_entropy:
                update.entropies.setdefault(of_batch, entropy.detach())
            old, reference = self.passes.old_logprobs, self.passes.reference_logprobs
            inputs = ObjectiveInputs(
                logprobs=logprobs,
                # Without a pass for old logprobs the policy has not moved yet: they are those of this forward pass.
                old_logprobs=logprobs.detach() if old is None else old[of_batch],
                advantages=update.advantages[of_batch],
                weights=weights.weights[index],
                entropy=entropy if computes_entropy else None,
                reference_logprobs=None if reference is None else reference[of_batch],
                sequences=response.sequences,
                importance=None if weights.importance is None else weights.importance[index],
                chosen=None if weights.chosen is None else weights.chosen[index],
                divergence=divergence,
                given=response.given,
            )
            objective = grpo_objective(
                inputs,
                algorithm.loss,
                algorithm.kl,
                kl_coefficient=update.kl_coefficient,
                entropy_coefficient=algorithm.entropy_coefficient,
                divergence_coefficient=algorithm.distillation.weight if algorithm.distillation else 0.0,
            )
            update.metrics.add(objective, inputs)
            return objective.loss

        with self._as_served():
            self.policy.compute_gradients(minibatch.packed, loss)

    def _as_served(self) -> AbstractContextManager[None]:
        """Lets the policy compute as engines do (train.quantization) inside the block."""
        self.policy.offload.require(["parameters"])
        return self.served.in_place_of_policy() if self.served else nullcontext()

    def update_reference(self) -> None:
        """Moves the reference towards the policy by the recipe's share."""
        with self.policy.reference_here() as reference:
            reference.follow()

    # --- the critic's part of the step --------------------------------------------------------------------------------

    @property
    def critic(self) -> TrainedModel:
        if "critic" not in self.models:
            raise RankError(Problem("the critic", "add_critic was not called", "a recipe with algorithm.critic"))
        return self.models["critic"]

    def compute_values(self) -> None:
        """Computes the critic's estimates for the batch by its current weights; they stay on this rank.

        The value at the position that predicts a token estimates the return from that token on, before it is chosen.
        """
        self.passes = replace(self.passes, values=self.critic.read_tokens(self.batch, _values_in))

    def token_values(self) -> TokenNumbers | None:
        """Returns the values that compute_values found."""
        return self.token_numbers(_computed("values", self.passes.values))

    def update_critic(self, returns: RowOrTokenValues, lr: float) -> CriticMetrics | None:
        """Takes an optimizer step of the critic on each minibatch, algorithm.epochs times over, towards these returns.

        compute_values must have been called. One rank returns the metrics of all, the others None. Raises RankError as
        TrainedModel.optimizer_step does.
        """
        values, targets = _computed("values", self.passes.values), of_tokens(self.batch, returns, self.device)
        sums, grad_norms = CriticSums(self.device), []
        for minibatch in self.batch.minibatches * self.recipe.algorithm.epochs:
            if minibatch.packed:
                self.compute_critic_gradients(minibatch, targets, sums)
                grad_norms.append(self.critic.optimizer_step(lr))
        metrics = sums.reduce(values, targets, grad_norms) if self.has_logits else None
        return metrics if self.answers else None

    def compute_critic_gradients(self, minibatch: Minibatch, returns: TokenTensors, sums: CriticSums) -> None:
        """Computes gradients of a minibatch's mean loss over response tokens, on all ranks, in the critic's buffers."""
        settings = self.recipe.algorithm.critic
        clip = settings.value_clip if settings else None
        old_values, targets = minibatch.part_of(_computed("values", self.passes.values)), minibatch.part_of(returns)

        def loss(index: int, output: Tensor) -> Tensor:
            new_values = _values_in(output, minibatch.responses[index])
            by_token, clipped = value_loss(new_values, old_values[index], targets[index], clip)
            sums.add(by_token, clipped)
            return by_token.sum() / max(minibatch.tokens, 1)

        self.critic.compute_gradients(minibatch.packed, loss)

    # --- numbers by token ---------------------------------------------------------------------------------------------

    def _compute_logprobs(self, of: str, *, energy: bool = False) -> tuple[TokenTensors, TokenTensors | None]:
        """Runs a pass over the batch: its response tokens' logprobs under the weights in the policy's chunks, float32,
        and their energies if wanted.

        Raises RankError, naming tokens, if one is not finite: in a KL of the reward it would only mask its sample.
        """

        def read(output: Tensor, response: ResponseTokens) -> Tensor:
            logprobs, _ = self.logprobs(output, response, entropy=False)
            if not energy:
                return logprobs[:, None]
            sharpened, _ = self.logprobs(output, response, entropy=False, sharpening=2.0)
            return torch.stack([logprobs, token_energy(logprobs, sharpened)], 1)

        found = self.policy.read_tokens(self.batch, read)
        logprobs = tuple(values[:, 0] for values in found)
        numbers = self.token_numbers(logprobs)
        if numbers and (wrong := np.flatnonzero(~np.isfinite(numbers.values))).size:
            tokens = [f"token {numbers.index[at]} of response {numbers.rows[at]} of the step" for at in wrong[:3]]
            given = f"{numbers.values[wrong[0]]} for {wrong.size} of {numbers.values.size}: {', '.join(tokens)}"
            raise RankError(Problem(f"logprobs of the {of} are not finite", given, "numbers", DIVERGED_FIX))
        return logprobs, tuple(values[:, 1] for values in found) if energy else None

    def token_figures(self, rows: int) -> list[TokenNumbers | None]:
        """Returns, for tokens of the step's first rows, logprobs before the update, and entropies as it first saw them;
        None on ranks that others answer for, and for entropies that were not computed."""
        seen, entropies = self.passes.before_update, self.passes.entropies
        if seen is None and self.has_logits:
            raise RankError(Problem("update was not called for this batch"))
        return [None if values is None else self.token_numbers(values, rows) for values in (seen, entropies)]

    def token_numbers(self, values: TokenTensors, rows: int | None = None) -> TokenNumbers | None:
        """Returns `values` for the driver, of all rows of the step or of the first ones. Each token comes from one
        rank; ranks without tokens return None."""
        responses = self.batch.responses
        if not responses or self.where.tensor:  # tensor ranks of one last stage all have the same values
            return None
        of = torch.cat([response.rows for response in responses])
        index = torch.cat([response.index for response in responses])
        chosen = slice(None) if rows is None else of < rows
        numbers = (tensor[chosen].cpu().numpy() for tensor in (of, index, torch.cat(values).float()))
        return TokenNumbers(*numbers)


def _computed(name: str, values: TokenTensors | None) -> TokenTensors:
    if values is None:
        raise RankError(Problem(f"compute_{name} was not called for this batch"))
    return values


def _values_in(output: Tensor, response: ResponseTokens) -> Tensor:
    """Selects float32 [tokens] from the critic's output [positions, 1]."""
    return output[response.positions, 0]
