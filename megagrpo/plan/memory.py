"""Memory of a recipe by kind of device and phase, as lists of named parts, which terminal, page, JSON and search read.

A phase counts only the parts that are on the device then: train.offload moves parts away, and SGLang's memory saver
releases an engine's weights and cache. Optimizer steps need less than the passes before them. docs/plan.md says how
exact each part is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.activations import RankPass
from megagrpo.plan.assumptions import longest_sequence, sampled_tokens_max
from megagrpo.plan.case import Case
from megagrpo.plan.engine import GIB, MIB, EngineMemory
from megagrpo.plan.other_models import (
    bytes_beside,
    heads_again,
    offloaded_bytes,
    output_bytes,
    reads_apart,
    stages_within,
    teacher_bytes,
)
from megagrpo.plan.parameters import (
    BLOCK_ELEMENT_BYTES,
    RankParameters,
    Stage,
    adapter_parameters,
    fetched_elements,
    largest_share,
    matrices,
    rank_parameters,
    stages,
)
from megagrpo.recipe.defaults import kept_ids, maps_gpu_memory, replayed_routes
from megagrpo.recipe.schema import AnyRecipe, Recipe, TrainConfig
from megagrpo.types import GATHERED_IDS
from megagrpo.weights.families.architecture import Architecture, critic_of

CONTEXT_BYTES = 512 * MIB
"""CUDA's context and libraries' workspaces of each process. Assumed: 0.4 to 0.6 GiB on recent GPUs."""
TRAINING_NCCL_BYTES, ENGINE_NCCL_BYTES = GIB, GIB // 2
"""Buffers of a training rank's process groups, and of an engine's one group. Assumed; NCCL takes some MiB for each peer
and channel."""
FRAGMENTATION = 0.05
"""Share of passes' memory that torch's allocator cannot use: microbatches differ in length. Assumed."""
TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 37, 72
"""A token of the loaded batch (four int64, a float32, a bool), and a response token on the last stage (six int64, six
float32)."""

SERVED = "weights as served"
"""Name of the copy of the weights with train.quantization."""
LOWERED_BY: Mapping[str, tuple[str, ...]] = {
    "parameters": ("train.layout.tensor", "train.layout.pipeline"),
    "gradients": ("train.layout.tensor", "train.layout.pipeline", "train.lora"),
    "optimizer": ("train.layout.data", "train.layout.tensor", "train.layout.pipeline", "train.lora"),
    "reference": ("train.offload", "train.layout.tensor", "train.layout.pipeline", "algorithm.kl.coefficient"),
    "critic": ("train.layout.tensor", "train.layout.pipeline", "train.layout.data"),
}


PHASES = ("rollout", "logprobs", "update", "weight_sync")


@dataclass(frozen=True)
class Part:
    """One item on a device during a phase. `lowered_by` names recipe fields that make it smaller, best first.

    of_rank: the item is tensors of the training rank there. `memory/allocated_max/{phase}` measures their sum.
    """

    name: str
    bytes: int
    lowered_by: tuple[str, ...] = ()
    of_rank: bool = False


@dataclass(frozen=True)
class PhaseMemory:
    """The parts on a device at the fullest moment of one of PHASES."""

    phase: str
    parts: tuple[Part, ...]

    @cached_property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @cached_property
    def largest(self) -> list[Part]:
        return sorted((part for part in self.parts if part.bytes), key=lambda part: part.bytes, reverse=True)


@dataclass(frozen=True)
class DeviceMemory:
    """Devices that hold equally much, such as those of one pipeline stage. `devices` are indices in the device plan."""

    name: str
    devices: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]

    @cached_property
    def fullest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.bytes)

    def bytes_of(self, phase: str) -> int:
        return sum(held.bytes for held in self.phases if held.phase == phase)


def memory(case: Case) -> Iterator[DeviceMemory]:
    """Yields an entry for each kind of device, in their order. Assumes all sequences as long as allowed."""
    recipe, planned, pipeline, engine = case.recipe, case.device_plan, case.layout.pipeline, None
    if isinstance(recipe, Recipe) and recipe.rollout.kind.started_by_us:
        engine = recipe.rollout.kind.memory(case)
    ranks = len(planned.bundle_of_rank)
    for (stage, count), devices in _kinds(planned.bundles, ranks, pipeline, planned.bundles_of_engine).items():
        names: list[str] = []
        parts: dict[str, list[Part]] = {phase: [] for phase in PHASES}
        if stage is not None:
            names.append("training" if pipeline == 1 else f"training, stage {stage} of {pipeline}")
            parts = _rank_parts(case, stage)
        if engine and count:
            names.append("engine" if count == 1 else f"{count} engines")
            for phase in parts:
                parts[phase] += _engine_parts(case, engine, phase, count, stage is not None)
        if case.device == "cuda" and (others := mapping_processes(case, count)):
            for phase in parts:
                parts[phase].append(Part("contexts of engines on other GPUs", others * CONTEXT_BYTES))
        if names:
            phases = (PhaseMemory(phase, tuple(held)) for phase, held in parts.items())
            yield DeviceMemory(", ".join(names), devices, tuple(phases))
    # Devices of other models without working memory, which these fit to what is free.
    for where, devices in zip(case.models_beside, planned.bundles_of_model, strict=True):
        weights = bytes_beside(case.grpo, where, case.device)
        if devices and weights is not None:
            context = (Part("context", CONTEXT_BYTES),) if case.device == "cuda" else ()
            held = (Part("weights", weights, (f"{where}.dtype",)), *context)
            yield DeviceMemory(where, devices, tuple(PhaseMemory(at, held) for at in PHASES))


@lru_cache(maxsize=256)
def _kinds(
    devices: int, ranks: int, pipeline: int, devices_of_engine: tuple[tuple[int, ...], ...]
) -> dict[tuple[int | None, int], tuple[int, ...]]:
    """Returns the devices by pipeline stage of their rank (None without a rank) and number of engines."""
    engines, kinds = Counter(chain.from_iterable(devices_of_engine)), defaultdict(list)
    for device in range(devices):
        stage = device // (ranks // pipeline) if device < ranks else None  # ranks lie on the first devices, in order
        kinds[stage, engines[device]].append(device)
    return {kind: tuple(alike) for kind, alike in kinds.items()}


# --- training ranks --------------------------------------------------------------------------------------------------


def model_parts(case: Case, stage: int) -> dict[str, int]:
    """Returns the bytes of the models on every rank of a pipeline stage, by their names in train.offload.

    Padding is not counted: Megatron aligns each parameter in its buffers to 64 elements, and each buffer's end.
    """
    recipe, item, train = case.recipe, case.item_bytes, case.recipe.train
    policy, *critics = _trained(case, case.layout, stage)
    trained, gradient_bytes = policy.trained.total, 2 if train.gradient_dtype == "bfloat16" else 4
    adapters = trained if train.lora is not None else 0
    sizes = {
        "parameters": (policy.held.total + adapters + policy.padding) * item,
        "gradients": gradient_bytes * (trained + policy.padding),
        "optimizer": policy.optimizer_bytes(train, case.layout, item),
    }
    if isinstance(recipe, Recipe) and recipe.keeps_reference:
        average = recipe.algorithm.reference.update_every_steps is not None and recipe.algorithm.reference.share < 1
        sizes["reference"] = trained * (item + (4 if average and item < 4 else 0))  # averages are in float32 besides
    for critic in critics:
        passing = (critic.held.total + critic.padding) * (item + gradient_bytes)
        sizes["critic"] = passing + critic.optimizer_bytes(train, case.layout, item)
    return {name: size for name, size in sizes.items() if size}


def host_bytes(case: Case) -> tuple[int, int, int]:
    """Returns the host bytes on the fullest node: of teachers and train.offload's parts (gradients take none: zeros
    replace them), of copies for checkpoints, and of copies of models to export during training. Ranks with the same
    weights copy a share each."""
    recipe, arch, layout = case.recipe, case.architecture, case.layout
    away = set(recipe.train.offload) - {"gradients"}
    state_bytes = 8 if recipe.train.optimizer.moment_dtype == "bfloat16" else 12
    item_bytes = 0 if recipe.checkpoint.export_every_steps is None else case.item_bytes
    of_stages = [
        (
            sum(size for name, size in model_parts(case, stage).items() if name in away) + offloaded_bytes(case, stage),
            saved_bytes(case, layout, stage, state_bytes),
            item_bytes * rank_parameters(arch, layout, stage, case.fused_layers).share(layout),
        )
        for stage in range(layout.pipeline)
    ]
    ranks = min(layout.ranks, recipe.cluster.gpus_per_node)
    moved, saved, exported = (ranks * max(sizes) for sizes in zip(*of_stages, strict=True))
    return moved, saved, exported


def saved_bytes(case: Case, layout: ParallelLayout, stage: int, state_bytes: int) -> int:
    """Returns the bytes that a data rank of a stage saves: main weights and moments, a moving reference, the critic's.

    `state_bytes`: bytes of an element with Adam's two moments. Muon has one of a matrix, in float32.
    """
    policy, *critics = _trained(case, layout, stage)
    models = (policy, *critics)
    total = sum(state_bytes * of.trained.share(layout) - 4 * of.by_muon.share(layout) for of in models)
    recipe = case.recipe
    if isinstance(recipe, Recipe) and recipe.keeps_reference and recipe.algorithm.reference.update_every_steps:
        total += 4 * policy.trained.share(layout)
    return total


@dataclass(frozen=True)
class _Trained:
    """A model that every rank of a pipeline stage holds and trains; with adapters, `trained` are theirs alone.

    Muon trains the matrices `by_muon`, of which the fullest data rank owns `owned` elements. All buffers hold `padding`
    besides, because each data rank's part of them is as long as the fullest's.
    """

    held: RankParameters
    trained: RankParameters
    by_muon: RankParameters
    owned: int
    padding: int

    def optimizer_bytes(self, train: TrainConfig, layout: ParallelLayout, item: int) -> int:
        """Returns the bytes of Adam's two moments or Muon's one, and of float32 copies of bfloat16 weights. With the
        distributed optimizer, a data rank holds its share of Adam's, and those of its own Muon matrices."""
        trained, muon, copies = self.trained, self.by_muon, 4 if item < 4 else 0
        by_adam = replace(trained, dense=trained.dense - muon.dense, experts=trained.experts - muon.experts)
        owned = by_adam.share(layout) if train.distributed_optimizer else by_adam.total
        moments = 4 if train.optimizer.moment_dtype == "bfloat16" else 8
        return owned * (moments + copies) + self.owned * (4 + copies)


def _trained(case: Case, layout: ParallelLayout, stage: int) -> Iterator[_Trained]:
    """Yields the policy, and the critic if there is one. Adapters are never on a critic."""
    train, models, replicas = case.recipe.train, [case.architecture], layout.data * layout.context
    if isinstance(case.recipe, Recipe) and case.recipe.algorithm.critic is not None:
        models.append(critic_of(case.critic or case.architecture))
    for arch in models:
        held = trained = rank_parameters(arch, layout, stage, case.fused_layers)
        if train.lora is not None and arch is case.architecture:
            trained = adapter_parameters(arch, layout, stage, train.lora)
        muon = train.optimizer.kind == "muon"
        dense, experts = matrices(arch, layout, stage, case.fused_layers) if muon else ((), ())
        by_muon, padding = RankParameters(0, 0, sum(dense), sum(experts)), 0
        owned = by_muon.total
        if muon and train.distributed_optimizer:
            shares = largest_share(dense, replicas), largest_share(experts, layout.expert_data)
            owned, padding = sum(shares), shares[0] * replicas + shares[1] * layout.expert_data - owned
        yield _Trained(held, trained, by_muon, owned, padding)


def bucket_bytes(recipe: AnyRecipe, weights: int) -> int:
    """Returns the bytes of two buckets at each end of a weight sync (weights/transport/ends.py), none larger than
    the `weights` there. Files need none."""
    if not isinstance(recipe, Recipe) or recipe.transfer == "disk":
        return 0
    return 2 * min(recipe.weights.bucket_bytes, weights)


def pass_of(case: Case) -> RankPass:
    """Returns the largest pass of a minibatch's microbatches through a training rank's layers."""
    recipe, arch, layout, train = case.recipe, case.architecture, case.layout, case.recipe.train
    longest, again = longest_sequence(recipe), train.recomputed
    return RankPass(
        layout,
        arch.hidden,
        case.item_bytes,
        min(train.tokens_per_microbatch, case.rank_tokens),
        longest,
        case.device,
        case.fused_layers,
        again.modules,
        adapters=train.lora is not None,
        expert_imbalance=case.assumptions.expert_imbalance,
        architecture=arch,
        layers_again=again.layers,
        outputs_freed=bool(train.megatron.get("deallocate_pipeline_outputs")),
    )


def _rank_parts(case: Case, index: int) -> dict[str, list[Part]]:
    """Returns all parts of a training rank of pipeline stage `index`, by phase."""
    recipe, arch, layout, train = case.recipe, case.architecture, case.layout, case.recipe.train
    stage, sequences, work = stages(len(arch.layers), layout)[index], case.rank_sequences, pass_of(case)
    phases: Sequence[str] = ("update",)
    movable: tuple[str, ...] = ()  # what lowers parts that can be away; engines on devices of their own need no room
    if isinstance(recipe, Recipe):
        before_update = recipe.algorithm.computes_old_logprobs or recipe.algorithm.critic is not None
        before_update = before_update or recipe.keeps_reference or bool(recipe.teachers_on_ranks)
        phases = [phase for phase in PHASES if before_update or phase != "logprobs"]
        movable = ("train.offload",) if recipe.cluster.placement == "colocated" else ()
    served = _served_weights(case, index)
    with_gradients = _with_gradients(recipe, work, stage, index, sequences) + served
    without: list[Part] = []
    if "logprobs" in phases:
        for of in (case, *case.teacher_cases.values()):
            its_stages, its = stages(len(of.architecture.layers), of.layout), of.recipe.train
            tokens = its.logprob_tokens_per_microbatch or its.tokens_per_microbatch
            passed = replace(pass_of(of), tokens=min(tokens, of.rank_tokens))
            for number in stages_within(case, index, of.layout):
                without = max(without, _without_gradients(train, passed, its_stages[number]), key=_sum)
        without = without + served
    passing = max(_sum(with_gradients), _sum(without))  # the most that passes of a step allocate at once
    sizes = model_parts(case, index)
    models = [Part(name, size, _lowered_by(name, train, arch)) for name, size in sizes.items()]
    moved = [replace(part, lowered_by=tuple(dict.fromkeys(movable + part.lowered_by))) for part in models]
    resting = {"rollout": moved, "weight_sync": [models[0], *moved[1:]]}  # between passes; a sync has the weights back
    offload, batch = set(train.offload), list(_batch(case, stage, sequences))
    away = {"rollout": offload, "weight_sync": offload - {"parameters"}, "update": offload & {"reference"}}
    sync = list(_sync_parts(case, index, sizes["parameters"]))
    besides = {"weight_sync": batch + sync, "logprobs": batch + without, "update": batch + with_gradients}
    parts_of, teachers = {}, list(_teacher_parts(case, index, stage))
    for phase in phases:
        parts = [part for part in resting.get(phase, models) if part.name not in away.get(phase, ())]
        parts += [part for part, of_phases in teachers if phase in of_phases]
        parts = [replace(part, of_rank=True) for part in (*parts, *besides.get(phase, ()))]
        if case.device == "cuda":
            # Torch keeps the memory of passes that are over; an engine on the same device does not get it. Moving
            # anything away empties torch's cache as well.
            left = passing - (_sum(sync) if phase == "weight_sync" else 0)
            if phase in resting and not away[phase] and left > 0:
                parts.append(Part("kept by torch's allocator", left, movable))
            nccl = TRAINING_NCCL_BYTES if layout.ranks > 1 else 0
            parts.append(Part("context, NCCL, fragmentation", CONTEXT_BYTES + nccl + int(FRAGMENTATION * passing)))
        parts_of[phase] = parts
    return parts_of


def _sum(parts: Iterable[Part]) -> int:
    return sum(part.bytes for part in parts)


def _lowered_by(name: str, train: TrainConfig, arch: Architecture) -> tuple[str, ...]:
    fields = [field for field in LOWERED_BY[name] if field != "train.lora" or train.lora is None]
    if name == "optimizer" and not train.distributed_optimizer:
        fields[fields.index("train.layout.data")] = "train.distributed_optimizer"
    return tuple(["train.layout.expert", *fields] if arch.experts else fields)


def _batch(case: Case, stage: Stage, sequences: int) -> Iterator[Part]:
    """Yields the loaded batch; its routes, int16 for each token, expert and layer of the stage with experts
    (megatron/replay.py); and kept sets of its response tokens (megatron/kept_head.py)."""
    recipe, train, arch = case.recipe, case.recipe.train, case.architecture
    grpo, layout = isinstance(recipe, Recipe), case.layout
    steps = (recipe.algorithm.minibatches if isinstance(recipe, Recipe) else 1) * times_packed(train)
    tokens = sequences * steps * longest_sequence(recipe) // layout.context
    token_bytes = TOKEN_BYTES + (RESPONSE_TOKEN_BYTES if stage.head else 0)
    lowered = ("train.layout.data", "rollout.prompts_per_step" if grpo else "data.examples_per_step")
    yield Part("batch", tokens * token_bytes, lowered)
    if isinstance(recipe, Recipe) and recipe.teachers_read_more and recipe.teachers_on_ranks:
        read = tokens * recipe.taught_tokens_max // recipe.sequence_tokens_max
        yield Part("batch of teachers", read * token_bytes, lowered)
    if isinstance(recipe, Recipe) and (sizes := replayed_routes(recipe, arch)):
        of_token = 2 * sizes.per_token * len({*stage.layers} & {*arch.expert_layers})
        yield Part("routes", tokens // layout.tensor * of_token, ("train.layout.tensor", *lowered))
    if isinstance(recipe, Recipe) and stage.head and (ids := kept_ids(recipe, arch)):
        # Pairs of a token and an id, or bits of the vocabulary; and the places of the token among either and all.
        of_token = 16 + (8 * ids if ids <= GATHERED_IDS else max(8 * GATHERED_IDS, 1 - -arch.vocab // 8))
        responses = min(tokens, sequences * steps * sampled_tokens_max(recipe))  # context ranks have unequal parts
        yield Part("kept sets", responses * of_token, ("rollout.top_k", "train.layout.context", *lowered))


def _teacher_parts(case: Case, index: int, stage: Stage) -> Iterator[tuple[Part, Sequence[str]]]:
    """Yields what teachers hold on a rank, each with its phases: weights; and for a divergence in the loss, hidden
    states of the step's response tokens and a chunk of logits."""
    for name, held in teacher_bytes(case, index).items():
        moves, own = (getattr(case.grpo.teachers[name], field, None) for field in ("offload", "layout"))
        split = f"teachers.{name}.layout" if own else "train.layout.tensor"
        part = Part(f"teacher {name}", held, (split,) if moves else (f"teachers.{name}.offload", split))
        yield part, ("logprobs",) if moves else PHASES
        if moves and stage.head:  # its output matrix stays
            yield replace(part, bytes=output_bytes(case, name, index)), ("rollout", "update", "weight_sync")
    for name, of in case.teacher_cases.items():
        if reads_apart(case, name) and of.layout.pipeline - 1 in stages_within(case, index, of.layout):
            part = Part(f"hidden states of teacher {name}", _hidden_bytes(of), ("rollout.prompts_per_step",))
            yield part, PHASES[1:2]
    if stage.head and (again := heads_again(case)):
        hidden = sum(map(_hidden_bytes, again.values()))
        yield Part("teachers' hidden states", hidden, ("train.layout.data", "rollout.prompts_per_step")), PHASES[1:3]
        passes = map(pass_of, again.values())
        logits = max(work.logits_bytes(work.tokens, gradients=False, entropy=False) for work in passes)
        yield Part("teachers' logits", logits, ("train.tokens_per_microbatch", "train.layout.tensor")), ("update",)


def _hidden_bytes(case: Case) -> int:
    """Returns the bytes of a step's hidden states before response tokens on a rank."""
    responses = min(case.rank_tokens, case.rank_sequences * sampled_tokens_max(case.grpo))
    return responses * case.grpo.algorithm.minibatches * case.architecture.hidden * case.item_bytes


def times_packed(train: TrainConfig) -> int:
    """Returns how often a rank has the batch: once more in larger microbatches, for passes without gradients."""
    return 2 if (train.logprob_tokens_per_microbatch or 0) > train.tokens_per_microbatch else 1


def _with_gradients(recipe: AnyRecipe, work: RankPass, stage: Stage, index: int, sequences: int) -> list[Part]:
    """Returns the activations of all microbatches in flight, and the larger of logits and a layer's backward pass."""
    train, capacity = recipe.train, recipe.train.tokens_per_microbatch * work.layout.context
    kept = work.stage_bytes(stage, index, -(-sequences // max(1, capacity // work.longest)))
    layer, logits = work.working_bytes(stage), 0
    if stage.head:
        entropy = isinstance(recipe, Recipe) and recipe.algorithm.computes_entropy
        logits = work.logits_bytes(work.tokens, gradients=True, entropy=entropy)
    microbatch = ("train.tokens_per_microbatch",) if capacity > work.longest else ()
    split = (*microbatch, "train.layout.context", "train.layout.tensor")
    largest = Part("logits", logits, split) if logits > layer else Part("one layer's backward pass", layer, split)
    again = () if train.recompute == "full" else ("train.recompute",)
    return [Part("activations", kept, again + split), largest]


def _without_gradients(train: TrainConfig, work: RankPass, stage: Stage) -> list[Part]:
    layer, logits = work.forward_bytes(stage), 0
    if stage.head:
        logits = work.logits_bytes(work.tokens, gradients=False, entropy=False) + work.hidden_bytes
    given = "logprob_tokens" if train.logprob_tokens_per_microbatch else "tokens"
    lowered = (f"train.{given}_per_microbatch", "train.layout.context", "train.layout.tensor")
    return [Part("logits", logits, lowered) if logits > layer else Part("one layer", layer, lowered)]


def _served_weights(case: Case, index: int) -> list[Part]:
    """Returns the copy of the weights that the policy's passes compute with (train.quantization)."""
    if case.recipe.train.quantization is None:
        return []
    held = rank_parameters(case.architecture, case.layout, index, case.fused_layers)
    lowered = ("train.quantization", "train.layout.tensor", "train.layout.pipeline")
    return [Part(SERVED, (held.dense + held.experts) * case.item_bytes, lowered)]


def _sync_parts(case: Case, index: int, parameters: int) -> Iterator[Part]:
    if used := bucket_bytes(case.recipe, parameters):
        recipe = case.grpo
        between = case.device == "cuda" and case.device_plan.bundles > recipe.cluster.gpus_per_node
        if between and recipe.cluster.placement == "colocated":  # in two hops: as many buckets are forwarded
            used *= 2
        yield Part("sync buckets", used, ("weights.bucket_bytes",))
    held = rank_parameters(case.architecture, case.layout, index, case.fused_layers)
    if case.recipe.train.lora is not None:
        # Copies of the matrices that adapters are added to: at most all that is not vocabulary.
        vocabulary = (held.embedding + held.head) * case.item_bytes
        yield Part("merged weights", parameters - vocabulary, ("train.layout.tensor", "train.layout.pipeline"))
    if isinstance(case.recipe, Recipe) and case.recipe.rollout.quantization is not None:
        blocks = int((held.dense + held.experts) * BLOCK_ELEMENT_BYTES)
        yield Part("quantised weights", blocks, ("train.layout.tensor", "train.layout.pipeline"))
        # As they arrive, and where they lie until they are quantised.
        rows = 2 * fetched_elements(case.architecture, case.layout, index, case.fused_layers) * case.item_bytes
        if rows:
            yield Part("rows of cut blocks", rows, ("train.layout.tensor",))


def mapping_processes(case: Case, engines: int) -> int:
    """Returns the most engine processes on a node's other GPUs that map memory of a GPU with `engines`. A process
    has a context on every GPU whose memory it maps, from its first sync on.

    This is a bound, since a real plan takes seconds. Engine ranks receive from training ranks and pass on to one
    another, at most from as many GPUs as the model is split over.
    """
    if not isinstance(case.recipe, Recipe) or not maps_gpu_memory(case.recipe):
        return 0
    layout, recipe, planned = case.layout, case.recipe, case.device_plan
    processes = sum(map(len, planned.bundles_of_engine))
    here = max(1, engines)
    others = min(processes, here * min(planned.bundles, recipe.cluster.gpus_per_node)) - engines
    if recipe.cluster.placement == "colocated" and layout.pipeline == layout.expert == 1:
        others = min(others, 0 if recipe.rollout.layout.tensor == layout.tensor else (layout.tensor - 1) * here)
    return others


# --- engines ---------------------------------------------------------------------------------------------------------


def _engine_parts(case: Case, held: EngineMemory, phase: str, count: int, beside_training: bool) -> Iterator[Part]:
    """Yields all parts of the ranks of `count` engines on one device in a phase."""
    recipe, on_cuda = case.grpo, case.device == "cuda"
    saves = recipe.rollout.kind.releases_memory(recipe.rollout)
    released = saves and recipe.cluster.placement == "colocated" and phase != "rollout"
    fewer = ("rollout.engines",) if count > 1 else ()
    if beside_training and phase != "rollout":
        fewer = (*held.freed_by, *fewer)
    if not released or phase == "weight_sync":
        yield Part("engine weights", count * held.weights, (*fewer, *held.weights_lowered_by))
    if not released and (held.reserved or on_cuda or phase == "rollout"):  # torch's allocator keeps what was freed
        yield Part("engine cache", count * held.cache, (*fewer, *held.cache_lowered_by))
    if on_cuda:
        nccl = ENGINE_NCCL_BYTES if recipe.rollout.layout.tensor > 1 else 0
        yield Part("engine graphs, activations", count * held.working, held.working_lowered_by)
        yield Part("engine context, NCCL", count * (CONTEXT_BYTES + nccl))
    if phase == "weight_sync" and (buckets := bucket_bytes(recipe, held.weights)):
        yield Part("engine sync buckets", count * buckets, ("weights.bucket_bytes",))
