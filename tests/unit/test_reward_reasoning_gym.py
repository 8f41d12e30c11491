"""Answers that attack reasoning-gym's scorers: each costs its own score, and reads nothing of the entry."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import sympy

from megagrpo.errors import RewardError
from megagrpo.reward.functions import FunctionSpec, load
from megagrpo.reward.verifiers import reasoning_gym
from megagrpo.reward.verifiers.reasoning_gym import scoring

SPIRAL = ("1 2 3 6 9 8 7 4 5", {"source_dataset": "spiral_matrix", "solution": [1, 2, 3, 6, 9, 8, 7, 4, 5]})
COUNTDOWN = ("3*4 + 2", {"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 14, "expression": "3*4 + 2"})


@cache
def made(isolation: str):
    return reasoning_gym.make(extract="either", isolation=isolation)


@pytest.fixture(params=[pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")), "seccomp"])
def score(request: pytest.FixtureRequest) -> Iterator[object]:
    function = made(request.param)

    def call(answer: str, entry: tuple[str, dict]) -> float:
        return function(response=f"<answer>{answer}</answer>", ground_truth=entry[0], extra_info=entry[1])["score"]

    return call


def right_and_wrong(score, entry: tuple[str, dict], wrong: str) -> None:
    assert score(entry[0], entry) == 1.0
    assert score(wrong, entry) < 0.5


def test_an_answer_that_runs_code_costs_its_own_score_alone(score, tmp_path: Path) -> None:
    file = tmp_path / "escaped"
    tmp_path.chmod(0o777)
    run = f"__import__('os').system('echo 1 > {file}')"
    assert score(run, COUNTDOWN) < 0.5
    assert score(f"[{run}]", SPIRAL) < 0.5
    assert not file.exists()
    change = "[setattr(type(self), 'score_answer', lambda s, answer, entry: 1.0)]"
    assert score(change, SPIRAL) < 0.5
    right_and_wrong(score, SPIRAL, "9 9 9")
    right_and_wrong(score, COUNTDOWN, "3 + 4 + 2")


@pytest.mark.parametrize(
    "answer", ["entry['metadata']['solution']", "[n for n in entry['metadata']['solution']]", "oracle_answer.split()"]
)
def test_an_answer_does_not_read_the_entry(score, answer: str) -> None:
    assert score(answer, SPIRAL) == 0.0


def test_an_answer_may_be_a_list_or_arithmetic_as_the_package_allows(score) -> None:
    assert score(str([1, 2, 3, 6, 9, 8, 7, 4, 5]), SPIRAL) == 0.1
    assert score("2 + 3*4", COUNTDOWN) == 1.0


def test_what_sympy_knows_is_evaluated_and_nothing_else() -> None:
    names = {"__builtins__": {}, **vars(sympy)}
    x = sympy.Symbol("x")
    assert scoring.evaluated("sqrt(Symbol('x'))+C*Integer(2)", names, {"C": x}) == sympy.sqrt(x) + 2 * x
    for text in (
        "open",
        "sympify('1')",
        "S",
        "Symbol('x').name",
        "Symbol('import os')",
        "lambdify(x, x)",
        "[Symbol('x') for _ in pi]",
        "(y := 1)",
        "lambda: 1",
        "Poly(['__import__(1)'])",
        "Symbol('x', a='()')",
        "f'{pi}'",
    ):
        with pytest.raises(ValueError):
            scoring.evaluated(text, names, {})


def test_a_row_that_names_no_task_is_refused_though_the_response_has_no_answer() -> None:
    function = made("auto")
    for info in ({"source_dataset": "no_task"}, {"source_dataset": "leg_counting", reasoning_gym.ARGUMENTS: {"x": 1}}):
        with pytest.raises(ValueError):
            function(response="", ground_truth="4", extra_info=info)


@pytest.mark.parametrize("arguments", [{"extract": "all"}, {"seconds": 0}, {"isolation": "docker"}])
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(RewardError):
        load(FunctionSpec("reasoning_gym", "reasoning_gym", 1.0, arguments, "reward.functions[0]"))
