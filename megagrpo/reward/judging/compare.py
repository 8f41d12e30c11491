"""Scores of responses from comparisons of two at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from megagrpo.reward.judging.client import Answer, JudgeError, OverBudgetError, Read

Comparison = tuple[int, int, float]
"""Two responses, and the share of the comparison that the first has won: 1, 0.5 for a tie, 0."""

ROUNDS_MAX = 10_000
EXACT = 1e-12
PRIOR = 0.5
"""Comparisons against a response of mean strength that each response begins with, PRIOR won and PRIOR lost: one
that wins all would otherwise be infinitely strong."""


async def answers_of(asked: Sequence[Coroutine[Any, Any, Answer[Read]]]) -> list[Answer[Read] | None]:
    """Returns a judge's answers to several questions, None where there is no verdict.

    Raises OverBudgetError, and JudgeError if no question has a verdict.
    """
    found = await asyncio.gather(*asked, return_exceptions=True)
    raised = [answer for answer in found if isinstance(answer, BaseException)]
    for error in raised:
        if isinstance(error, OverBudgetError) or not isinstance(error, JudgeError):
            raise error
    if raised and len(raised) == len(found):
        raise raised[0]
    return [None if isinstance(answer, BaseException) else answer for answer in found]


def chosen_pairs(count: int, most: int, seed: str) -> list[tuple[int, int]]:
    """Returns pairs of `count` responses to compare: all, or `most` of them, with each response in about as many.

    The responses lie on a ring in an order that `seed` decides; neighbours are compared first, then those two apart,
    and so on. So with at least `count` pairs each response is connected with all others.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    ring = [
        (order[at], order[(at + distance) % count])
        for distance in range(1, count // 2 + 1)
        for at in range(count if 2 * distance < count else count // 2)
    ]
    return [(min(pair), max(pair)) for pair in ring[:most]]


def win_rates(count: int, comparisons: Sequence[Comparison]) -> list[float | None]:
    """Returns the share of its comparisons that each response has won; None for one without any."""
    won, played = _totals(count, comparisons)
    return [won[i] / played[i] if played[i] else None for i in range(count)]


def bradley_terry(count: int, comparisons: Sequence[Comparison]) -> list[float | None]:
    """Returns the chance of each response to win against one of mean strength; None for one without comparisons.

    Strengths p with P(i beats j) = p_i / (p_i + p_j) of greatest likelihood, by minorisation-maximisation (Hunter 2004,
    MM algorithms for generalized Bradley-Terry models, eq. 3). Ties are half a win for both.
    """
    won, played = _totals(count, comparisons)
    strengths = [1.0] * count
    for _ in range(ROUNDS_MAX):
        weights = [2 * PRIOR / (strength + 1.0) for strength in strengths]
        for i, j, _ in comparisons:
            each = 1.0 / (strengths[i] + strengths[j])
            weights[i] += each
            weights[j] += each
        before, strengths = strengths, [(won[i] + PRIOR) / weights[i] for i in range(count)]
        if all(abs(new - old) <= EXACT * old for new, old in zip(strengths, before, strict=True)):
            break
    return [strengths[i] / (1.0 + strengths[i]) if played[i] else None for i in range(count)]


def _totals(count: int, comparisons: Sequence[Comparison]) -> tuple[list[float], list[int]]:
    """Returns the wins of each response, and the number of its comparisons."""
    won, played = [0.0] * count, [0] * count
    for i, j, share in comparisons:
        won[i] += share
        won[j] += 1.0 - share
        played[i] += 1
        played[j] += 1
    return won, played
