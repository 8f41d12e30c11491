"""The shape of a response, by a regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megagrpo.reward.functions import RewardCallable


def make(pattern: str) -> RewardCallable:
    r"""1.0 if `re.search(pattern, response)` finds something, else 0.0.

    Write `\A...\Z` for the whole response and `(?s)` to let a dot match line ends. ValueError for a bad pattern.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as reason:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {reason}") from None

    def format(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
        return float(compiled.search(response) is not None)

    return format
