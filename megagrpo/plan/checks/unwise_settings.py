"""What is unwise in settings other than the layout: microbatches, memory, deadlines, checkpoints, learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.errors import Problem
from megagrpo.plan.checks.impossible import engine_on
from megagrpo.plan.checks.planned import Planned, minibatch_sequences
from megagrpo.plan.units import second_text
from megagrpo.recipe.schema import Recipe, SftRecipe

FREE_SHARE_MIN = 0.5
KV_CACHE_SHARE_MIN = 0.1
LEARNING_RATE_MAX = 5e-5
LOST_SECONDS_MAX = 6 * 3600
TIMEOUT_SHARE_MAX = 0.8


def _long_microbatches(planned: Planned) -> Iterator[Problem]:
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


def _recompute(planned: Planned) -> Iterator[Problem]:
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


def _whole_optimizer(planned: Planned) -> Iterator[Problem]:
    train = planned.recipe.train
    if not train.distributed_optimizer and train.layout.data * train.layout.context > 1 and train.lora is None:
        yield Problem(
            "train.distributed_optimizer",
            given=f"false, with {train.layout.data * train.layout.context} replicas: each holds all optimizer states",
            needed="each its share: the same numbers for 12 bytes less for each parameter",
            fix="distributed_optimizer: true",
        )


def _key_value_cache(planned: Planned) -> Iterator[Problem]:
    recipe, engine = planned.recipe, engine_on(planned.recipe, planned.architecture, planned.machines)
    if engine is not None and 0 < engine.sequences < KV_CACHE_SHARE_MIN * engine.asked and isinstance(recipe, Recipe):
        yield Problem(
            "rollout.layout.tensor",
            given=f"{recipe.rollout.layout.tensor}: a cache for {engine.sequences} longest responses of {engine.asked}",
            needed=f"room for {KV_CACHE_SHARE_MIN:.0%} of an engine's responses: each batch reads all weights",
            fix="more tensor ranks in each engine, or shorter responses",
        )


def _timeouts(planned: Planned) -> Iterator[Problem]:
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


def _rare_checkpoints(planned: Planned) -> Iterator[Problem]:
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


def _learning_rate(planned: Planned) -> Iterator[Problem]:
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


def _round_up(seconds: float) -> int:
    return int(-(-seconds // 300) * 300)


SETTING_RULES: tuple[Callable[[Planned], Iterator[Problem]], ...] = (
    _long_microbatches, _recompute, _whole_optimizer, _key_value_cache, _timeouts, _rare_checkpoints, _learning_rate,
)  # fmt: skip
