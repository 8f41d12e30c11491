"""Memory of a recipe, device by device and phase by phase: models, activations, logits, batch, engine, buckets.

What takes turns on a device is counted where it is: parts that train.offload moves away, and an engine's weights and
cache while SGLang's memory saver has them released. Optimizer steps need less than the passes before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import Machines
from megagrpo.plan.memory.engine import GIB, EngineMemory, engine_memory
from megagrpo.plan.memory.parts import DeviceMemory, Part, PhaseMemory
from megagrpo.plan.memory.training_rank import CONTEXT_BYTES, TrainingRank, bucket_bytes
from megagrpo.recipe.defaults import DevicePlan, plan_devices
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.weights.families.architecture import Architecture

ENGINE_NCCL_BYTES = GIB // 2
"""Of an engine's one group. Assumed."""


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
    planned = plan_devices(recipe, device)
    card = machines.gpu.memory_bytes if machines and device == "cuda" else None
    engine = None
    if isinstance(recipe, Recipe) and recipe.rollout.engine != "external":
        engine = engine_memory(recipe, architecture, card, device)
    held = []
    for (stage, engines), devices in _kinds(recipe, planned).items():
        kind = _Device(recipe, architecture, device, stage, engines, engine, critic, expert_imbalance)
        if phases := tuple(_phases(kind)):
            held.append(DeviceMemory(_name(recipe, stage, engines), tuple(devices), phases))
    return tuple(held)


def _kinds(recipe: AnyRecipe, planned: DevicePlan) -> dict[tuple[int | None, int], list[int]]:
    """Devices by their pipeline stage (None: no training) and number of engines."""
    engines = [0] * planned.bundles
    for bundles in planned.bundles_of_engine:
        for bundle in bundles:
            engines[bundle] += 1
    layout = recipe.train.layout.parallel()
    ranks = layout.ranks
    per_stage = ranks // layout.pipeline
    found: dict[tuple[int | None, int], list[int]] = {}
    for bundle, count in enumerate(engines):
        stage = bundle // per_stage if bundle < ranks else None  # ranks lie on the first devices, in order
        found.setdefault((stage, count), []).append(bundle)
    return found


def _name(recipe: AnyRecipe, stage: int | None, engines: int) -> str:
    of_engine = "" if engines == 0 else "engine" if engines == 1 else f"{engines} engines"
    if stage is None:
        return of_engine or "unused"
    pipeline = recipe.train.layout.pipeline
    training = "training" if pipeline == 1 else f"training, stage {stage} of {pipeline}"
    return f"{training}, {of_engine}" if of_engine else training


@dataclass(frozen=True)
class _Device:
    """A kind of device. `engines` is how many have a rank on it."""

    recipe: AnyRecipe
    architecture: Architecture
    device: str
    stage: int | None
    engines: int
    engine: EngineMemory | None
    critic: Architecture | None
    expert_imbalance: float

    @cached_property
    def trainer(self) -> TrainingRank | None:
        if self.stage is None:
            return None
        return TrainingRank(self.recipe, self.architecture, self.device, self.stage, self.critic, self.expert_imbalance)


def _phases(device: _Device) -> Iterator[PhaseMemory]:
    trainer, recipe = device.trainer, device.recipe
    if trainer is None and not device.engines:
        return
    if not isinstance(recipe, Recipe):
        if trainer:
            yield PhaseMemory("update", tuple(trainer.update()))
        return
    in_turns = recipe.cluster.placement == "colocated"
    saved = in_turns and bool((recipe.rollout.sglang.model_extra or {}).get("enable_memory_saver"))
    saved = saved and recipe.rollout.engine == "sglang"

    def phase(name: str, training: Iterable[Part], *, weights: bool, cache: bool) -> PhaseMemory:
        engine = _engine_parts(device, name, weights=weights or not saved, cache=cache or not saved)
        return PhaseMemory(name, (*training, *engine))

    yield phase("rollout", trainer.rollout(in_turns) if trainer else (), weights=True, cache=True)
    if trainer is None or trainer.passes_before_update:
        yield phase("logprobs", trainer.logprobs() if trainer else (), weights=False, cache=False)
    yield phase("update", trainer.update() if trainer else (), weights=False, cache=False)
    yield phase("weight_sync", trainer.weight_sync(in_turns) if trainer else (), weights=True, cache=False)


def _engine_parts(device: _Device, phase: str, *, weights: bool, cache: bool) -> Iterator[Part]:
    recipe, engine, count = device.recipe, device.engine, device.engines
    if engine is None or not count or not isinstance(recipe, Recipe):
        return
    sglang = recipe.rollout.engine == "sglang"
    fewer = ("rollout.engines",) if count > 1 else ()
    idle = device.stage is not None and phase != "rollout"
    saver = ("rollout.sglang.enable_memory_saver",) if idle and sglang else ()
    if weights:
        smaller = ("rollout.layout.tensor",) if sglang else ("rollout.engine",)
        yield Part("engine weights", count * engine.weights, saver + fewer + smaller)
    on_cuda = device.device == "cuda"
    if sglang and cache:
        lowered = "rollout.sglang.mem_fraction_static" if on_cuda else "rollout.sglang.max_total_tokens"
        yield Part("engine cache", count * engine.cache, (*saver, *fewer, lowered))
    elif not sglang and (on_cuda or phase == "rollout"):  # on GPUs torch's allocator keeps what was freed
        lowered = "rollout.requests_at_once"
        yield Part("engine cache", count * engine.cache, (*fewer, lowered, "rollout.response_tokens_max"))
    if on_cuda:
        nccl = ENGINE_NCCL_BYTES if sglang and recipe.rollout.layout.tensor > 1 else 0
        lowered = "rollout.sglang.chunked_prefill_size" if sglang else "rollout.requests_at_once"
        yield Part("engine graphs, activations", count * engine.working, (lowered,))
        yield Part("engine context, NCCL", count * (CONTEXT_BYTES + nccl))
    if phase == "weight_sync" and (buckets := bucket_bytes(recipe, engine.weights)):
        yield Part("engine sync buckets", count * buckets, ("weights.bucket_bytes",))
