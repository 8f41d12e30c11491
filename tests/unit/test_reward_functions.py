"""Built-in rewards against golden answers, and what is said of functions that cannot be loaded."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from megagrpo.errors import RewardError
from megagrpo.recipe import schema
from megagrpo.reward import workers
from megagrpo.reward.functions import TAKEN_NAMES, function_specs, outcome_of
from megagrpo.reward.scorer import Scorer, reward_problems
from megagrpo.track.metrics import documented
from megagrpo.types import Group, Prompt, Sample


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Functions that load slowly because the machine is busy are not refused."""
    monkeypatch.setattr(workers, "START_TIMEOUT_SECONDS", 250.0)


@pytest.mark.parametrize(
    ("value", "score"), [(1, 1.0), (True, 1.0), (0.25, 0.25), (Decimal("0.5"), 0.5), ({"score": 2, "n": 3}, 2.0)]
)
def test_numbers_are_scores(value, score):
    outcome = outcome_of(value)
    assert (outcome.score, outcome.error) == (score, "")
    assert outcome.metrics == ({"n": 3.0} if isinstance(value, dict) else {})


@pytest.mark.parametrize(
    "value", [None, "1", float("nan"), float("inf"), 10**400, [1], {"n": 1}, {"score": None}, {"score": 1, "n": [2]}]
)
def test_anything_else_is_an_error_never_a_zero(value):
    outcome = outcome_of(value)
    assert outcome.score is None
    assert outcome.error.startswith("returned")


USER_FILE = """
import neighbour

def good(data_source, response, ground_truth, extra_info, scale=neighbour.SCALE):
    return scale

def few(ground_truth):
    return 1

number = 3
mean = good
"""


RAISED = {
    "syntax": "SyntaxError: invalid syntax (line 1)",
    "missing": "No module named 'nowhere_at_all' (line 1)",
    "raises": "ZeroDivisionError: division by zero (line 2)",
    "exits": "SystemExit",
}


def reward(*functions: str | dict, **options) -> schema.RewardConfig:
    entries = [{"function": f} if isinstance(f, str) else f for f in functions]
    return schema.RewardConfig.model_validate({"functions": entries, **options})


@pytest.fixture
def user_file(tmp_path) -> Path:
    (tmp_path / "neighbour.py").write_text("SCALE = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_a_good_section_has_no_problems(user_file):
    section = reward(
        "gsm8k",
        "math",
        {"function": "format", "arguments": {"pattern": "a"}},
        f"{user_file}:good",
        {"function": f"{user_file}:good", "arguments": {"scale": 3}},
    )
    assert reward_problems(section) == []
    assert [spec.name for spec in function_specs(section)] == ["gsm8k", "math", "format", "good", "good_2"]
    assert reward_problems(reward("gsm8k", workers=0)) == []


def test_a_program_may_not_take_longer_than_the_reward():
    code = {"function": "code", "arguments": {"seconds": 20}}
    assert [problem.where for problem in reward_problems(reward(code))] == ["reward.functions[0].arguments.seconds"]
    assert reward_problems(reward(code, timeout_seconds=21)) == []
    assert len(reward_problems(reward({"function": "code"}, timeout_seconds=8))) == 1


def test_all_load_errors_are_found_at_once_before_a_run(user_file, tmp_path):
    broken = ("def good(:", "import nowhere_at_all", "x = 1\nx / 0", "import sys\nsys.exit()")
    for file, code in zip(RAISED, broken, strict=True):
        (tmp_path / f"{file}.py").write_text(code)
    wrong = {
        "gsm8": "gsm8k",
        "mine.py": "FILE.py:FUNCTION",
        "nowhere.py:good": "nowhere.py",
        "gsm8k method=loose": "'loose'",
        "gsm8k methd=strict": "'methd'",
        "math precision=3": "arguments",
        "format": "'pattern'",
        "format pattern=(": "regular expression",
        f"{user_file}:mean": "reward/mean",  # would be the metric of the whole reward
        f"{user_file}:nothing": "good, few",
        f"{user_file}:number": "number",
        f"{user_file}:few": "to be scored",
        f"{user_file}:good size=1": "'size'",
        **{f"{tmp_path}/{file}.py:good": error for file, error in RAISED.items()},
    }
    entries = []
    for entry in wrong:
        function, _, argument = entry.partition(" ")
        name, _, value = argument.partition("=")
        entries.append({"function": function, "arguments": {name: value} if name else {}})
    section = reward(*entries, workers=0)
    *problems, no_workers = sorted(reward_problems(section), key=lambda problem: problem.where)
    assert no_workers.where == "reward.workers"
    texts = {problem.where.partition("]")[0] + "]": str(problem) for problem in problems}
    assert len(texts) == len(problems) == len(wrong)
    for index, (entry, words) in enumerate(wrong.items()):
        assert words in texts[f"reward.functions[{index}]"], entry
    with pytest.raises(RewardError, match=r"\(10 problems\)"):  # what is known without a user's code
        Scorer(section, 10)


@pytest.mark.parametrize(
    ("code", "needle"),
    [("import os\nos._exit(7)", "its process died (exit status 7)"), ("while True: pass", "not ready after 1 s")],
)
def test_a_file_that_ends_or_holds_its_process_is_a_problem(code, needle, tmp_path, monkeypatch):
    if "while" in code:
        monkeypatch.setattr(workers, "START_TIMEOUT_SECONDS", 1.0)
    (tmp_path / "mine.py").write_text(code)
    (problem,) = reward_problems(reward(f"{tmp_path / 'mine.py'}:good"))
    assert needle in str(problem)


def test_the_names_that_functions_cannot_take_are_those_of_the_metrics():
    rewards = [metric.name.removeprefix("reward/") for metric in documented() if metric.name.startswith("reward/")]
    assert sorted(TAKEN_NAMES) == sorted(name for name in rewards if "{" not in name)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("gsm8k", {"method": ["strict"]}),
        ("search_answer", {"method": {"exact": 1}}),
        ("code", {"seconds": "8"}),
        ("language", {"among": [1]}),
        ("multiple_choice", {"letters": None}),
        ("repetition", {"penalty": float("nan")}),
    ],
)
def test_an_argument_of_another_type_is_a_problem_that_names_it(function, arguments):
    section = {"functions": [{"function": function, "arguments": arguments}]}
    problems = reward_problems(schema.RewardConfig.model_validate(section), sandbox=False)
    name = next(iter(arguments))
    assert problems[0].where == f"reward.functions[0].arguments.{name}"
    assert name in problems[0].fix


@pytest.mark.parametrize("arguments", [{"isolation": "seccomp", "seconds": 3}, {"isolation": "none", "packages": True}])
def test_arguments_of_the_types_that_a_verifier_takes_are_no_problem(arguments):
    section = {"functions": [{"function": "code", "arguments": arguments}]}
    assert not reward_problems(schema.RewardConfig.model_validate(section), sandbox=False)


@pytest.mark.parametrize("function", ["gsm8k", "math", "multiple_choice", "f1", "json_schema", "code"])
def test_a_ground_truth_that_cannot_be_used_is_said_with_its_row_and_without_a_traceback(function):
    arguments = {"equal": True} if function == "json_schema" else {}
    section = {"functions": [{"function": function, "arguments": arguments}], "failed_share_max": 1.0, "workers": 1}
    said: list[str] = []
    scorer = Scorer(schema.RewardConfig.model_validate(section), 8, say=said.append)
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    prompt = Prompt("train:17", (1,), "", "", "", {}, (), "")
    try:
        (group,) = scorer.score_unshaped([Group(prompt, (Sample("train:17", 0, *nothing, "stop", "5"),))])
    finally:
        scorer.close()
    assert group.scores[0].value is None
    assert "prompt train:17" in said[0]
    assert "Traceback" not in said[0]
