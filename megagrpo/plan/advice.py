"""Problems of a plan: what its machines cannot run, what is unwise there, and checkpoints without room on their disk.

The rules of recipe/ refuse what is wrong on any machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import longest_sequence, minibatch_sequences
from megagrpo.plan.case import Case
from megagrpo.plan.engine import EngineMemory
from megagrpo.plan.memory import DeviceMemory, saved_bytes
from megagrpo.plan.parameters import total_parameters
from megagrpo.plan.schedules import ASYNC, ONE_STEP_OFF, ScheduleTime, allowed
from megagrpo.plan.time import Sampling, StepTime
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.defaults import checkpoint_directory, dtype_name, plan_devices, run_directory
from megagrpo.recipe.kernels import auto_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.schema.schedule import AsyncConfig, SyncConfig
from megagrpo.section import broken_rules
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.families.architecture import Architecture

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
SAMPLED_TOKEN_BYTES, PROMPT_TOKEN_BYTES = 16, 4
"""Bytes of a token in a batch's file: token, logprob and version of 4 bytes each, and about as much text."""
TIMEOUT_SHARE_MAX = 0.8

# --- impossible ------------------------------------------------------------------------------------------------------


def impossible(case: Case, held: Sequence[DeviceMemory]) -> Iterator[Problem]:
    """Yields the problems that keep the recipe from running on its machines. Too little memory yields one problem,
    since one change moves all kinds of devices."""
    yield from node_problems(case.recipe)
    yield from auto_problems(case.recipe, case.fused_layers)
    if case.gpus is None:
        return
    gpu, engine = case.gpus.gpu, _engine(case)
    if engine and engine.sequences == 0:
        cache = f"a cache of {engine.cache_tokens} tokens beside them on one {gpu.name}"
        given = f"weights of {byte_text(engine.weights)} on each GPU of an engine, and {cache}"
        needed = f"{engine.longest} tokens: the longest prompt and response"
        yield Problem("rollout.layout.tensor", given, needed, "more tensor ranks in each engine, or shorter responses")
    kind = max(held, key=lambda kind: kind.fullest.bytes)
    fullest = kind.fullest
    if fullest.bytes > gpu.memory_bytes:
        largest = fullest.largest[0]
        lowered = next((part for part in fullest.largest if part.lowered_by), largest)
        more = "" if lowered is largest else f" ({lowered.name})"
        too_much = byte_text(fullest.bytes - gpu.memory_bytes)
        given = f"{byte_text(fullest.bytes)}, most of it {largest.name}: {byte_text(largest.bytes)}"
        needed = f"at most {byte_text(gpu.memory_bytes)} of one {gpu.name}: {too_much} too much"
        fix = f"change {', '.join(lowered.lowered_by)}{more}, or see what fits with --search"
        yield Problem(f"memory of {kind.name}, {fullest.phase}", given, needed, fix)


def _engine(case: Case) -> EngineMemory | None:
    """Returns the memory of an engine; None for an unknown card, or a recipe without engines of its own."""
    of = case.recipe
    if case.card_bytes is None or isinstance(of, SftRecipe) or of.rollout.devices_of_engine == 0:
        return None
    return of.rollout.kind.memory(case)


def node_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    """Yields a problem if an engine crosses nodes: a server's ranks are on one node, or on several whole ones."""
    if isinstance(recipe, SftRecipe) or recipe.cluster.device == "cpu":
        return
    per_node, plan = recipe.cluster.gpus_per_node, plan_devices(recipe, "cuda")
    parts = plan.node_bundles(0)
    size, first = (len(parts[0]), parts[0][0]) if parts else (1, 0)
    if per_node % size == 0 and first % size == 0:
        return  # engines lie side by side from the first on, so none reaches over the edge of a node
    for engine, devices in enumerate(plan.bundles_of_engine):
        if any(part[0] // per_node != part[-1] // per_node for part in plan.node_bundles(engine)):
            given = f"{len(devices)}, which puts engine {engine} on GPUs {devices[0]}-{devices[-1]}, over nodes"
            needed = f"engines within nodes of {per_node} GPUs (cluster.gpus_per_node)"
            fix = f"a divisor of {per_node}, and a number of engines and of training ranks that fills nodes"
            yield Problem("rollout.layout.tensor", given, needed, fix)
            return


# --- unwise ----------------------------------------------------------------------------------------------------------


def unwise(
    case: Case, held: Sequence[DeviceMemory], time: StepTime | None, scheduled: ScheduleTime | None = None
) -> Iterator[Problem]:
    """Yields the settings that run but that the recipe's author probably does not want. `time` is None for unknown
    GPUs; `scheduled` is the time under the recipe's schedule, None for sync."""
    if case.device == "cuda":
        yield from _unwise_nodes(case)
        if case.recipe.deterministic:
            given, needed = "on GPUs: kernels are slower than this plan's", "a run that must repeat bit for bit"
            yield Problem("deterministic", given, needed, "remove it where runs need not repeat")
    yield from _unwise_layout(case, time)
    yield from _unwise_training(case, held)
    if isinstance(case.recipe, Recipe):
        yield from _unwise_engines(case, case.recipe)
        yield from _unwise_agent(case, case.recipe)
        if time is not None:
            yield from _unwise_waiting(case, case.recipe, time, scheduled)
    if time is not None:
        yield from _unwise_seconds(case.recipe, time)


def _unwise_nodes(case: Case) -> Iterator[Problem]:
    per_node, devices = case.recipe.cluster.gpus_per_node, case.device_plan.bundles
    fixes = {"tensor": f"a divisor of {per_node}, and pipeline for the rest", "expert_tensor": "expert_tensor: 1"}
    for axis in case.axes:
        if axis.name in fixes and axis.nodes > 1:
            given = f"{axis.size}, whose ranks reach over {axis.nodes} nodes"
            needed = f"groups within nodes of {per_node} GPUs: they exchange activations several times a layer"
            yield Problem(f"train.layout.{axis.name}", given, needed, fixes[axis.name])
    if devices > per_node and devices % per_node:
        given = f"{devices} GPUs on nodes of {per_node}: {per_node - devices % per_node} of the last are left over"
        fix = f"sizes that make {-(-devices // per_node) * per_node} GPUs"
        yield Problem("cluster.gpus_per_node", given, "whole nodes", fix)


def _unwise_layout(case: Case, time: StepTime | None) -> Iterator[Problem]:
    recipe, layout, lengths, experts = case.recipe, case.layout, case.lengths, case.architecture.experts
    tensor, data, context = layout.tensor, layout.data, layout.context
    gpu = case.speeds.gpu
    if case.card_bytes and tensor > 1 and gpu.node_bytes_per_second < NVLINK_BYTES_PER_SECOND_MIN:
        given = f"{tensor}, over the {gpu.node_bytes_per_second / 1e9:.0f} GB/s between {gpu.name}s of a node"
        fix = "tensor: 1, with pipeline or more data ranks in its place, where it fits"
        yield Problem("train.layout.tensor", given, "NVLink: tensor ranks exchange activations four times a layer", fix)
    if experts and experts.count >= EXPERTS_MANY and tensor > 1 and recipe.train.layout.expert_tensor is None:
        given = f"the default, tensor {tensor}, which cuts experts of {experts.ffn} columns"
        fix = f"expert_tensor: 1, with expert: {min(experts.count, tensor * layout.expert)}"
        yield Problem("train.layout.expert_tensor", given, "whole experts: small matrices are slow ones", fix)
    if time and time.pipeline_bubble > BUBBLE_MAX:
        interleave = "virtual_pipeline: 2, " if layout.virtual_pipeline == 1 else ""
        given = f"{layout.pipeline}: stages wait for one another {time.pipeline_bubble:.0%} of the update"
        fix = f"fewer stages, {interleave}less data, more samples in a minibatch"
        yield Problem("train.layout.pipeline", given, f"at most {BUBBLE_MAX:.0%}", fix)
    sequences = minibatch_sequences(recipe)
    if data > 1 and sequences / data < SEQUENCES_MIN:
        given = f"{data} data ranks for the {sequences} sequences of a minibatch"
        needed = f"at least {SEQUENCES_MIN} for each: the longest one makes all others wait"
        field = "data.examples_per_step" if isinstance(recipe, SftRecipe) else "algorithm.minibatches"
        yield Problem("train.layout.data", given, needed, f"fewer data ranks, or change {field}")
    longest = lengths.prompt + lengths.longest
    padding = context / lengths.sequence  # half of a multiple of 2 x context, on the mean
    if context > 1 and (longest / context < CONTEXT_TOKENS_MIN or padding > CONTEXT_PADDING_MAX):
        given = f"{context}, for sequences of up to {longest:.0f} tokens, {lengths.sequence:.0f} on the mean"
        needed = f"at least {CONTEXT_TOKENS_MIN} tokens on each rank: keys and values travel for every layer"
        yield Problem("train.layout.context", given, needed, "context: 1, and data in its place")


def _unwise_engines(case: Case, recipe: Recipe) -> Iterator[Problem]:
    rollout, ranks, engine = recipe.rollout, case.layout.ranks, _engine(case)
    engines, size = rollout.engines, rollout.devices_of_engine
    responses = recipe.prompts_at_once * rollout.samples_per_prompt
    if size == 0:
        return
    per_node = recipe.cluster.gpus_per_node
    if rollout.layout.tensor > per_node and case.architecture.experts is None:
        given = f"{rollout.layout.tensor}, whose ranks reach over {recipe.nodes_of_engine} nodes"
        needed = f"at most {per_node}: tensor ranks exchange activations twice a layer"
        yield Problem("rollout.layout.tensor", given, needed, f"tensor: {per_node}, and pipeline for the rest")
    used = len(set(chain(*case.device_plan.bundles_of_engine)))
    if responses < engines:
        given = f"{engines}, for {responses} responses at once"
        yield Problem("rollout.engines", given, "something to do for each", "fewer engines, or more samples")
    if recipe.cluster.placement == "colocated" and used < ranks and case.device == "cuda":
        given = f"{engines} of {size}: {ranks - used} of {ranks} GPUs wait in the rollout"
        yield Problem("rollout.engines", given, "engines on all training devices", f"engines: {ranks // size}")
    if engine and 0 < engine.sequences < KV_CACHE_SHARE_MIN * engine.asked:
        given = f"{rollout.layout.tensor}: a cache for {engine.sequences} longest responses of {engine.asked}"
        needed = f"room for {KV_CACHE_SHARE_MIN:.0%} of an engine's responses: each batch reads all weights"
        yield Problem("rollout.layout.tensor", given, needed, "more tensor ranks in each engine, or shorter responses")


def _unwise_agent(case: Case, recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of conversations that overflow engines' caches, or are too short for the turns allowed."""
    agent, engine = recipe.agent, _engine(case)
    if agent is None:
        return
    if engine and (turns := Sampling.of(case).turns) and turns.cached and turns.cached < turns.conversations:
        room = f"whose cache has room for {turns.cached:.0f} of {turns.history:.0f} tokens"
        given = f"{agent.rollouts_at_once}: {turns.conversations:.0f} conversations on each engine, {room}"
        needed = "room for all: what is not in the cache is read again in each turn"
        fix = f"rollouts_at_once: {max(1, int(turns.cached) * recipe.rollout.engines)}, or more memory for the cache"
        yield Problem("agent.rollouts_at_once", given, needed, fix)
    answers, longest = recipe.sequence_tokens_max - case.lengths.prompt, recipe.rollout.response_tokens_max
    if agent.turns_max > 1 and answers < 2 * longest:
        given = f"{recipe.sequence_described} tokens, with answers of up to {longest}"
        needed = "room for several answers and what stands between them"
        fix = f"tokens_max: {recipe.data.prompt_tokens_max + 4 * longest}, or shorter answers"
        yield Problem("agent.tokens_max", given, needed, fix)


def _unwise_waiting(case: Case, recipe: Recipe, time: StepTime, scheduled: ScheduleTime | None) -> Iterator[Problem]:
    """Yields problems of disaggregated devices that wait for the others, and of a schedule that throws tokens away."""
    ranks, used = case.layout.ranks, len(set(chain(*case.device_plan.bundles_of_engine)))
    if used and recipe.cluster.placement == "disaggregated":
        generating = time.of("rollout") / time.phase_seconds
        waiting, idle = (scheduled.trainer_waits, scheduled.engines_idle) if scheduled else (generating, 1 - generating)
        share = (ranks * waiting + used * idle) / (ranks + used)
        if share > IDLE_MAX:
            under = f" under {scheduled.name}" if scheduled else ""
            given = f"disaggregated, {ranks} GPUs train and {used} generate: they wait {share:.0%} of the time{under}"
            fixes = [*_less_waiting(recipe), "another split (--search)"]
            yield Problem("cluster.placement", given, f"at most {IDLE_MAX:.0%}", ", or ".join(fixes))
    if scheduled and scheduled.thrown_tokens:
        shorter = f"responses that are trained on are {scheduled.shorter:.0%} shorter than those that begin"
        given = f"{scheduled.name}: {scheduled.thrown_tokens:.0%} of all tokens are thrown away, and {shorter}"
        step = recipe.rollout.prompts_per_step
        fix = f"carry_over: {min(recipe.prompts_at_once - step, 2 * step)}, max_staleness: 2"
        yield Problem("schedule.oversample", given, "lengths as they were sampled", fix)


def _less_waiting(recipe: Recipe) -> Iterator[str]:
    """Yields the changes of placement or schedule that reduce waiting and that the recipe's rules allow."""
    schedule = recipe.schedule
    if isinstance(schedule, SyncConfig):
        cluster = recipe.cluster.model_copy(update={"placement": "colocated"})
        colocated = recipe.model_copy(update={"cluster": cluster})
        if broken_rules(colocated, checked=recipe) == broken_rules(recipe, checked=recipe):
            yield "placement: colocated"
    if isinstance(schedule, AsyncConfig):
        if allowed(recipe, schedule.model_copy(update={"max_staleness": schedule.max_staleness + 1})):
            yield "a larger schedule.max_staleness"
    elif kind := next((kind for kind in (ASYNC, ONE_STEP_OFF) if kind != schedule and allowed(recipe, kind)), None):
        yield f"schedule: {kind.kind}"


def _unwise_training(case: Case, held: Sequence[DeviceMemory]) -> Iterator[Problem]:
    if case.gpus and case.recipe.train.layer_spec == "transformer_engine" and not case.auto_is_fused:
        given = f"transformer_engine, on {case.gpus.gpu.name}"
        needed = "fused attention over packed sequences: without it all scores of the longest sequence are kept"
        yield Problem("train.layer_spec", given, needed, "layer_spec: auto, or install flash-attn 2 where it helps")
    recipe, layout, train, longest = case.recipe, case.layout, case.recipe.train, longest_sequence(case.recipe)
    of_rank = minibatch_sequences(recipe) / layout.data * longest
    if train.tokens_per_microbatch * layout.context > 1.5 * max(of_rank, longest):
        given = f"{train.tokens_per_microbatch}, and {of_rank:.0f} tokens of a minibatch at most on a rank"
        fix = f"tokens_per_microbatch: {-(-int(max(longest, of_rank)) // layout.context)}"
        yield Problem("train.tokens_per_microbatch", given, "no more than that: it only takes memory", fix)
    updates = [phase.bytes for kind in held for phase in kind.phases if phase.phase == "update"]
    free = 1 - max(updates) / case.card_bytes if case.card_bytes else 0.0
    if train.recompute == "full" and free > FREE_SHARE_MIN:
        given = f"full, with {free:.0%} of the memory free in the update"
        needed = "no more than has to be: whole layers cost a third more products"
        yield Problem("train.recompute", given, needed, "recompute: none or {modules: [mlp]}, or larger microbatches")
    # Fused attention keeps no scores, Transformer Engine has norms within the products that follow, and the local
    # layers' core keeps queries and keys of its own.
    arch, fused = case.architecture, case.fused_layers
    saves = {
        "core_attn": arch.latent is not None and not fused,
        "layernorm": not fused or arch.latent is not None or arch.experts is not None,
        "mla_up_proj": fused,
    }
    if pointless := sorted(module for module in train.recomputed.modules if not saves.get(module, True)):
        given = f"{', '.join(pointless)}, of which these layers keep nothing that is worth it"
        needed = "what takes memory: mlp, moe or moe_act, or some whole layers"
        yield Problem("train.recompute", given, needed, "recompute: none, {modules: [...]} or {layers: ...}")
    replicas = layout.data * layout.context
    if not train.distributed_optimizer and replicas > 1 and train.lora is None:
        given = f"false, with {replicas} replicas: each holds all optimizer states"
        needed = "each its share: the same numbers for 12 bytes less for each parameter"
        yield Problem("train.distributed_optimizer", given, needed, "distributed_optimizer: true")
    whole = isinstance(recipe, Recipe) and train.lora is None
    if whole and arch.hidden >= 512 and train.optimizer.lr > LEARNING_RATE_MAX:
        given = f"{train.optimizer.lr:g} for all weights of a model with {arch.hidden} hidden units"
        needed = f"at most {LEARNING_RATE_MAX:g}: published runs take 1e-6; larger ones forget"
        yield Problem("train.optimizer.lr", given, needed, "lr: 1.0e-6")


def _unwise_seconds(recipe: AnyRecipe, time: StepTime) -> Iterator[Problem]:
    limits = {}
    if isinstance(recipe, Recipe):
        step = ("cluster.step_timeout_seconds", recipe.cluster.step_timeout_seconds)
        limits = {
            "rollout": ("rollout.timeout_seconds", recipe.rollout.timeout_seconds),
            "weight_sync": ("weights.timeout_seconds", recipe.weights.timeout_seconds),
            "logprobs": step,
            "update": step,
        }
    for phase in time.phases:
        field, limit = limits.get(phase.phase, ("", float("inf")))
        if phase.seconds > TIMEOUT_SHARE_MAX * limit:
            given = f"{limit:g}, and {phase.phase} is estimated at {second_text(phase.seconds)}"
            fix = f"{field.rpartition('.')[2]}: {int(-(-2 * phase.seconds // 300) * 300)}"
            yield Problem(field, given, "room for a slow step", fix)
    every = recipe.checkpoint.every_steps
    if (lost := every * time.seconds) > LOST_SECONDS_MAX:
        given = f"{every} steps of {second_text(time.seconds)}: a failure costs up to {second_text(lost)}"
        fix = f"every_steps: {max(1, int(LOST_SECONDS_MAX / 3 / time.seconds))}"
        yield Problem("checkpoint.every_steps", given, f"at most {second_text(LOST_SECONDS_MAX)}", fix)


# --- disk ------------------------------------------------------------------------------------------------------------


def checkpoint_bytes(recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None) -> int:
    """Returns a checkpoint's bytes without file headers: trained weights, optimizer, a moving reference, a critic."""
    case = Case(recipe, architecture, machines=None, critic=critic)
    return saved_bytes(case, ParallelLayout(), 0, STATE_BYTES)


def runs_here(recipe: AnyRecipe) -> bool:
    """Returns whether this machine's file systems seem the run's: no cluster.gpu, and model.path is a directory."""
    return recipe.cluster.gpu is None and Path(recipe.model.path).is_dir()


def disk_problems(
    recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None
) -> Iterator[Problem]:
    """Yields a problem if the checkpoint directory, on this machine, has no room for even one checkpoint."""
    size, free = checkpoint_bytes(recipe, architecture, critic), _free_bytes(checkpoint_directory(recipe))
    if size > free:
        given = f"{byte_text(free)} free in {checkpoint_directory(recipe)}"
        needed = f"{byte_text(size)} for one checkpoint"
        yield Problem("checkpoint.directory", given, needed, "a directory on a larger file system")


def disk_advice(recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None) -> Iterator[Problem]:
    """Yields a problem for the checkpoints, batches and exported models that do not fit on the disk. A new checkpoint
    is written before the oldest is deleted."""
    if not runs_here(recipe) and not Path(recipe.checkpoint.directory or "no such directory").is_dir():
        return
    keep, best = recipe.checkpoint.keep_last, recipe.checkpoint.keep_best is not None
    directory = checkpoint_directory(recipe)
    size, free = checkpoint_bytes(recipe, architecture, critic), _free_bytes(directory)
    saved = len(list(directory.glob("step_*"))) if directory.is_dir() else 0
    needed = max(1, keep + best + 1 - saved) * size
    if needed > free:
        kept = f"{keep} checkpoints{', the best' if best else ''} and the next"
        more = f"{byte_text(needed)} more for {kept}, {byte_text(size)} each"
        fix = "a directory on a larger file system, or a lower keep_last"
        yield Problem("checkpoint.keep_last", f"{byte_text(free)} free in {directory}, on this machine", more, fix)
    free = _free_bytes(run_directory(recipe))
    given = f"{byte_text(free)} free in {run_directory(recipe)}, on this machine"
    if isinstance(recipe, Recipe):
        # With every response at its longest.
        rollout, batches = recipe.rollout, recipe.checkpoint.keep_batches
        tokens = recipe.sequence_tokens_max if recipe.agent else rollout.response_tokens_max
        of_prompt = rollout.samples_per_prompt * tokens * SAMPLED_TOKEN_BYTES
        of_prompt += recipe.data.prompt_tokens_max * PROMPT_TOKEN_BYTES
        if (size := rollout.prompts_per_step * of_prompt) * batches > free:
            more = f"up to {byte_text(size)} for each of {batches} batches"
            fix = "lower it, or set track.directory to a place on a larger file system"
            yield Problem("checkpoint.keep_batches", given, more, fix)
    exported = len(list((run_directory(recipe) / "hugging_face_steps").glob("step_*")))
    every, steps = recipe.checkpoint.export_every_steps, recipe.train.total_steps
    to_export = 0 if every is None else 1 if steps is None else steps // every  # 1: the steps are not known
    models = max(0, to_export - exported) + recipe.checkpoint.export_hugging_face
    size = ITEM_BYTES[dtype_name(recipe, "cpu" if recipe.cluster.device == "cpu" else "cuda")]
    if (size := size * total_parameters(architecture)) * models > free:
        field = "export_every_steps" if every else "export_hugging_face"
        more = f"{byte_text(models * size)} for {models} exported models, {byte_text(size)} each"
        fix = "a larger file system for track.directory, fewer of them, or after_export that moves them away"
        yield Problem(f"checkpoint.{field}", given, more, fix)


def _free_bytes(directory: Path) -> int:
    """Returns the free bytes of the file system that holds, or will hold, the directory."""
    directory = directory.absolute()
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
