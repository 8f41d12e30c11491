"""Grade-school arithmetic: the final number of a response against the ground truth, compared as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from megagrpo.reward.functions import RewardCallable

# 1,234,567.5 or 1234567.5 or .5; a comma that does not separate thousands is not part of a number.
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
_SIGN = r"[-+\u2212]"

# After the number nothing may follow that would make it another number: 1/2, 1e3, 1,2, 2^5.
_STRICT = re.compile(rf"####\s*((?:{_SIGN}?\$?|\$?{_SIGN}){_DIGITS})(?![0-9]|[.,/^*][0-9]|[eE][-+]?[0-9])")
# A minus after a digit or a parenthesis is a subtraction, not a sign.
_FLEXIBLE = re.compile(rf"(?:(?<![0-9)]){_SIGN})?\$?{_DIGITS}")


def make(method: str = "strict") -> RewardCallable:
    """1.0 if the response's number equals the ground truth, else 0.0.

    strict: the number after the last `####`. flexible: the last number anywhere. ValueError for another method.
    """
    extract = {"strict": strict_answer, "flexible": flexible_answer}.get(method)
    if extract is None:
        raise ValueError(f"method is {method!r}, not strict or flexible")

    def gsm8k(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
        return float(extract(response) == _truth(ground_truth))

    return gsm8k


def strict_answer(response: str) -> Decimal | None:
    """The number right after the last `####`, None if there is none."""
    start = response.rfind("####")
    match = _STRICT.match(response, start) if start >= 0 else None
    return _decimal(match.group(1)) if match else None


def flexible_answer(response: str) -> Decimal | None:
    """The last number of the response, None if there is none."""
    numbers = _FLEXIBLE.findall(response)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", "").replace("\u2212", "-"))


@lru_cache(maxsize=65536)
def _truth(ground_truth: str) -> Decimal:
    try:
        truth = _decimal(ground_truth.strip())
    except InvalidOperation:
        truth = Decimal("nan")
    if not truth.is_finite():
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return truth
