"""What is unwise in how ranks and engines are laid out on their machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.errors import Problem
from megagrpo.plan.assumptions import lengths_of
from megagrpo.plan.checks.planned import Planned, minibatch_sequences, samples_per_step
from megagrpo.plan.device_map import axes
from megagrpo.plan.estimate import Estimate
from megagrpo.plan.search.options import CONTEXT_TOKENS_MIN
from megagrpo.recipe.defaults import engine_devices, plan_devices
from megagrpo.recipe.schema import Recipe, SftRecipe

BUBBLE_MAX = 0.3
CONTEXT_PADDING_MAX = 0.05
EXPERTS_MANY = 16
IDLE_MAX = 0.6
NVLINK_BYTES_PER_SECOND_MIN = 100e9
SEQUENCES_MIN = 2


def _tensor_over_nodes(planned: Planned) -> Iterator[Problem]:
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


def _unfilled_nodes(planned: Planned) -> Iterator[Problem]:
    recipe, per_node = planned.recipe, planned.recipe.cluster.gpus_per_node
    devices = plan_devices(recipe, "cuda").bundles
    if recipe.cluster.device != "cpu" and devices > per_node and devices % per_node:
        yield Problem(
            "cluster.gpus_per_node",
            given=f"{devices} GPUs on nodes of {per_node}: {per_node - devices % per_node} of the last are left over",
            needed="whole nodes",
            fix=f"sizes that make {-(-devices // per_node) * per_node} GPUs",
        )


def _slow_links(planned: Planned) -> Iterator[Problem]:
    machines, tensor = planned.machines, planned.recipe.train.layout.tensor
    if machines and tensor > 1 and machines.gpu.node_bytes_per_second < NVLINK_BYTES_PER_SECOND_MIN:
        speed = machines.gpu.node_bytes_per_second / 1e9
        yield Problem(
            "train.layout.tensor",
            given=f"{tensor}, over the {speed:.0f} GB/s between {machines.gpu.name}s of a node",
            needed="NVLink: tensor ranks exchange activations four times a layer",
            fix="tensor: 1, with pipeline or more data ranks in its place, where it fits",
        )


def _whole_experts(planned: Planned) -> Iterator[Problem]:
    layout, experts = planned.recipe.train.layout, planned.architecture.experts
    if experts and experts.count >= EXPERTS_MANY and layout.expert_tensor is None and layout.tensor > 1:
        yield Problem(
            "train.layout.expert_tensor",
            given=f"the default, tensor {layout.tensor}, which cuts experts of {experts.ffn} columns",
            needed="whole experts: small matrices are slow ones",
            fix=f"expert_tensor: 1, with expert: {min(experts.count, layout.tensor * layout.expert)}",
        )


def _bubble(planned: Planned) -> Iterator[Problem]:
    layout = planned.recipe.train.layout
    share = planned.estimate.time.pipeline_bubble if planned.estimate else 0.0
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


def _few_sequences(planned: Planned) -> Iterator[Problem]:
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


def _short_sequences_over_context(planned: Planned) -> Iterator[Problem]:
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


def _engines_idle(planned: Planned) -> Iterator[Problem]:
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


LAYOUT_RULES: tuple[Callable[[Planned], Iterator[Problem]], ...] = (
    _tensor_over_nodes, _unfilled_nodes, _slow_links, _whole_experts, _bubble, _few_sequences,
    _short_sequences_over_context, _engines_idle,
)  # fmt: skip
