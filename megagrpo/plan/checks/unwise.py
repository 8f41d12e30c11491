"""What is unwise in a recipe for its machines: every finding with where, given, needed and fix.

The rules of recipe/ refuse what is wrong anywhere, fitting.py what cannot run on the machines; these are matters of
judgment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megagrpo.errors import Problem
from megagrpo.plan.assumptions import Assumptions, lengths_of
from megagrpo.plan.checks.impossible import engine_on
from megagrpo.plan.device_map import axes
from megagrpo.plan.estimate import Estimate
from megagrpo.plan.machines import Machines
from megagrpo.plan.search.options import CONTEXT_TOKENS_MIN
from megagrpo.plan.time.seconds import StepTime
from megagrpo.plan.units import second_text
from megagrpo.recipe.defaults import engine_devices
from megagrpo.recipe.devices import plan_devices
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.weights.families.architecture import Architecture

BUBBLE_MAX = 0.3
CONTEXT_PADDING_MAX = 0.05
EXPERTS_MANY = 16
FREE_SHARE_MIN = 0.5
IDLE_MAX = 0.6
KV_CACHE_SHARE_MIN = 0.1
LEARNING_RATE_MAX = 5e-5
LOST_SECONDS_MAX = 6 * 3600
NVLINK_BYTES_PER_SECOND_MIN = 100e9
SEQUENCES_MIN = 2
TIMEOUT_SHARE_MAX = 0.8


@dataclass(frozen=True)
class _Planned:
    """What advice is about."""

    recipe: AnyRecipe
    architecture: Architecture
    machines: Machines | None
    estimate: Estimate | None
    assumptions: Assumptions


def advice(
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines | None,
    estimate: Estimate | None,
    assumptions: Assumptions,
) -> Iterator[Problem]:
    """What works and is probably not what its author wants."""
    planned = _Planned(recipe, architecture, machines, estimate, assumptions)
    for rule in RULES:
        yield from rule(planned)


def _tensor_over_nodes(planned: _Planned) -> Iterator[Problem]:
    recipe, per_node = planned.recipe, planned.recipe.cluster.gpus_per_node
    if recipe.cluster.device == "cpu":
        return
    wide = {axis.name: axis for axis in axes(recipe, planned.architecture) if axis.nodes > 1}
    if "tensor" in wide:
        yield Problem(
            "train.layout.tensor",
            given=f"{wide['tensor'].size}, whose ranks reach over {wide['tensor'].nodes} nodes",
            needed=f"groups within nodes of {per_node} GPUs: tensor ranks exchange activations four times a layer",
            fix=f"a divisor of {per_node}, and pipeline for the rest",
        )
    if "expert_tensor" in wide:
        yield Problem(
            "train.layout.expert_tensor",
            given=f"{wide['expert_tensor'].size}, whose ranks reach over {wide['expert_tensor'].nodes} nodes",
            needed=f"groups within nodes of {per_node} GPUs",
            fix="expert_tensor: 1",
        )


def _unfilled_nodes(planned: _Planned) -> Iterator[Problem]:
    recipe, per_node = planned.recipe, planned.recipe.cluster.gpus_per_node
    devices = plan_devices(recipe, "cuda").bundles
    if recipe.cluster.device != "cpu" and devices > per_node and devices % per_node:
        yield Problem(
            "cluster.gpus_per_node",
            given=f"{devices} GPUs on nodes of {per_node}: {per_node - devices % per_node} of the last are left over",
            needed="whole nodes",
            fix=f"sizes that make {-(-devices // per_node) * per_node} GPUs",
        )


def _slow_links(planned: _Planned) -> Iterator[Problem]:
    machines, tensor = planned.machines, planned.recipe.train.layout.tensor
    if machines and tensor > 1 and machines.gpu.node_bytes_per_second < NVLINK_BYTES_PER_SECOND_MIN:
        speed = machines.gpu.node_bytes_per_second / 1e9
        yield Problem(
            "train.layout.tensor",
            given=f"{tensor}, over the {speed:.0f} GB/s between {machines.gpu.name}s of a node",
            needed="NVLink: tensor ranks exchange activations four times a layer",
            fix="tensor: 1, with pipeline or more data ranks in its place, where it fits",
        )


def _whole_experts(planned: _Planned) -> Iterator[Problem]:
    layout, experts = planned.recipe.train.layout, planned.architecture.experts
    if experts and experts.count >= EXPERTS_MANY and layout.expert_tensor is None and layout.tensor > 1:
        yield Problem(
            "train.layout.expert_tensor",
            given=f"the default, tensor {layout.tensor}, which cuts experts of {experts.ffn} columns",
            needed="whole experts: small matrices are slow ones",
            fix=f"expert_tensor: 1, with expert: {min(experts.count, layout.tensor * layout.expert)}",
        )


def _bubble(planned: _Planned) -> Iterator[Problem]:
    layout = planned.recipe.train.layout
    share = bubble(planned.estimate.time) if planned.estimate else 0.0
    if share > BUBBLE_MAX:
        fixes = ["fewer stages", "less data", "more samples in a minibatch"]
        if layout.virtual_pipeline == 1:
            fixes.insert(1, "virtual_pipeline: 2")
        yield Problem(
            "train.layout.pipeline",
            given=f"{layout.pipeline}: stages wait for one another {share:.0%} of the update",
            needed=f"at most {BUBBLE_MAX:.0%}",
            fix=", ".join(fixes),
        )


def _few_sequences(planned: _Planned) -> Iterator[Problem]:
    recipe = planned.recipe
    sequences, data = minibatch_sequences(recipe), recipe.train.layout.data
    if data > 1 and sequences / data < SEQUENCES_MIN:
        field = "data.examples_per_step" if isinstance(recipe, SftRecipe) else "algorithm.minibatches"
        yield Problem(
            "train.layout.data",
            given=f"{data} data ranks for the {sequences} sequences of a minibatch",
            needed=f"at least {SEQUENCES_MIN} for each: the longest one makes all others wait",
            fix=f"fewer data ranks, or change {field}",
        )


def _long_microbatches(planned: _Planned) -> Iterator[Problem]:
    recipe, layout = planned.recipe, planned.recipe.train.layout
    if isinstance(recipe, SftRecipe):
        longest = recipe.data.tokens_max
    else:
        longest = recipe.data.prompt_tokens_max + recipe.rollout.response_tokens_max
    capacity = recipe.train.tokens_per_microbatch * layout.context
    of_rank = minibatch_sequences(recipe) / layout.data * longest
    if capacity > 1.5 * of_rank and capacity > 1.5 * longest:
        yield Problem(
            "train.tokens_per_microbatch",
            given=f"{recipe.train.tokens_per_microbatch}, and {of_rank:.0f} tokens of a minibatch at most on a rank",
            needed="no more than that: it only takes memory",
            fix=f"tokens_per_microbatch: {-(-int(max(longest, of_rank)) // layout.context)}",
        )


def _short_sequences_over_context(planned: _Planned) -> Iterator[Problem]:
    recipe, context = planned.recipe, planned.recipe.train.layout.context
    if context == 1:
        return
    lengths = lengths_of(recipe, planned.assumptions)
    longest = lengths.prompt + lengths.longest
    padding = context / lengths.sequence  # half of a multiple of 2 x context, on the mean
    if longest / context < CONTEXT_TOKENS_MIN or padding > CONTEXT_PADDING_MAX:
        yield Problem(
            "train.layout.context",
            given=f"{context}, for sequences of up to {longest:.0f} tokens, {lengths.sequence:.0f} on the mean",
            needed=f"at least {CONTEXT_TOKENS_MIN} tokens on each rank: keys and values travel for every layer",
            fix="context: 1, and data in its place",
        )


def _recompute(planned: _Planned) -> Iterator[Problem]:
    if planned.machines is None or planned.estimate is None or planned.recipe.train.recompute != "full":
        return
    updates = [phase for kind in planned.estimate.memory for phase in kind.phases if phase.phase == "update"]
    card = planned.machines.gpu.memory_bytes
    free = 1 - max((phase.bytes for phase in updates), default=card) / card
    if free > FREE_SHARE_MIN:
        yield Problem(
            "train.recompute",
            given=f"full, with {free:.0%} of the memory free in the update",
            needed="no more than has to be: whole layers cost a third more products",
            fix="recompute: selective or none, or larger microbatches",
        )


def _whole_optimizer(planned: _Planned) -> Iterator[Problem]:
    train = planned.recipe.train
    if not train.distributed_optimizer and train.layout.data * train.layout.context > 1 and train.lora is None:
        yield Problem(
            "train.distributed_optimizer",
            given=f"false, with {train.layout.data * train.layout.context} replicas: each holds all optimizer states",
            needed="each its share: the same numbers for 12 bytes less for each parameter",
            fix="distributed_optimizer: true",
        )


def _key_value_cache(planned: _Planned) -> Iterator[Problem]:
    recipe, engine = planned.recipe, engine_on(planned.recipe, planned.architecture, planned.machines)
    if engine is not None and 0 < engine.sequences < KV_CACHE_SHARE_MIN * engine.asked and isinstance(recipe, Recipe):
        yield Problem(
            "rollout.layout.tensor",
            given=f"{recipe.rollout.layout.tensor}: a cache for {engine.sequences} longest responses of {engine.asked}",
            needed=f"room for {KV_CACHE_SHARE_MIN:.0%} of an engine's responses: each batch reads all weights",
            fix="more tensor ranks in each engine, or shorter responses",
        )


def _engines_idle(planned: _Planned) -> Iterator[Problem]:
    recipe = planned.recipe
    if not isinstance(recipe, Recipe) or engine_devices(recipe) == 0:
        return
    used = {device for devices in plan_devices(recipe, "cuda").bundles_of_engine for device in devices}
    ranks, colocated = recipe.train.layout.parallel().ranks, recipe.cluster.placement == "colocated"
    if samples_per_step(recipe) < recipe.rollout.engines:
        yield Problem(
            "rollout.engines",
            given=f"{recipe.rollout.engines}, for {samples_per_step(recipe)} responses in a step",
            needed="something to do for each",
            fix="fewer engines, or more samples",
        )
    if colocated and len(used) < ranks and recipe.cluster.device != "cpu":
        each = engine_devices(recipe)
        yield Problem(
            "rollout.engines",
            given=f"{recipe.rollout.engines} of {each}: {ranks - len(used)} of {ranks} GPUs wait in the rollout",
            needed="engines on all training devices",
            fix=f"engines: {ranks // each}",
        )
    if not colocated and planned.estimate is not None:
        yield from _waiting(recipe, planned.estimate, len(used), ranks)


def _waiting(recipe: Recipe, estimate: Estimate, of_engines: int, of_ranks: int) -> Iterator[Problem]:
    """Devices of their own wait while the others work: ranks in the rollout, engines in the rest."""
    time = estimate.time
    rollout = sum(phase.seconds for phase in time.phases if phase.phase == "rollout") / time.seconds
    idle = (of_ranks * rollout + of_engines * (1 - rollout)) / (of_ranks + of_engines)
    if idle > IDLE_MAX:
        yield Problem(
            "cluster.placement",
            given=f"disaggregated, {of_ranks} GPUs train and {of_engines} generate: they wait {idle:.0%} of the time",
            needed=f"at most {IDLE_MAX:.0%}",
            fix="placement: colocated, or another split",
        )


def _timeouts(planned: _Planned) -> Iterator[Problem]:
    recipe, estimate = planned.recipe, planned.estimate
    if estimate is None or not isinstance(recipe, Recipe):
        return
    limits = {
        "rollout": ("rollout.timeout_seconds", recipe.rollout.timeout_seconds),
        "weight_sync": ("weights.timeout_seconds", recipe.weights.timeout_seconds),
        "logprobs": ("cluster.step_timeout_seconds", recipe.cluster.step_timeout_seconds),
        "update": ("cluster.step_timeout_seconds", recipe.cluster.step_timeout_seconds),
    }
    for phase in estimate.time.phases:
        field, limit = limits.get(phase.phase, ("", float("inf")))
        if phase.seconds > TIMEOUT_SHARE_MAX * limit:
            yield Problem(
                field,
                given=f"{limit:g}, and {phase.phase} is estimated at {second_text(phase.seconds)}",
                needed="room for a slow step",
                fix=f"{field.rpartition('.')[2]}: {_round_up(2 * phase.seconds)}",
            )


def _rare_checkpoints(planned: _Planned) -> Iterator[Problem]:
    if planned.estimate is None:
        return
    every, step = planned.recipe.checkpoint.every_steps, planned.estimate.time.seconds
    lost = every * step
    if lost > LOST_SECONDS_MAX:
        yield Problem(
            "checkpoint.every_steps",
            given=f"{every} steps of {second_text(step)}: a failure costs up to {second_text(lost)}",
            needed=f"at most {second_text(LOST_SECONDS_MAX)}",
            fix=f"every_steps: {max(1, int(LOST_SECONDS_MAX / 3 / step))}",
        )


def _learning_rate(planned: _Planned) -> Iterator[Problem]:
    recipe = planned.recipe
    if isinstance(recipe, Recipe) and recipe.train.lora is None and planned.architecture.hidden >= 512:
        lr = recipe.train.optimizer.lr
        if lr > LEARNING_RATE_MAX:
            yield Problem(
                "train.optimizer.lr",
                given=f"{lr:g} for all weights of a model with {planned.architecture.hidden} hidden units",
                needed=f"at most {LEARNING_RATE_MAX:g}: published runs take 1e-6; larger ones forget",
                fix="lr: 1.0e-6",
            )


def samples_per_step(recipe: Recipe) -> int:
    return recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt


def minibatch_sequences(recipe: AnyRecipe) -> int:
    """Sequences of one optimizer step, over all data ranks."""
    if isinstance(recipe, SftRecipe):
        return recipe.data.examples_per_step
    return samples_per_step(recipe) // recipe.algorithm.minibatches


def bubble(time: StepTime) -> float:
    """Share of the update in which pipeline stages wait for one another."""
    update = next(phase for phase in time.phases if phase.phase == "update")
    return dict(update.parts).get("pipeline bubble", 0.0) / update.seconds


def _round_up(seconds: float) -> int:
    return int(-(-seconds // 300) * 300)


RULES: tuple[Callable[[_Planned], Iterator[Problem]], ...] = (
    _tensor_over_nodes, _unfilled_nodes, _slow_links, _whole_experts, _bubble, _few_sequences, _long_microbatches,
    _short_sequences_over_context, _recompute, _whole_optimizer, _key_value_cache, _engines_idle, _timeouts,
    _rare_checkpoints, _learning_rate,
)  # fmt: skip
