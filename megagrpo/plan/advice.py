"""What cannot run on a plan's machines, what is unwise there, and whether checkpoints have room on their disk.

The rules of recipe/ refuse what is wrong anywhere. Each rule here is a function that yields problems with where, given,
needed and fix.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import Assumptions, lengths_of, longest_sequence, minibatch_sequences
from megagrpo.plan.device_map import axes
from megagrpo.plan.engine import EngineMemory, engine_memory
from megagrpo.plan.machines import Machines
from megagrpo.plan.memory import DeviceMemory
from megagrpo.plan.parameters import adapter_parameters, total_parameters
from megagrpo.plan.time import StepTime
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.defaults import checkpoint_directory, plan_devices
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.weights.families.architecture import Architecture, critic_of

BUBBLE_MAX = 0.3
CONTEXT_PADDING_MAX = 0.05
CONTEXT_TOKENS_MIN = 4096
EXPERTS_MANY = 16
FREE_SHARE_MIN = 0.5
IDLE_MAX = 0.6
KV_CACHE_SHARE_MIN = 0.1
LEARNING_RATE_MAX = 5e-5
LOST_SECONDS_MAX = 6 * 3600
NVLINK_BYTES_PER_SECOND_MIN = 100e9
SEQUENCES_MIN = 2
STATE_BYTES = 12  # float32: the main weight and Adam's two moments (megatron/state.py)
TIMEOUT_SHARE_MAX = 0.8


@dataclass(frozen=True)
class Planned:
    """What advice is about. `machines` and `time` are None where the kind of GPU is not known."""

    recipe: AnyRecipe
    architecture: Architecture
    machines: Machines | None
    memory: tuple[DeviceMemory, ...]
    time: StepTime | None
    assumptions: Assumptions

    @cached_property
    def layout(self) -> ParallelLayout:
        return self.recipe.train.layout.parallel()

    @cached_property
    def engine(self) -> EngineMemory | None:
        """What a rank of an engine holds on a known card; None for recipes without engines of their own."""
        if self.machines is None or isinstance(self.recipe, SftRecipe) or self.recipe.rollout.devices_of_engine == 0:
            return None
        return engine_memory(self.recipe, self.architecture, self.machines.gpu.memory_bytes, "cuda")

    @property
    def on_gpus(self) -> bool:
        return self.recipe.cluster.device != "cpu"


def impossible(planned: Planned) -> Iterator[Problem]:
    """Why the recipe cannot run on its machines."""
    for rule in (lambda planned: node_problems(planned.recipe), _no_cache, _too_little_memory):
        yield from rule(planned)


def unwise(planned: Planned) -> Iterator[Problem]:
    """What works and is probably not what the recipe's author wants."""
    for rule in UNWISE:
        yield from rule(planned)


# --- impossible ------------------------------------------------------------------------------------------------------


def node_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    """Engines on GPUs of two nodes: a server's ranks are processes of one node."""
    if isinstance(recipe, SftRecipe) or recipe.cluster.device == "cpu":
        return
    per_node, of_engine = recipe.cluster.gpus_per_node, plan_devices(recipe, "cuda").bundles_of_engine
    each, first = len(of_engine[0]), of_engine[0][:1]
    if not first or (per_node % each == 0 and first[0] % each == 0):
        return  # engines lie side by side from the first on, so none reaches over the edge of a node
    for engine, devices in enumerate(of_engine):
        if devices[0] // per_node != devices[-1] // per_node:
            yield Problem(
                "rollout.layout.tensor",
                given=f"{len(devices)}, which puts engine {engine} on GPUs {devices[0]}-{devices[-1]}, over nodes",
                needed=f"engines within nodes of {per_node} GPUs (cluster.gpus_per_node)",
                fix=f"a divisor of {per_node}, and a number of engines and of training ranks that fills nodes",
            )
            return


def _no_cache(planned: Planned) -> Iterator[Problem]:
    engine = planned.engine
    if planned.machines and engine and engine.sequences == 0:
        yield Problem(
            "rollout.layout.tensor",
            given=f"weights of {byte_text(engine.weights)} on each GPU of an engine, and a cache of "
            f"{engine.cache_tokens} tokens beside them on one {planned.machines.gpu.name}",
            needed=f"{engine.longest} tokens: the longest prompt and response",
            fix="more tensor ranks in each engine, or shorter responses",
        )


def _too_little_memory(planned: Planned) -> Iterator[Problem]:
    """The fullest device, if it needs more than a card has: one problem, since one change moves all of them."""
    if planned.machines is None:
        return
    kind = max(planned.memory, key=lambda kind: kind.fullest.bytes)
    fullest, gpu = kind.fullest, planned.machines.gpu
    if fullest.bytes > gpu.memory_bytes:
        largest = fullest.largest[0]
        lowered = next((part for part in fullest.largest if part.lowered_by), largest)
        more = "" if lowered is largest else f" ({lowered.name})"
        too_much = byte_text(fullest.bytes - gpu.memory_bytes)
        yield Problem(
            f"memory of {kind.name}, {fullest.phase}",
            given=f"{byte_text(fullest.bytes)}, most of it {largest.name}: {byte_text(largest.bytes)}",
            needed=f"at most {byte_text(gpu.memory_bytes)} of one {gpu.name}: {too_much} too much",
            fix=f"change {', '.join(lowered.lowered_by)}{more}, or see what fits with --search",
        )


# --- unwise: how ranks and engines are laid out ----------------------------------------------------------------------


def _tensor_over_nodes(planned: Planned) -> Iterator[Problem]:
    per_node = planned.recipe.cluster.gpus_per_node
    fixes = {"tensor": f"a divisor of {per_node}, and pipeline for the rest", "expert_tensor": "expert_tensor: 1"}
    for axis in axes(planned.recipe, planned.architecture) if planned.on_gpus else ():
        if axis.name in fixes and axis.nodes > 1:
            yield Problem(
                f"train.layout.{axis.name}",
                given=f"{axis.size}, whose ranks reach over {axis.nodes} nodes",
                needed=f"groups within nodes of {per_node} GPUs: they exchange activations several times a layer",
                fix=fixes[axis.name],
            )


def _unfilled_nodes(planned: Planned) -> Iterator[Problem]:
    per_node, devices = planned.recipe.cluster.gpus_per_node, plan_devices(planned.recipe, "cuda").bundles
    if planned.on_gpus and devices > per_node and devices % per_node:
        yield Problem(
            "cluster.gpus_per_node",
            given=f"{devices} GPUs on nodes of {per_node}: {per_node - devices % per_node} of the last are left over",
            needed="whole nodes",
            fix=f"sizes that make {-(-devices // per_node) * per_node} GPUs",
        )


def _slow_links(planned: Planned) -> Iterator[Problem]:
    machines, tensor = planned.machines, planned.layout.tensor
    if machines and tensor > 1 and machines.gpu.node_bytes_per_second < NVLINK_BYTES_PER_SECOND_MIN:
        speed = machines.gpu.node_bytes_per_second / 1e9
        yield Problem(
            "train.layout.tensor",
            given=f"{tensor}, over the {speed:.0f} GB/s between {machines.gpu.name}s of a node",
            needed="NVLink: tensor ranks exchange activations four times a layer",
            fix="tensor: 1, with pipeline or more data ranks in its place, where it fits",
        )


def _whole_experts(planned: Planned) -> Iterator[Problem]:
    layout, experts = planned.layout, planned.architecture.experts
    by_default = planned.recipe.train.layout.expert_tensor is None
    if experts and experts.count >= EXPERTS_MANY and by_default and layout.tensor > 1:
        yield Problem(
            "train.layout.expert_tensor",
            given=f"the default, tensor {layout.tensor}, which cuts experts of {experts.ffn} columns",
            needed="whole experts: small matrices are slow ones",
            fix=f"expert_tensor: 1, with expert: {min(experts.count, layout.tensor * layout.expert)}",
        )


def _bubble(planned: Planned) -> Iterator[Problem]:
    layout, share = planned.layout, planned.time.pipeline_bubble if planned.time else 0.0
    if share > BUBBLE_MAX:
        interleave = "virtual_pipeline: 2, " if layout.virtual_pipeline == 1 else ""
        yield Problem(
            "train.layout.pipeline",
            given=f"{layout.pipeline}: stages wait for one another {share:.0%} of the update",
            needed=f"at most {BUBBLE_MAX:.0%}",
            fix=f"fewer stages, {interleave}less data, more samples in a minibatch",
        )


def _few_sequences(planned: Planned) -> Iterator[Problem]:
    sequences, data = minibatch_sequences(planned.recipe), planned.layout.data
    if data > 1 and sequences / data < SEQUENCES_MIN:
        sft = isinstance(planned.recipe, SftRecipe)
        yield Problem(
            "train.layout.data",
            given=f"{data} data ranks for the {sequences} sequences of a minibatch",
            needed=f"at least {SEQUENCES_MIN} for each: the longest one makes all others wait",
            fix=f"fewer data ranks, or change {'data.examples_per_step' if sft else 'algorithm.minibatches'}",
        )


def _short_sequences_over_context(planned: Planned) -> Iterator[Problem]:
    context, lengths = planned.layout.context, lengths_of(planned.recipe, planned.assumptions)
    longest = lengths.prompt + lengths.longest
    padding = context / lengths.sequence  # half of a multiple of 2 x context, on the mean
    if context > 1 and (longest / context < CONTEXT_TOKENS_MIN or padding > CONTEXT_PADDING_MAX):
        yield Problem(
            "train.layout.context",
            given=f"{context}, for sequences of up to {longest:.0f} tokens, {lengths.sequence:.0f} on the mean",
            needed=f"at least {CONTEXT_TOKENS_MIN} tokens on each rank: keys and values travel for every layer",
            fix="context: 1, and data in its place",
        )


def _engines_idle(planned: Planned) -> Iterator[Problem]:
    recipe, ranks = planned.recipe, planned.layout.ranks
    if not isinstance(recipe, Recipe) or (each := recipe.rollout.devices_of_engine) == 0:
        return
    engines, responses = recipe.rollout.engines, recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    used = len({device for devices in plan_devices(recipe, "cuda").bundles_of_engine for device in devices})
    if responses < engines:
        yield Problem(
            "rollout.engines",
            given=f"{engines}, for {responses} responses in a step",
            needed="something to do for each",
            fix="fewer engines, or more samples",
        )
    colocated = recipe.cluster.placement == "colocated"
    if colocated and used < ranks and planned.on_gpus:
        yield Problem(
            "rollout.engines",
            given=f"{engines} of {each}: {ranks - used} of {ranks} GPUs wait in the rollout",
            needed="engines on all training devices",
            fix=f"engines: {ranks // each}",
        )
    if not colocated and planned.time:
        # Devices of their own wait while the others work: ranks in the rollout, engines in the rest.
        rollout = sum(phase.seconds for phase in planned.time.phases if phase.phase == "rollout") / planned.time.seconds
        idle = (ranks * rollout + used * (1 - rollout)) / (ranks + used)
        if idle > IDLE_MAX:
            yield Problem(
                "cluster.placement",
                given=f"disaggregated, {ranks} GPUs train and {used} generate: they wait {idle:.0%} of the time",
                needed=f"at most {IDLE_MAX:.0%}",
                fix="placement: colocated, or another split",
            )


# --- unwise: other settings ------------------------------------------------------------------------------------------


def _long_microbatches(planned: Planned) -> Iterator[Problem]:
    recipe, layout = planned.recipe, planned.layout
    longest = longest_sequence(recipe)
    of_rank = minibatch_sequences(recipe) / layout.data * longest
    if recipe.train.tokens_per_microbatch * layout.context > 1.5 * max(of_rank, longest):
        yield Problem(
            "train.tokens_per_microbatch",
            given=f"{recipe.train.tokens_per_microbatch}, and {of_rank:.0f} tokens of a minibatch at most on a rank",
            needed="no more than that: it only takes memory",
            fix=f"tokens_per_microbatch: {-(-int(max(longest, of_rank)) // layout.context)}",
        )


def _recompute(planned: Planned) -> Iterator[Problem]:
    if planned.machines is None or planned.recipe.train.recompute != "full":
        return
    updates = [phase.bytes for kind in planned.memory for phase in kind.phases if phase.phase == "update"]
    free = 1 - max(updates) / planned.machines.gpu.memory_bytes
    if free > FREE_SHARE_MIN:
        yield Problem(
            "train.recompute",
            given=f"full, with {free:.0%} of the memory free in the update",
            needed="no more than has to be: whole layers cost a third more products",
            fix="recompute: selective or none, or larger microbatches",
        )


def _whole_optimizer(planned: Planned) -> Iterator[Problem]:
    train, replicas = planned.recipe.train, planned.layout.data * planned.layout.context
    if not train.distributed_optimizer and replicas > 1 and train.lora is None:
        yield Problem(
            "train.distributed_optimizer",
            given=f"false, with {replicas} replicas: each holds all optimizer states",
            needed="each its share: the same numbers for 12 bytes less for each parameter",
            fix="distributed_optimizer: true",
        )


def _key_value_cache(planned: Planned) -> Iterator[Problem]:
    recipe, engine = planned.recipe, planned.engine
    if isinstance(recipe, Recipe) and engine and 0 < engine.sequences < KV_CACHE_SHARE_MIN * engine.asked:
        yield Problem(
            "rollout.layout.tensor",
            given=f"{recipe.rollout.layout.tensor}: a cache for {engine.sequences} longest responses of {engine.asked}",
            needed=f"room for {KV_CACHE_SHARE_MIN:.0%} of an engine's responses: each batch reads all weights",
            fix="more tensor ranks in each engine, or shorter responses",
        )


def _timeouts(planned: Planned) -> Iterator[Problem]:
    recipe = planned.recipe
    if planned.time is None or not isinstance(recipe, Recipe):
        return
    step = ("cluster.step_timeout_seconds", recipe.cluster.step_timeout_seconds)
    limits = {
        "rollout": ("rollout.timeout_seconds", recipe.rollout.timeout_seconds),
        "weight_sync": ("weights.timeout_seconds", recipe.weights.timeout_seconds),
        "logprobs": step,
        "update": step,
    }
    for phase in planned.time.phases:
        field, limit = limits.get(phase.phase, ("", float("inf")))
        if phase.seconds > TIMEOUT_SHARE_MAX * limit:
            yield Problem(
                field,
                given=f"{limit:g}, and {phase.phase} is estimated at {second_text(phase.seconds)}",
                needed="room for a slow step",
                fix=f"{field.rpartition('.')[2]}: {int(-(-2 * phase.seconds // 300) * 300)}",
            )


def _rare_checkpoints(planned: Planned) -> Iterator[Problem]:
    every, step = planned.recipe.checkpoint.every_steps, planned.time.seconds if planned.time else 0.0
    if (lost := every * step) > LOST_SECONDS_MAX:
        yield Problem(
            "checkpoint.every_steps",
            given=f"{every} steps of {second_text(step)}: a failure costs up to {second_text(lost)}",
            needed=f"at most {second_text(LOST_SECONDS_MAX)}",
            fix=f"every_steps: {max(1, int(LOST_SECONDS_MAX / 3 / step))}",
        )


def _learning_rate(planned: Planned) -> Iterator[Problem]:
    train, hidden = planned.recipe.train, planned.architecture.hidden
    whole = isinstance(planned.recipe, Recipe) and train.lora is None
    if whole and hidden >= 512 and train.optimizer.lr > LEARNING_RATE_MAX:
        yield Problem(
            "train.optimizer.lr",
            given=f"{train.optimizer.lr:g} for all weights of a model with {hidden} hidden units",
            needed=f"at most {LEARNING_RATE_MAX:g}: published runs take 1e-6; larger ones forget",
            fix="lr: 1.0e-6",
        )


UNWISE: tuple[Callable[[Planned], Iterator[Problem]], ...] = (
    _tensor_over_nodes, _unfilled_nodes, _slow_links, _whole_experts, _bubble, _few_sequences,
    _short_sequences_over_context, _engines_idle, _long_microbatches, _recompute, _whole_optimizer, _key_value_cache,
    _timeouts, _rare_checkpoints, _learning_rate,
)  # fmt: skip


# --- disk ------------------------------------------------------------------------------------------------------------


def checkpoint_bytes(recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None) -> int:
    """One checkpoint: what is trained, with its optimizer; a reference that follows; a critic. Files' headers apart."""
    lora, trained = recipe.train.lora, total_parameters(architecture)
    if lora is not None:
        trained = adapter_parameters(architecture, ParallelLayout(), 0, lora).total
    total = STATE_BYTES * trained
    if isinstance(recipe, Recipe):
        algorithm = recipe.algorithm
        if algorithm.kl.coefficient and algorithm.reference.update_every_steps is not None:
            total += 4 * trained
        if algorithm.critic is not None:
            total += STATE_BYTES * total_parameters(critic_of(critic or architecture))
    return total


def runs_here(recipe: AnyRecipe) -> bool:
    """Whether a plan may take this machine's file systems for the run's, as far as it can tell."""
    return recipe.cluster.gpu is None and Path(recipe.model.path).is_dir()


def disk_problems(
    recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None
) -> Iterator[Problem]:
    """Not even one checkpoint fits where they go, on this machine."""
    each, free = checkpoint_bytes(recipe, architecture, critic), _free_bytes(recipe)
    if each > free:
        yield Problem(
            "checkpoint.directory",
            given=f"{byte_text(free)} free in {checkpoint_directory(recipe)}",
            needed=f"{byte_text(each)} for one checkpoint",
            fix="a directory on a larger file system",
        )


def disk_advice(recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None) -> Iterator[Problem]:
    """Not all of the checkpoints that are kept fit; the new one is written before the oldest is deleted."""
    if not runs_here(recipe) and not Path(recipe.checkpoint.directory or "no such directory").is_dir():
        return
    keep, best = recipe.checkpoint.keep_last, recipe.checkpoint.keep_best is not None
    each, free = checkpoint_bytes(recipe, architecture, critic), _free_bytes(recipe)
    directory = checkpoint_directory(recipe)
    saved = len(list(directory.glob("step_*"))) if directory.is_dir() else 0
    needed = max(1, keep + best + 1 - saved) * each
    if needed > free:
        kept = f"{keep} checkpoints{', the best' if best else ''} and the next"
        yield Problem(
            "checkpoint.keep_last",
            given=f"{byte_text(free)} free in {directory}, on this machine",
            needed=f"{byte_text(needed)} more for {kept}, {byte_text(each)} each",
            fix="a directory on a larger file system, or a lower keep_last",
        )


def _free_bytes(recipe: AnyRecipe) -> int:
    """Free space of the file system that checkpoints go to."""
    directory = checkpoint_directory(recipe).absolute()
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
