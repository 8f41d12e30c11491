"""Rules between fields about the correction for what engines sample differently. Pure, as algorithm_checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.recipe.passes import corrects
from megagrpo.recipe.rule_problem import RuleProblem, broken, given_keys
from megagrpo.recipe.schema import Recipe, RejectionConfig

NO_DIFFERENCE = {"ratio": 1.0, "k1": 0.0, "k2": 0.0, "k3": 0.0}
"""What a statistic of correction.reject is where engine and trainer agree."""


def _correction(recipe: Recipe) -> Iterator[RuleProblem]:
    correction = recipe.algorithm.correction
    if recipe.algorithm.rollout_logprobs_as_old and corrects(recipe.algorithm):
        yield broken(
            "algorithm.rollout_logprobs_as_old",
            reads=("algorithm.correction.weights", "algorithm.correction.reject", "algorithm.correction.veto"),
            given="true, with a correction",
            needed="false: the old logprobs are the engines', so every weight would be 1 and nothing be left out",
            fix="remove one of them: ratios to the engines' logprobs are a correction by themselves",
        )
    unread = ("low", "high", "outside", "normalize")
    for key in given_keys(correction, only=unread) if correction.weights is None else ():
        yield broken(
            f"algorithm.correction.{key}",
            reads=("algorithm.correction.weights",),
            given=f"{getattr(correction, key)}, without weights",
            needed="nothing: it is for the weights",
            fix="remove it, or write weights: token",
        )
    if correction.weights is not None and not correction.low <= 1 <= correction.high:
        yield broken(
            "algorithm.correction.high" if correction.high < 1 else "algorithm.correction.low",
            reads=("algorithm.correction.low", "algorithm.correction.high"),
            given=f"weights in [{correction.low}, {correction.high}]",
            needed="bounds around 1, the weight where engine and trainer agree",
            fix="low: 0.5 and high: 2.0",
        )
    if correction.veto is not None and correction.veto >= 1:
        yield broken(
            "algorithm.correction.veto",
            given=f"{correction.veto}",
            needed="below 1, the ratio where engine and trainer agree: nearly every response has a token below it",
            fix="veto: 1e-4",
        )
    for index, rejection in enumerate(correction.reject):
        yield from _rejection(f"algorithm.correction.reject.{index}", rejection)


def _rejection(where: str, rejection: RejectionConfig) -> Iterator[RuleProblem]:
    agreed = NO_DIFFERENCE[rejection.statistic]
    low, high = rejection.low, rejection.high
    if low is None and high is None:
        yield broken(
            f"{where}.high",
            reads=(f"{where}.low",),
            given="neither low nor high",
            needed="at least one bound",
            fix=f"high: {2.0 if rejection.statistic == 'ratio' else 0.1}",
        )
    elif (low is not None and low > agreed) or (high is not None and high < agreed):
        yield broken(
            f"{where}.low" if low is not None and low > agreed else f"{where}.high",
            reads=(f"{where}.statistic",),
            given=f"[{'-inf' if low is None else low}, {'inf' if high is None else high}] for {rejection.statistic}",
            needed=f"bounds around {agreed:g}, its value where engine and trainer agree",
            fix="widen it",
        )
    if rejection.level == "token" and given_keys(rejection, only=("over",)):
        yield broken(
            f"{where}.over",
            reads=(f"{where}.level",),
            given=f"{rejection.over}, with level: token",
            needed="nothing: each token stands for itself",
            fix="remove it, or write level: sequence",
        )


CORRECTION_RULES: tuple[Callable[[Recipe], Iterator[RuleProblem]], ...] = (_correction,)
