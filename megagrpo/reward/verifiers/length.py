"""The length of a response against a target or a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from megagrpo.reward.functions import RewardCallable, RewardReturn


def make(
    kind: Literal["target", "budget"] = "target",
    length: float | str | None = None,
    key: str = "",
    unit: Literal["tokens", "words", "characters"] = "tokens",
    tolerance: float | str | None = None,
) -> RewardCallable:
    """Makes a reward function: 1.0 at the wanted length, linear to 0.0 at `tolerance` above it (target: below it too).

    target: exactly that long is best. budget: anything up to it is. The wanted length is `length`, else the row's
    extra_info under `key`, else the ground truth. `tolerance` is in units, the wanted length by default. Tokens are
    those of the response, its end token included. L1-Exact (arXiv:2503.04697) subtracts α·|wanted − length|: a
    tolerance of 1/α. Metric: the length. Raises ValueError for lengths not above 0.

    >>> verify = make(length=10, unit="words"); verify(response="five words of the ten", ground_truth="", extra_info={})
    {'score': 0.5, 'length': 5}
    >>> verify = make("budget", key="num_tokens", tolerance=4)
    >>> [verify(tokens=range(n), ground_truth="", extra_info={"num_tokens": 8})["score"] for n in (1, 8, 9, 13)]
    [1.0, 1.0, 0.75, 0.0]
    """
    if length is not None:
        length = _positive(length, "length")
    if tolerance is not None:
        tolerance = _positive(tolerance, "tolerance")

    def scored(units: int, ground_truth: str, extra_info: Mapping[str, Any]) -> RewardReturn:
        if length is not None:
            wanted = length
        elif not key:
            wanted = _positive(ground_truth, "the ground truth")
        elif key in extra_info:
            wanted = _positive(extra_info[key], f"{key} of the row's extra_info")
        else:
            raise ValueError(f"the row's extra_info has no {key}")
        away = max(units - wanted, 0) if kind == "budget" else abs(units - wanted)
        return {"score": max(0.0, 1.0 - away / (tolerance or wanted)), "length": units}

    def by_tokens(tokens: list[int], ground_truth: str, extra_info: Mapping[str, Any]) -> RewardReturn:
        return scored(len(tokens), ground_truth, extra_info)

    def by_text(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> RewardReturn:
        return scored(len(response.split() if unit == "words" else response), ground_truth, extra_info)

    return by_tokens if unit == "tokens" else by_text


def _positive(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (0 < number < math.inf):
        raise ValueError(f"{name} is {value!r}, not a length above 0")
    return number
