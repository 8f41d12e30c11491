"""What a reward function is: its call, its return value, and what a return value must look like."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

RewardReturn = float | Mapping[str, Any]
RewardCallable = Callable[..., RewardReturn | Awaitable[RewardReturn]]
"""Called by keyword: (data_source: str, response: str, ground_truth: str, extra_info: Mapping)."""

CALL_ARGUMENTS = ("data_source", "response", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class Task:
    """One response for one function."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one function said of one response: a finite score with other metrics, or an error."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


def outcome_of(returned: object) -> Outcome:
    """Check a return value: a finite number, or a mapping with a finite `score` and other finite metrics."""
    if type(returned) is float and math.isfinite(returned):  # nearly always
        return Outcome(returned)
    values = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in values:
        return Outcome(
            None, error=f"returned a mapping without 'score': keys {', '.join(map(str, values)) or '(none)'}"
        )
    metrics: dict[str, float] = {}
    for name, value in values.items():
        number = _number(value)
        if number is None:
            return Outcome(None, error=f"returned {_brief(value)} as {name}, not a number")
        if not math.isfinite(number):
            return Outcome(None, error=f"returned {number} as {name}, not a finite number")
        metrics[str(name)] = number
    return Outcome(metrics.pop("score"), metrics)


def failure_of(raised: BaseException) -> Outcome:
    """The outcome of a function that raised."""
    text = f"{type(raised).__name__}: {raised}" if str(raised) else type(raised).__name__
    return Outcome(None, error=text.splitlines()[0][:300])


def timed_out(timeout_seconds: float) -> Outcome:
    """The outcome of a function that did not return in time."""
    return Outcome(None, error=f"took longer than {timeout_seconds:g} s")


def _number(value: object) -> float | None:
    # __float__ admits numpy and torch scalars, Decimal and Fraction, and keeps out text.
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
