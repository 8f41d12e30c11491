"""Built-in rewards against golden answers, and what is said of functions that cannot be loaded."""

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.errors import RewardError
from megagrpo.recipe import schema
from megagrpo.reward import format, gsm8k, math, workers
from megagrpo.reward.functions import TAKEN_NAMES, function_specs, outcome_of
from megagrpo.reward.scorer import Scorer, reward_problems
from megagrpo.track.metrics import METRICS


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Functions that load slowly because the machine is busy are not refused."""
    monkeypatch.setattr(workers, "START_TIMEOUT_SECONDS", 250.0)


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        *((response, "18", "18") for response in ("6 * 3 = 18\n#### 18", "####18", "#### $18", "#### 0018")),
        *((response, "-5", "-5") for response in ("#### -5", "#### \u22125", "#### $-5")),
        *((f"#### {text}", "0.5", "0.5") for text in (".5", "+.5", "0.50 dollars.", "1\n#### .5", ".5%")),
        ("#### -$18 or $-3", "-18", "-3"),
        ("#### 1,234,567.50.", "1234567.5", "1234567.5"),
        *((response, None, "18") for response in ("18", "#### x 18", "#### 18\n####", "5 apples and 18 pears.")),
        *((f"#### {text}", None, last) for text, last in (("1/2", "2"), ("1e3", "3"), ("1,2", "2"), ("2^10", "10"))),
        ("#### 1000,000", None, "0"),
        *((response, None, None) for response in ("", "####", "none", "#### \u0661")),  # an Arabic-Indic digit one
        *((response, None, "-3") for response in ("the answer is -3.", "x=-3")),
        *((response, None, "3") for response in ("5-3", "(2)-3", "1,3")),  # a subtraction, and no thousands
    ],
)
def test_strict_takes_the_number_after_the_last_marker_and_flexible_the_last(response, strict, flexible):
    expected = [None if number is None else Decimal(number) for number in (strict, flexible)]
    assert [gsm8k.strict_answer(response), gsm8k.flexible_answer(response)] == expected


numbers = st.decimals(min_value=-(10**9), max_value=10**9, places=3)


@given(
    numbers,
    st.sampled_from(["strict", "flexible"]),
    st.sampled_from(["", "$"]),
    st.sampled_from(["", ".", " apples", "\n"]),
)
def test_any_way_of_writing_a_number_equals_it(number, method, currency, tail):
    sign, size = ("-" if number < 0 else ""), abs(number)
    score = gsm8k.make(method)
    for written in (f"{sign}{currency}{size}", f"{sign}{currency}{size:,}"):
        arguments = {"data_source": "", "response": f"so 3 #### {written}{tail}", "extra_info": {}}
        assert score(ground_truth=str(number), **arguments) == 1.0
        assert score(ground_truth=f"{number + 1:,}", **arguments) == 0.0


def test_a_ground_truth_that_is_not_a_number_is_an_error():
    for ground_truth in ("many", "", "nan", "inf"):
        with pytest.raises(ValueError, match="not a number"):
            gsm8k.make()(data_source="", response="#### 1", ground_truth=ground_truth, extra_info={})


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"so it is \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"$0.5$", r"\frac{1}{2}", 1),
        (r"\boxed{\dfrac{2}{4}}", r"$\frac12$", 1),
        (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2", 1),
        (r"\boxed{\{3, 1, 2\}}", r"\{1, 2, 3\}", 1),
        (r"\boxed{(1, 2)}", r"(1,2)", 1),
        (r"the answer is 42", r"42", 1),
        (r"first $3$, then \boxed{4}", r"\boxed{4}", 1),
        (r"\boxed{1}, or rather \boxed{2}", "2", 1),
        (r"\boxed{1} or \boxed{2}", "1", 0),
        (r"\boxed{1, 2}", r"\{1, 2\}", 1),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0),
        (r"\boxed{(2, 1)}", r"(1,2)", 0),
        (r"no idea", r"7", 0),
        (r"", r"7", 0),
    ],
)
def test_math_compares_expressions(response, truth, score):
    assert math.make()(data_source="", response=response, ground_truth=truth, extra_info={}) == score


def test_format_searches_unless_the_pattern_is_anchored():
    def score(pattern: str, response: str) -> float:
        return format.make(pattern)(data_source="", response=response, ground_truth="", extra_info={})

    assert score(r"#### \d+", "so\n#### 5 and more") == 1.0
    assert score(r"\A#### \d+\Z", "so\n#### 5") == 0.0
    assert score(r"(?s)\A<think>.*</think>", "<think>a\nb</think> 5") == 1.0


@pytest.mark.parametrize(
    ("value", "score"), [(1, 1.0), (True, 1.0), (0.25, 0.25), (Decimal("0.5"), 0.5), ({"score": 2, "n": 3}, 2.0)]
)
def test_numbers_are_scores(value, score):
    outcome = outcome_of(value)
    assert (outcome.score, outcome.error) == (score, "")
    assert outcome.metrics == ({"n": 3.0} if isinstance(value, dict) else {})


@pytest.mark.parametrize(
    "value", [None, "1", float("nan"), float("inf"), 10**400, [1], {"n": 1}, {"score": None}, {"score": 1, "n": "x"}]
)
def test_anything_else_is_an_error_never_a_zero(value):
    outcome = outcome_of(value)
    assert outcome.score is None
    assert outcome.error.startswith("returned")


USER_FILE = """
import neighbour

def good(data_source, response, ground_truth, extra_info, scale=neighbour.SCALE):
    return scale

def few(response, ground_truth):
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
        f"{user_file}:few": "called by these names",
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
    rewards = [metric.name.removeprefix("reward/") for metric in METRICS if metric.name.startswith("reward/")]
    assert sorted(TAKEN_NAMES) == sorted(name for name in rewards if "{" not in name)
