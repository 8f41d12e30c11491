"""From what each function says of a response to its score: the weighted sum with its gates, penalties and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megagrpo.recipe import schema
from megagrpo.reward.function import Outcome
from megagrpo.reward.loading import FunctionSpec
from megagrpo.types import Sample, Score

OVERLONG = "overlong"
"""Part of a score that is its penalty for length."""

REACHED_LIMIT = "the response reached the token limit"


def gated_functions(functions: Sequence[schema.RewardFunctionConfig]) -> tuple[bool, ...]:
    """For each function, whether it counts only if those that always count give a sum other than 0."""
    others_count = any(
        function.counts == "always" or (function.counts == "auto" and function.function != "format")
        for function in functions
    )
    return tuple(
        function.counts == "when_others_score"
        or (function.counts == "auto" and function.function == "format" and others_count)
        for function in functions
    )


def weighted_score(
    specs: Sequence[FunctionSpec], gated: Sequence[bool], outcomes: Sequence[Outcome], solved_at: float
) -> Score:
    """The weighted sum, or no value if any function failed, gated or not.

    `parts`: raw scores by name, and metrics as name.metric. `counted`: raw scores in order, 0 where a gate was shut. A
    gate asks whether the weighted sum of the functions that always count differs from 0, whatever their scale.
    """
    parts: dict[str, float] = {}
    errors: list[str] = []
    for spec, outcome in zip(specs, outcomes, strict=True):
        if outcome.score is None:
            errors.append(f"{spec.name}: {outcome.error}")
            continue
        parts[spec.name] = outcome.score
        parts.update({f"{spec.name}.{metric}": value for metric, value in outcome.metrics.items()})
    if errors:
        return Score(None, parts, "; ".join(errors))
    always = sum(spec.weight * parts[spec.name] for spec, shut in zip(specs, gated, strict=True) if not shut)
    counted = tuple(
        0.0 if may_shut and always == 0 else parts[spec.name] for spec, may_shut in zip(specs, gated, strict=True)
    )
    total = sum((spec.weight * score for spec, score in zip(specs, counted, strict=True)), 0.0)
    if not math.isfinite(total):
        return Score(None, parts, f"the weighted sum is {total}")
    return Score(total, parts, counted=counted, solved=total >= solved_at)


def shaped_score(score: Score, sample: Sample, reward: schema.RewardConfig, response_tokens_max: int) -> Score:
    """What training makes of a score: non_stop_score, then the penalty for length, then the mask. `solved` stays.

    A score without a value is returned as it is.
    """
    if score.value is None:
        return score
    truncated = sample.finish == "length"
    value, parts = score.value, score.parts
    if truncated and reward.non_stop_score is not None:
        value = reward.non_stop_score
    if reward.overlong is not None:
        penalty = overlong_penalty(len(sample.tokens), reward.overlong, response_tokens_max)
        value, parts = value + penalty, {**parts, OVERLONG: penalty}
    if truncated and reward.truncated == "mask":
        return replace(score, value=None, parts=parts, counted=(), masked=REACHED_LIMIT)
    return replace(score, value=value, parts=parts)


def overlong_penalty(tokens: int, overlong: schema.OverlongConfig, response_tokens_max: int) -> float:
    """DAPO, arXiv:2503.14476, eq. 13: 0 up to the buffer, falling in a line to -penalty at the limit; never above 0."""
    used = tokens - (response_tokens_max - overlong.buffer_tokens)
    return -overlong.penalty * min(max(used / overlong.buffer_tokens, 0.0), 1.0) + 0.0
