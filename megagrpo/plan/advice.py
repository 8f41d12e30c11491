"""Rules of a plan: what its machines cannot run, what is unwise there, and checkpoints without room on their disk.

Rows are like those of a recipe's sections, whose rules refuse what is wrong on any machine: rules.yaml has their texts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import longest_sequence, minibatch_sequences, sampled_tokens_max
from megagrpo.plan.case import Case
from megagrpo.plan.memory import pass_of, saved_bytes
from megagrpo.plan.parameters import total_parameters
from megagrpo.plan.plan import Plan
from megagrpo.plan.proofs import set_bytes
from megagrpo.plan.schedules import ASYNC, ONE_STEP_OFF, allowed
from megagrpo.plan.time import Sampling
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.defaults import checkpoint_directory, dtype_name, plan_devices, replayed_routes, run_directory
from megagrpo.recipe.kernels import auto_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.schema.schedule import AsyncConfig, SyncConfig
from megagrpo.section import Rules, broken, broken_rules, changed
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

Values = Mapping[str, Any]
"""Values that a rule's text names."""


def impossible(plan: Plan) -> tuple[Problem, ...]:
    """Returns the problems that keep a plan from running on its machines."""
    return (*auto_problems(plan.recipe, plan.fused_layers), *broken(IMPOSSIBLE, plan))


def unwise(plan: Plan) -> tuple[Problem, ...]:
    """Returns the settings that run but that the recipe's author probably does not want."""
    recipe, samples = plan.recipe, isinstance(plan.recipe, Recipe)
    holds = {"engines": samples and plan.grpo.rollout.devices_of_engine, "sampling": samples}
    holds["disk"] = runs_here(recipe) or Path(recipe.checkpoint.directory or "no such directory").is_dir()
    rules = (of for title, of in UNWISE.items() if holds.get(title, True))
    return tuple(problem for of in rules for problem in broken(of, plan))


# --- impossible ------------------------------------------------------------------------------------------------------


def engine_over_nodes(recipe: AnyRecipe) -> Values | None:
    """Returns the first engine that crosses nodes: a server's ranks are on one node, or on several whole ones."""
    if isinstance(recipe, SftRecipe) or recipe.cluster.device == "cpu":
        return None
    per_node, plan = recipe.cluster.gpus_per_node, plan_devices(recipe, "cuda")
    parts = plan.node_bundles(0)
    size, first = (len(parts[0]), parts[0][0]) if parts else (1, 0)
    if per_node % size == 0 and first % size == 0:
        return None  # engines lie side by side from the first on, so none reaches over the edge of a node
    for engine, devices in enumerate(plan.bundles_of_engine):
        if any(part[0] // per_node != part[-1] // per_node for part in plan.node_bundles(engine)):
            return {"size": len(devices), "engine": engine, "first": devices[0], "last": devices[-1]}
    return None


def _too_little_memory(plan: Plan) -> Iterator[Values]:
    """Yields the fullest kind of device alone, since one change moves all kinds."""
    kind = max(plan.memory, key=lambda kind: kind.fullest.bytes)
    held = kind.fullest
    if plan.card_bytes and held.bytes > plan.card_bytes:
        largest = held.largest[0]
        lowered = next((part for part in held.largest if part.lowered_by), largest)
        sizes = {"bytes": held.bytes, "most": largest.bytes, "card": plan.card_bytes}
        sizes["too_much"] = held.bytes - plan.card_bytes
        fields = ", ".join(lowered.lowered_by) + ("" if lowered is largest else f" ({lowered.name})")
        names = {"kind": kind, "phase": held.phase, "part": largest.name, "fields": fields}
        yield {**names, **{name: byte_text(size) for name, size in sizes.items()}}


IMPOSSIBLE: Rules[Plan] = {
    "engine_over_nodes": lambda p: engine_over_nodes(p.recipe),
    "no_cache_for_a_response": lambda p: (
        p.engine and p.engine.sequences == 0 and {"weights": byte_text(p.engine.weights)}
    ),
    "too_little_memory": _too_little_memory,
}

# --- layout and training ---------------------------------------------------------------------------------------------


def _over_nodes(name: str) -> Callable[[Plan], object]:
    """Makes the rule of an axis that exchanges activations over nodes."""
    return lambda p: ({"axis": axis} for axis in p.axes if p.device == "cuda" and axis.name == name and axis.nodes > 1)


def _short_context(plan: Plan) -> object:
    context, lengths = plan.layout.context, plan.lengths
    longest = lengths.prompt + lengths.longest
    padding = context / lengths.sequence  # half of a multiple of 2 x context, on the mean
    short = longest / context < CONTEXT_TOKENS_MIN or padding > CONTEXT_PADDING_MAX
    return context > 1 and short and {"longest": longest, "least": CONTEXT_TOKENS_MIN}


def _large_microbatch(plan: Plan) -> object:
    recipe, context, longest = plan.recipe, plan.layout.context, longest_sequence(plan.recipe)
    of_rank = minibatch_sequences(recipe) / plan.layout.data * longest
    enough = max(longest, of_rank)
    large = recipe.train.tokens_per_microbatch * context > 1.5 * enough
    return large and {"of_rank": of_rank, "enough": -(-int(enough) // context)}


def _pointless_recompute(plan: Plan) -> object:
    # Fused attention keeps no scores, Transformer Engine has norms within the products that follow, and the local
    # layers' core keeps queries and keys of its own.
    fused, kinds = plan.fused_layers, plan.architecture.kinds
    saves = {
        "core_attn": any(kind.attention.score_bytes(pass_of(plan)) for kind in kinds),
        "layernorm": not fused or any(None in (kind.attention.holds_norm, kind.mlp.holds_norm) for kind in kinds),
        "mla_up_proj": fused,
    }
    pointless = sorted(module for module in plan.recipe.train.recomputed.modules if not saves.get(module, True))
    return pointless and {"modules": pointless}


LAYOUT_RULES: Rules[Plan] = {
    "tensor_over_nodes": _over_nodes("tensor"),
    "expert_tensor_over_nodes": _over_nodes("expert_tensor"),
    "nodes_in_part": lambda p: (
        p.device == "cuda"
        and (devices := p.device_plan.bundles) > (per_node := p.recipe.cluster.gpus_per_node)
        and (left := -devices % per_node)
        and {"devices": devices, "left": left, "whole": devices + left}
    ),
    "deterministic_on_gpus": lambda p: p.device == "cuda" and p.recipe.deterministic,
    "tensor_without_nvlink": lambda p: (
        p.card_bytes
        and p.layout.tensor > 1
        and (speed := p.speeds.gpu.node_bytes_per_second) < NVLINK_BYTES_PER_SECOND_MIN
        and {"speed": speed / 1e9}
    ),
    "cut_experts": lambda p: (
        (experts := p.architecture.experts) >= EXPERTS_MANY
        and p.layout.tensor > 1
        and p.recipe.train.layout.expert_tensor is None
        and {
            "columns": max(size for axis, _, size in p.architecture.divided() if axis == "expert_tensor"),
            "expert": min(experts, p.layout.tensor * p.layout.expert),
        }
    ),
    "waiting_stages": lambda p: (
        p.time
        and p.time.pipeline_bubble > BUBBLE_MAX
        and {"most": BUBBLE_MAX, "less": "virtual_pipeline: 2, less" if p.layout.virtual_pipeline == 1 else "less"}
    ),
    "few_sequences_for_data_ranks": lambda p: (
        p.layout.data > 1
        and (sequences := minibatch_sequences(p.recipe)) / p.layout.data < SEQUENCES_MIN
        and {
            "sequences": sequences,
            "least": SEQUENCES_MIN,
            "field": "data.examples_per_step" if isinstance(p.recipe, SftRecipe) else "algorithm.minibatches",
        }
    ),
    "short_context": _short_context,
    "layers_without_fused_attention": lambda p: (
        p.gpus and p.recipe.train.layer_spec == "transformer_engine" and not p.auto_is_fused
    ),
    "large_microbatch": _large_microbatch,
    "needless_recompute": lambda p: (
        p.recipe.train.recompute == "full"
        and p.card_bytes
        and (free := 1 - max(kind.bytes_of("update") for kind in p.memory) / p.card_bytes) > FREE_SHARE_MIN
        and {"free": free}
    ),
    "pointless_recompute": _pointless_recompute,
    "whole_optimizer_on_replicas": lambda p: (
        not p.recipe.train.distributed_optimizer
        and p.recipe.train.lora is None
        and (replicas := p.layout.data * p.layout.context) > 1
        and {"replicas": replicas}
    ),
    "high_learning_rate": lambda p: (
        isinstance(p.recipe, Recipe)
        and p.recipe.train.lora is None
        and p.architecture.hidden >= 512
        and p.recipe.train.optimizer.lr > LEARNING_RATE_MAX
        and {"most": LEARNING_RATE_MAX}
    ),
}

# --- engines, agents, schedules, seconds -----------------------------------------------------------------------------


def _devices_of_engines(case: Case) -> int:
    return len(set(chain(*case.device_plan.bundles_of_engine)))


def _waiting(plan: Plan) -> object:
    """Returns the share of the time in which disaggregated devices wait for the others."""
    recipe, ranks, used, scheduled = plan.grpo, plan.layout.ranks, _devices_of_engines(plan), plan.scheduled
    if plan.time is None or not used or recipe.cluster.placement != "disaggregated":
        return None
    generating = plan.time.of("rollout") / plan.time.phase_seconds
    waiting, idle = (scheduled.trainer_waits, scheduled.engines_idle) if scheduled else (generating, 1 - generating)
    time = f"time under {scheduled.name}" if scheduled else "time"
    if (share := (ranks * waiting + used * idle) / (ranks + used)) <= IDLE_MAX:
        return None
    fixes = ", or ".join([*_less_waiting(recipe), "another split (--search)"])
    return {"ranks": ranks, "used": used, "time": time, "most": IDLE_MAX, "share": share, "fixes": fixes}


def _less_waiting(recipe: Recipe) -> Iterator[str]:
    """Yields the changes of placement or schedule that reduce waiting and that the recipe's rules allow."""
    schedule = recipe.schedule
    if isinstance(schedule, SyncConfig):
        colocated = changed(recipe, {"cluster.placement": "colocated"})
        if broken_rules(colocated, checked=recipe) == broken_rules(recipe, checked=recipe):
            yield "placement: colocated"
    if isinstance(schedule, AsyncConfig):
        if allowed(recipe, schedule.model_copy(update={"max_staleness": schedule.max_staleness + 1})):
            yield "a larger schedule.max_staleness"
    elif kind := next((kind for kind in (ASYNC, ONE_STEP_OFF) if kind != schedule and allowed(recipe, kind)), None):
        yield f"schedule: {kind.kind}"


def _short_timeouts(plan: Plan) -> Iterator[Values]:
    recipe, step = plan.grpo, ("cluster", "step_timeout_seconds")
    limits = {"rollout": ("rollout", "timeout_seconds"), "weight_sync": ("weights", "timeout_seconds")}
    limits |= {"logprobs": step, "update": step}
    for phase in plan.time.phases if plan.time else ():
        section, key = limits.get(phase.phase, ("", ""))
        if section and phase.seconds > TIMEOUT_SHARE_MAX * (limit := getattr(getattr(recipe, section), key)):
            texts = {"section": section, "key": key, "phase": phase.phase, "seconds": second_text(phase.seconds)}
            yield {**texts, "limit": limit, "longer": int(-(-2 * phase.seconds // 300) * 300)}


def _checkpoints_far_apart(plan: Plan) -> object:
    seconds = plan.time.seconds if plan.time else 0.0
    if (lost := plan.recipe.checkpoint.every_steps * seconds) <= LOST_SECONDS_MAX:
        return None
    texts = {"step": second_text(seconds), "lost": second_text(lost), "most": second_text(LOST_SECONDS_MAX)}
    return {**texts, "sooner": max(1, int(LOST_SECONDS_MAX / 3 / seconds))}


ENGINE_RULES: Rules[Plan] = {
    "engine_tensor_over_nodes": lambda p: (
        not p.architecture.experts and p.grpo.rollout.layout.tensor > p.recipe.cluster.gpus_per_node
    ),
    "engines_without_responses": lambda p: (
        (responses := p.grpo.prompts_at_once * p.grpo.rollout.samples_per_prompt) < p.grpo.rollout.engines
        and {"responses": responses}
    ),
    "idle_training_devices": lambda p: (
        p.device == "cuda"
        and p.grpo.cluster.placement == "colocated"
        and (idle := p.layout.ranks - _devices_of_engines(p)) > 0
        and {"idle": idle, "engines": p.layout.ranks // p.grpo.rollout.devices_of_engine}
    ),
    "small_cache": lambda p: (
        p.engine and 0 < p.engine.sequences < KV_CACHE_SHARE_MIN * p.engine.asked and {"least": KV_CACHE_SHARE_MIN}
    ),
}
SAMPLING_RULES: Rules[Plan] = {
    "crowded_cache": lambda p: (
        p.engine
        and (turns := Sampling.of(p).turns)
        and 0 < turns.cached < turns.conversations
        and {"turns": turns, "most": max(1, int(turns.cached) * p.grpo.rollout.engines)}
    ),
    "short_conversations": lambda p: (
        (agent := p.grpo.agent)
        and agent.turns_max > 1
        and p.grpo.sequence_tokens_max - p.lengths.prompt < 2 * (longest := p.grpo.rollout.response_tokens_max)
        and {"enough": p.grpo.data.prompt_tokens_max + 4 * longest}
    ),
    "waiting_devices": _waiting,
    "thrown_tokens": lambda p: (
        p.scheduled
        and p.scheduled.thrown_tokens
        and {"carry_over": min(p.grpo.prompts_at_once - (step := p.grpo.rollout.prompts_per_step), 2 * step)}
    ),
    "short_timeout": _short_timeouts,
}

# --- disk ------------------------------------------------------------------------------------------------------------


def checkpoint_bytes(case: Case) -> int:
    """Returns a checkpoint's bytes without file headers: trained weights, optimizer, a moving reference, a critic."""
    return saved_bytes(replace(case, machines=None), ParallelLayout(), 0, STATE_BYTES)


def runs_here(recipe: AnyRecipe) -> bool:
    """Returns whether this machine's file systems seem the run's: no cluster.gpu, and model.path is a directory."""
    return recipe.cluster.gpu is None and Path(recipe.model.path).is_dir()


def disk_problems(
    recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None
) -> Iterator[Problem]:
    """Yields a problem if the checkpoint directory, on this machine, has no room for even one checkpoint."""
    yield from broken(START_RULES, Case(recipe, architecture, machines=None, critic=critic))


def _no_room(directory: Path, needed: int, size: int, **values: object) -> Values | None:
    """Returns the values of a text if `needed` bytes, in items of `size`, are not free in a directory's file system."""
    above = directory.absolute()
    free = shutil.disk_usage(next(path for path in (above, *above.parents) if path.exists())).free
    texts = {"needed": byte_text(needed), "size": byte_text(size), "free": byte_text(free), "place": directory}
    return {**values, **texts} if needed > free else None


def _no_room_for_checkpoints(case: Case) -> object:
    """Counts that a new checkpoint is written before the oldest is deleted."""
    keep, best = case.recipe.checkpoint.keep_last, case.recipe.checkpoint.keep_best is not None
    directory, size = checkpoint_directory(case.recipe), checkpoint_bytes(case)
    saved = len(list(directory.glob("step_*"))) if directory.is_dir() else 0
    checkpoints = "checkpoints, the best" if best else "checkpoints"
    return _no_room(directory, max(1, keep + best + 1 - saved) * size, size, checkpoints=checkpoints)


def _no_room_for_batches(case: Case) -> object:
    """Counts every response at its longest."""
    recipe = case.recipe
    if isinstance(recipe, SftRecipe):
        return None
    token_bytes = SAMPLED_TOKEN_BYTES + set_bytes(recipe, case.architecture)
    of_prompt = recipe.rollout.samples_per_prompt * sampled_tokens_max(recipe) * token_bytes
    if sizes := replayed_routes(recipe, case.architecture):
        of_prompt += recipe.rollout.samples_per_prompt * recipe.sequence_tokens_max * sizes.token_bytes
    size = recipe.rollout.prompts_per_step * (of_prompt + recipe.data.prompt_tokens_max * PROMPT_TOKEN_BYTES)
    return _no_room(run_directory(recipe), size * recipe.checkpoint.keep_batches, size)


def _no_room_for_exports(case: Case) -> object:
    recipe, every, steps = case.recipe, case.recipe.checkpoint.export_every_steps, case.recipe.train.total_steps
    exported = len(list((run_directory(recipe) / "hugging_face_steps").glob("step_*")))
    to_export = 0 if every is None else 1 if steps is None else steps // every  # 1: the steps are not known
    models = max(0, to_export - exported) + recipe.checkpoint.export_hugging_face
    item = ITEM_BYTES[dtype_name(recipe, "cpu" if recipe.cluster.device == "cpu" else "cuda")]
    size, field = item * total_parameters(case.architecture), "export_every_steps" if every else "export_hugging_face"
    return _no_room(run_directory(recipe), size * models, size, models=models, field=field)


START_RULES: Rules[Case] = {
    "no_room_for_a_checkpoint": lambda c: _no_room(checkpoint_directory(c.recipe), size := checkpoint_bytes(c), size)
}
UNWISE: Mapping[str, Rules[Plan]] = {
    "training": LAYOUT_RULES,
    "engines": ENGINE_RULES,
    "sampling": SAMPLING_RULES,
    "time": {"checkpoints_far_apart": _checkpoints_far_apart},
    "disk": {
        "no_room_for_checkpoints": _no_room_for_checkpoints,
        "no_room_for_batches": _no_room_for_batches,
        "no_room_for_exports": _no_room_for_exports,
    },
}
"""Rules of what is unwise, by title of their table in docs/reference/rules.md."""
