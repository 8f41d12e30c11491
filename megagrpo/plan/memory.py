"""Memory of a recipe by kind of device and phase, as lists of named parts, which terminal, page, JSON and search read.

What takes turns on a device is counted where it is: parts that train.offload moves away, and an engine's weights and
cache while SGLang's memory saver has them released. Optimizer steps need less than the passes before them. docs/plan.md
says how exact each part is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.activations import Pass, forward_bytes, logits_bytes, stage_bytes, working_bytes
from megagrpo.plan.assumptions import Assumptions, longest_sequence, minibatch_sequences
from megagrpo.plan.engine import GIB, MIB, EngineMemory, engine_memory
from megagrpo.plan.machines import Machines
from megagrpo.plan.parameters import (
    RankParameters,
    Stage,
    adapter_parameters,
    fused_layers,
    rank_parameters,
    stages,
)
from megagrpo.recipe.defaults import DevicePlan, dtype_name, plan_devices
from megagrpo.recipe.schema import AnyRecipe, Recipe, TrainConfig
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.families.architecture import Architecture, critic_of

CONTEXT_BYTES = 512 * MIB
"""CUDA's context and libraries' workspaces of each process. Assumed: 0.4 to 0.6 GiB on recent GPUs."""
TRAINING_NCCL_BYTES, ENGINE_NCCL_BYTES = GIB, GIB // 2
"""Buffers of a training rank's process groups, and of an engine's one group. Assumed; NCCL takes some MiB for each peer
and channel."""
FRAGMENTATION = 0.05
"""What torch's allocator cannot use, of all that passes allocate: microbatches differ in length. Assumed."""
TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 37, 72
"""A token of the loaded batch (four int64, a float32, a bool), and a response token on the last stage (six int64, six
float32)."""

LOWERED_BY: Mapping[str, tuple[str, ...]] = {
    "parameters": ("train.layout.tensor", "train.layout.pipeline"),
    "gradients": ("train.layout.tensor", "train.layout.pipeline", "train.lora"),
    "optimizer": ("train.layout.data", "train.layout.tensor", "train.layout.pipeline", "train.lora"),
    "reference": ("train.layout.tensor", "train.layout.pipeline", "algorithm.kl.coefficient"),
    "critic": ("train.layout.tensor", "train.layout.pipeline", "train.layout.data"),
}


@dataclass(frozen=True)
class Part:
    """One item on a device during a phase. `lowered_by` names recipe fields that make it smaller, best first."""

    name: str
    bytes: int
    lowered_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class PhaseMemory:
    """What lies on a device at the fullest moment of a phase: rollout, logprobs, update or weight_sync."""

    phase: str
    parts: tuple[Part, ...]

    @cached_property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @cached_property
    def largest(self) -> list[Part]:
        """Its parts, the largest first, without empty ones."""
        return sorted((part for part in self.parts if part.bytes), key=lambda part: part.bytes, reverse=True)


@dataclass(frozen=True)
class DeviceMemory:
    """Devices that hold equally much, as those of one pipeline stage. `devices` are indices in the device plan."""

    name: str
    devices: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]

    @cached_property
    def fullest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.bytes)


def memory(
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines | None,
    device: str,
    critic: Architecture | None = None,
    expert_imbalance: float = Assumptions().expert_imbalance,
) -> tuple[DeviceMemory, ...]:
    """One entry for each kind of device, in their order. `device` is cpu or cuda; without `machines` an engine's cache
    is as large as the recipe could use. All sequences are taken to be as long as the recipe allows. `critic` is the
    model of algorithm.critic.path, if it is another; `expert_imbalance` as in Assumptions.
    """
    return tuple(each_memory(recipe, architecture, machines, device, critic, expert_imbalance))


def each_memory(
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines | None,
    device: str,
    critic: Architecture | None,
    expert_imbalance: float,
) -> Iterator[DeviceMemory]:
    """The entries of `memory`, one after the other, for a search that often has seen enough after the first."""
    card = machines.gpu.memory_bytes if machines and device == "cuda" else None
    engine = None
    if isinstance(recipe, Recipe) and recipe.rollout.engine != "external":
        engine = _Engine(recipe, engine_memory(recipe, architecture, card, device), device)
    for (stage, engines), devices in _kinds(recipe, plan_devices(recipe, device)).items():
        rank = None
        if stage is not None:
            rank = _Rank(recipe, architecture, device, stage, critic, expert_imbalance)
        if rank or engines:
            phases = tuple(_phases(recipe, rank, engine if engines else None, engines))
            yield DeviceMemory(_name(recipe, stage, engines), tuple(devices), phases)


def _kinds(recipe: AnyRecipe, planned: DevicePlan) -> dict[tuple[int | None, int], list[int]]:
    """Devices by their pipeline stage (None: no training) and number of engines."""
    engines = [0] * planned.bundles
    for bundles in planned.bundles_of_engine:
        for bundle in bundles:
            engines[bundle] += 1
    ranks = len(planned.bundle_of_rank)
    per_stage = ranks // recipe.train.layout.pipeline
    found: dict[tuple[int | None, int], list[int]] = {}
    for bundle, count in enumerate(engines):
        stage = bundle // per_stage if bundle < ranks else None  # ranks lie on the first devices, in order
        found.setdefault((stage, count), []).append(bundle)
    return found


def _name(recipe: AnyRecipe, stage: int | None, engines: int) -> str:
    names = []
    if stage is not None:
        pipeline = recipe.train.layout.pipeline
        names.append("training" if pipeline == 1 else f"training, stage {stage} of {pipeline}")
    if engines:
        names.append("engine" if engines == 1 else f"{engines} engines")
    return ", ".join(names)


def _phases(recipe: AnyRecipe, rank: _Rank | None, engine: _Engine | None, engines: int) -> Iterator[PhaseMemory]:
    names = ["rollout", "logprobs", "update", "weight_sync"] if isinstance(recipe, Recipe) else ["update"]
    if rank is not None and not rank.passes_before_update and "logprobs" in names:
        names.remove("logprobs")
    for name in names:
        parts = [*(rank.parts(name) if rank else ()), *(engine.parts(name, engines, bool(rank)) if engine else ())]
        yield PhaseMemory(name, tuple(parts))


# --- training ranks --------------------------------------------------------------------------------------------------


def model_parts(
    recipe: AnyRecipe, architecture: Architecture, stage: int, device: str, critic: Architecture | None = None
) -> dict[str, int]:
    """Bytes of the models on every rank of a pipeline stage, by the names that train.offload has for them.

    Padding is not counted: Megatron aligns each parameter in its buffers to 64 elements, and each buffer's end.
    """
    train, layout = recipe.train, recipe.train.layout.parallel()
    fused, item = fused_layers(train, device), ITEM_BYTES[dtype_name(recipe, device)]
    held = trained = rank_parameters(architecture, layout, stage, fused)
    weights = held.total
    if train.lora is not None:
        trained = adapter_parameters(architecture, layout, stage, train.lora)
        weights += trained.total
    found = {"parameters": weights * item, "gradients": 4 * trained.total}  # summed in float32, whole on every rank
    found["optimizer"] = _optimizer_bytes(trained, train, layout, item)
    if isinstance(recipe, Recipe):
        algorithm = recipe.algorithm
        if algorithm.kl.coefficient > 0:
            average = algorithm.reference.update_every_steps is not None and algorithm.reference.share < 1
            exact = 4 if average and item < 4 else 0  # an average is kept in float32 besides
            found["reference"] = trained.total * (item + exact)
        if algorithm.critic is not None:  # adapters are never on it
            values = rank_parameters(critic_of(critic or architecture), layout, stage, fused)
            found["critic"] = values.total * (item + 4) + _optimizer_bytes(values, train, layout, item)
    return {name: size for name, size in found.items() if size}


def _optimizer_bytes(trained: RankParameters, train: TrainConfig, layout: ParallelLayout, item: int) -> int:
    """Adam's two moments in float32, and float32 copies of bfloat16 weights; a data rank's share of them with the
    distributed optimizer."""
    owned = trained.total
    if train.distributed_optimizer:
        owned = -(-(trained.total - trained.experts) // (layout.data * layout.context))
        owned += -(-trained.experts // layout.expert_data)
    return owned * (8 + (4 if item < 4 else 0))


def bucket_bytes(recipe: AnyRecipe, weights: int) -> int:
    """At each end of a weight sync: two buckets (weights/transport/buckets.py), none larger than the `weights` there.
    Files need none, and external engines get files unless the recipe says otherwise."""
    if not isinstance(recipe, Recipe) or recipe.weights.transfer == "disk":
        return 0
    by_files = recipe.rollout.engine == "external" and recipe.weights.transfer == "auto"
    return 0 if by_files else 2 * min(recipe.weights.bucket_bytes, weights)


@dataclass(frozen=True)
class _Rank:
    """A training rank of one pipeline stage."""

    recipe: AnyRecipe
    architecture: Architecture
    device: str
    index: int
    critic: Architecture | None
    expert_imbalance: float

    def parts(self, phase: str) -> Iterator[Part]:
        """All that it holds in a phase."""
        used = 0
        yield from self._models(phase)
        if phase != "rollout":
            yield self._batch
        if phase == "logprobs":
            yield from self._without_gradients
        elif phase == "update":
            yield from self._with_gradients
        elif phase == "weight_sync":
            buckets = list(self._sync())
            used = sum(part.bytes for part in buckets)
            yield from buckets
        if self.device == "cuda":
            # Torch keeps the memory of passes that are over; an engine on the same device does not get it. Moving
            # anything away empties torch's cache as well.
            left = self._passing - used
            if phase in ("rollout", "weight_sync") and not self._away(phase) and left > 0:
                yield Part("kept by torch's allocator", left, self._movable)
            nccl = TRAINING_NCCL_BYTES if self.layout.ranks > 1 else 0
            yield Part("context, NCCL, fragmentation", CONTEXT_BYTES + nccl + int(FRAGMENTATION * self._passing))

    @cached_property
    def layout(self) -> ParallelLayout:
        return self.recipe.train.layout.parallel()

    @cached_property
    def stage(self) -> Stage:
        return stages(self.architecture.layers, self.layout)[self.index]

    @cached_property
    def passes_before_update(self) -> bool:
        if not isinstance(self.recipe, Recipe):
            return False
        algorithm = self.recipe.algorithm
        return algorithm.computes_old_logprobs or algorithm.kl.coefficient > 0 or algorithm.critic is not None

    # --- models

    @cached_property
    def _model_parts(self) -> list[Part]:
        sizes = model_parts(self.recipe, self.architecture, self.index, self.device, self.critic)
        return [Part(name, size, self._that_lower(name)) for name, size in sizes.items()]

    def _models(self, phase: str) -> Iterator[Part]:
        away = self._away(phase)
        for part in self._model_parts:
            if part.name in away:
                continue
            moves = phase == "rollout" or (phase == "weight_sync" and part.name != "parameters")
            yield Part(part.name, part.bytes, self._movable + part.lowered_by) if moves else part

    def _away(self, phase: str) -> list[str]:
        """Parts that train.offload has moved to the host: in a weight sync the weights are back."""
        if phase not in ("rollout", "weight_sync"):
            return []
        return [part for part in self.recipe.train.offload if phase == "rollout" or part != "parameters"]

    @cached_property
    def _movable(self) -> tuple[str, ...]:
        """What lowers parts that can be away; engines on devices of their own leave nothing to move for."""
        colocated = isinstance(self.recipe, Recipe) and self.recipe.cluster.placement == "colocated"
        return ("train.offload",) if colocated else ()

    def _that_lower(self, name: str) -> tuple[str, ...]:
        train, fields = self.recipe.train, list(LOWERED_BY[name])
        if self.architecture.experts is not None:
            fields.insert(0, "train.layout.expert")
        if name == "optimizer" and not train.distributed_optimizer:
            fields[fields.index("train.layout.data")] = "train.distributed_optimizer"
        return tuple(field for field in fields if field != "train.lora" or train.lora is None)

    # --- batch and passes

    @cached_property
    def _sequences(self) -> int:
        """Sequences of a data rank in one minibatch."""
        return -(-minibatch_sequences(self.recipe) // self.layout.data)

    @cached_property
    def _batch(self) -> Part:
        recipe, train = self.recipe, self.recipe.train
        grpo = isinstance(recipe, Recipe)
        steps = recipe.algorithm.minibatches if isinstance(recipe, Recipe) else 1
        tokens = self._sequences * steps * longest_sequence(recipe) // self.layout.context
        each = TOKEN_BYTES + (RESPONSE_TOKEN_BYTES if self.stage.head else 0)
        if (train.logprob_tokens_per_microbatch or 0) > train.tokens_per_microbatch:
            each *= 2  # the batch again, in larger microbatches
        per_step = "rollout.prompts_per_step" if grpo else "data.examples_per_step"
        return Part("batch", tokens * each, ("train.layout.data", per_step))

    def _pass(self, tokens_per_microbatch: int) -> Pass:
        recipe, train = self.recipe, self.recipe.train
        longest = longest_sequence(recipe)
        whole = -(-self._sequences * longest // self.layout.context)
        return Pass(
            self.architecture,
            self.layout,
            ITEM_BYTES[dtype_name(recipe, self.device)],
            min(tokens_per_microbatch, whole),
            longest,
            self.device,
            fused_layers(train, self.device),
            train.recompute,
            train.lora is not None,
            self.expert_imbalance,
        )

    @cached_property
    def _with_gradients(self) -> tuple[Part, ...]:
        """Activations of all microbatches on the way, and the larger of logits and a layer's backward pass."""
        train = self.recipe.train
        work = self._pass(train.tokens_per_microbatch)
        sequences_at_once = train.tokens_per_microbatch * self.layout.context // work.longest
        kept = stage_bytes(work, self.stage, self.index, -(-self._sequences // max(1, sequences_at_once)))
        layer, logits = working_bytes(work, self.stage), 0
        if self.stage.head:
            logits = logits_bytes(work, work.tokens, gradients=True, entropy=isinstance(self.recipe, Recipe))
        shrinks = train.tokens_per_microbatch * self.layout.context > work.longest
        microbatch = ("train.tokens_per_microbatch",) if shrinks else ()
        split = (*microbatch, "train.layout.context", "train.layout.tensor")
        largest = Part("logits", logits, split) if logits > layer else Part("one layer's backward pass", layer, split)
        again = () if train.recompute == "full" else ("train.recompute",)
        return Part("activations", kept, again + split), largest

    @cached_property
    def _without_gradients(self) -> tuple[Part, ...]:
        train = self.recipe.train
        work = self._pass(train.logprob_tokens_per_microbatch or train.tokens_per_microbatch)
        layer, logits = forward_bytes(work, self.stage), 0
        if self.stage.head:
            logits = logits_bytes(work, work.tokens, gradients=False, entropy=False) + work.hidden_bytes
        given = "logprob_tokens" if train.logprob_tokens_per_microbatch else "tokens"
        lowered = (f"train.{given}_per_microbatch", "train.layout.context", "train.layout.tensor")
        return (Part("logits", logits, lowered) if logits > layer else Part("one layer", layer, lowered),)

    @cached_property
    def _passing(self) -> int:
        """The most that passes of a step allocate at once."""
        without = self._without_gradients if self.passes_before_update else ()
        return max(sum(part.bytes for part in parts) for parts in (self._with_gradients, without))

    # --- weight sync

    def _sync(self) -> Iterator[Part]:
        recipe = self.recipe
        parameters = next(part.bytes for part in self._model_parts if part.name == "parameters")
        if used := bucket_bytes(recipe, parameters):
            yield Part("sync buckets", used, ("weights.bucket_bytes",))
        if recipe.train.lora is not None:
            # Copies of the matrices that adapters are added to: at most all that is not vocabulary.
            held = rank_parameters(self.architecture, self.layout, self.index, fused_layers(recipe.train, self.device))
            vocabulary = (held.embedding + held.head) * ITEM_BYTES[dtype_name(recipe, self.device)]
            yield Part("merged weights", parameters - vocabulary, ("train.layout.tensor", "train.layout.pipeline"))


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Engine:
    """A rank of an engine."""

    recipe: Recipe
    held: EngineMemory
    device: str

    def parts(self, phase: str, count: int, beside_training: bool) -> Iterator[Part]:
        """All that ranks of `count` engines on one device hold in a phase."""
        recipe, held, on_cuda = self.recipe, self.held, self.device == "cuda"
        sglang, idle = recipe.rollout.engine == "sglang", beside_training and phase != "rollout"
        saves = (recipe.rollout.sglang.model_extra or {}).get("enable_memory_saver")
        released = sglang and bool(saves) and recipe.cluster.placement == "colocated" and phase != "rollout"
        saver = ("rollout.sglang.enable_memory_saver",) if idle and sglang else ()
        fewer = ("rollout.engines",) if count > 1 else ()
        if not released or phase == "weight_sync":
            smaller = "rollout.layout.tensor" if sglang else "rollout.engine"
            yield Part("engine weights", count * held.weights, (*saver, *fewer, smaller))
        if sglang and not released:
            lowered = "rollout.sglang.mem_fraction_static" if on_cuda else "rollout.sglang.max_total_tokens"
            yield Part("engine cache", count * held.cache, (*saver, *fewer, lowered))
        elif not sglang and (on_cuda or phase == "rollout"):  # on GPUs torch's allocator keeps what was freed
            lowered = "rollout.requests_at_once"
            yield Part("engine cache", count * held.cache, (*fewer, lowered, "rollout.response_tokens_max"))
        if on_cuda:
            nccl = ENGINE_NCCL_BYTES if sglang and recipe.rollout.layout.tensor > 1 else 0
            lowered = "rollout.sglang.chunked_prefill_size" if sglang else "rollout.requests_at_once"
            yield Part("engine graphs, activations", count * held.working, (lowered,))
            yield Part("engine context, NCCL", count * (CONTEXT_BYTES + nccl))
        if phase == "weight_sync" and (buckets := bucket_bytes(recipe, held.weights)):
            yield Part("engine sync buckets", count * buckets, ("weights.bucket_bytes",))
