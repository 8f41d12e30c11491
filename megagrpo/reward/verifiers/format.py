"""The shape of a response, by a regular expression."""

from __future__ import annotations

import re

from megagrpo.reward.functions import RewardCallable


def make(pattern: str) -> RewardCallable:
    r"""Makes a reward function: 1.0 if `re.search(pattern, response)` finds something, else 0.0.

    Write `\A...\Z` for the whole response and `(?s)` to let a dot match line ends. Raises ValueError for a bad pattern.

    >>> verify = make(pattern=r"(?s)\A<think>.*</think>"); verify(response="<think>so</think> 5"), verify(response="5")
    (1.0, 0.0)
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as reason:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {reason}") from None

    def format(response: str) -> float:
        return float(compiled.search(response) is not None)

    return format
