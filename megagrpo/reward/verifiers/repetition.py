"""A penalty for repeated n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megagrpo.reward.functions import RewardCallable, RewardReturn


def make(
    ngram: int = 3, penalty: float = 1.0, unit: Literal["words", "tokens", "characters"] = "words"
) -> RewardCallable:
    """Makes a reward function: -`penalty` times the share of n-grams that occurred before; 0.0 without any.

    As open-r1's get_repetition_penalty_reward, after Demystifying Long Chain-of-Thought (arXiv:2502.03373, appendix
    C.2). Words are split at white space, in lower case; take characters, with a larger `ngram`, for languages that do
    not write spaces. Metric: the share. Raises ValueError for an ngram or penalty not above 0.

    >>> verify = make(ngram=2); verify(response="so it is so it is so it is")
    {'score': -0.625, 'share': 0.625}
    >>> verify(response="each word stands here once")
    {'score': 0.0, 'share': 0.0}
    """
    if not isinstance(ngram, int) or ngram < 1 or not penalty > 0:
        raise ValueError(f"ngram is {ngram!r} and penalty {penalty!r}: a whole number and a number above 0 are needed")

    def scored(units: Sequence[object]) -> RewardReturn:
        total = max(0, len(units) - ngram + 1)
        different = len(set(zip(*(units[start:] for start in range(ngram)), strict=False)))
        share = 1.0 - different / total if total else 0.0
        return {"score": 0.0 - penalty * share, "share": share}

    def by_tokens(tokens: list[int]) -> RewardReturn:
        return scored(tokens)

    def by_text(response: str) -> RewardReturn:
        return scored(response.lower().split() if unit == "words" else response)

    return by_tokens if unit == "tokens" else by_text
