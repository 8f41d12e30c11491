"""Every verifier's examples, and its golden table of right and wrong answers.

A line of tests/golden/verifiers/NAME.jsonl is an object: `response`, `ground_truth`, `score` (null where the ground
truth cannot be used), and if needed `arguments` of make(), `answer`, `why`, and any other thing that a function may
ask for, such as `extra_info`, `prompt`, `tokens`.
"""

import asyncio
import doctest
import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import count
from pathlib import Path
from pkgutil import walk_packages

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.recipe.reward_functions import BUILT_IN
from megagrpo.reward import answer_text, verifiers
from megagrpo.reward.functions import MODULES as SHARED
from megagrpo.reward.functions import maker_of, solution_maker, wanted_arguments
from megagrpo.reward.verifiers import gsm8k

MODULES = sorted(found.name.split(".", 3)[3] for found in walk_packages(verifiers.__path__, f"{verifiers.__name__}."))
GOLDEN_DIRECTORY = Path(__file__).parents[1] / "golden" / "verifiers"
GOLDEN = sorted(path.stem for path in GOLDEN_DIRECTORY.glob("*.jsonl"))
EXTRAS = dict.fromkeys(("data_source", "prompt_text", "ability"), "")
EXTRAS |= {"prompt": [], "tokens": [], "extra_info": {}, "finish": "stop"}


def module(name: str):
    return importlib.import_module(f"megagrpo.reward.verifiers.{name}")


@cache
def made(name: str, arguments: str):
    return maker_of(name)(**json.loads(arguments))


def returned(name: str, row: dict):
    """Returns the function's result for a line of a table, None if it refuses the ground truth."""
    function = made(name, json.dumps(row.get("arguments", {})))
    try:
        value = function(**{name: {**EXTRAS, **row}[name] for name in wanted_arguments(function, {})})
    except ValueError:
        return None
    return asyncio.run(value) if inspect.isawaitable(value) else value


@cache
def results(name: str) -> list[tuple[dict, object]]:
    """The lines of a table, each with what the verifier returns for it."""
    lines = (GOLDEN_DIRECTORY / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row, returned(name, row)) for row in map(json.loads, lines)]


def differences(name: str) -> Iterator[str]:
    for number, (row, value) in enumerate(results(name), 1):
        score, answer = (value["score"], value.get("answer")) if isinstance(value, dict) else (value, None)
        if score != pytest.approx(row["score"]) or ("answer" in row and answer != row["answer"]):
            yield f"line {number}: {score} (answer {answer!r}) for {json.dumps(row)}"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_verifier_are_true(name):
    failed, attempted = doctest.testmod(module(name))
    assert attempted or not (hasattr(module(name), "make") or name in SHARED.values())
    assert not failed


def test_the_examples_of_what_verifiers_share_are_true():
    assert not doctest.testmod(answer_text).failed


@pytest.mark.parametrize("name", GOLDEN)
def test_a_verifier_scores_as_its_golden_table_says(name):
    assert not list(differences(name))
    assert len({row["score"] for row, _ in results(name)}) > 1


@pytest.mark.parametrize(
    "name", ["gsm8k", "math", "strict_math", "multiple_choice", "string_match", "search_answer", "f1"]
)
def test_the_solution_of_each_ground_truth_of_a_golden_table_is_right(name):
    usable = {row["ground_truth"]: row for row, value in results(name) if value is not None}
    row = {"arguments": {}, "prompt_text": ""}
    for truth, of_truth in usable.items():
        own = {
            key: of_truth[key] for key in ("extra_info", "arguments") if key in of_truth and name == "multiple_choice"
        }
        response = solution_maker(name)(truth)
        value = returned(name, {**row, **own, "response": response, "ground_truth": truth})
        assert value["score"] == 1.0, (truth, response)


HOSTILE = (" ", "\n", "<think>", "</think>", "<answer>", "####", "```", "1,", "1.", "$", "(", "{", "[", "- ", "- 1")
HOSTILE += ("é", "\\", "\\boxed{", "\\boxed ", "\\frac", "\\sqrt", "\\text{")
HOSTILE += ("final answer is ", "answer ", "is ", "answer is A, ")


@pytest.mark.parametrize("name", sorted(name for name in BUILT_IN if BUILT_IN[name] == "inline" and name != "agent"))
def test_what_runs_in_the_driver_is_done_with_any_long_response(name):
    """Takes minutes where the time grows with the square of the length; then the time limit of tests ends it."""
    row, _ = results(name)[0]
    starts = ("#### ", "#### 1") if name == "gsm8k" else ("The answer is ", "The answer is A", "\\boxed{")
    for start in ("", *starts):
        for piece in HOSTILE:
            returned(name, {**row, "response": start + piece * (100_000 // len(piece)) + "x"})


@pytest.mark.parametrize("name", ["string_match", "search_answer"])
@pytest.mark.parametrize("arguments", [{"words_max": 3}, {"method": "contains", "words_max": 0}])
def test_a_limit_of_words_is_for_answers_that_contain_a_text(name, arguments):
    with pytest.raises(ValueError, match="words_max"):
        maker_of(name)(**arguments)


@pytest.mark.parametrize(
    ("raised", "outcome"), [(TypeError, {"score": 0.0, "answer": "5", "limit_reached": 0.0}), (MemoryError, None)]
)
def test_what_math_cannot_compare_is_wrong_but_out_of_memory_is_no_score(monkeypatch, raised, outcome):
    math = made("math", "{}")

    def verify(truth, answer, **_):
        if answer[0] == 5:
            raise raised
        return truth == answer

    monkeypatch.setattr("megagrpo.reward.verifiers.math.comparing.verify", verify)
    with nullcontext() if outcome else pytest.raises(raised):
        assert math(r"\boxed{5}", "4") == outcome


def test_a_ground_truth_that_math_cannot_compare_with_itself_is_refused(monkeypatch):
    math = made("math", "{}")
    monkeypatch.setattr("megagrpo.reward.verifiers.math.comparing.verify", lambda *_, **__: [].pop())
    with pytest.raises(ValueError, match="ground truth"):
        math(r"\boxed{5}", "4")


@pytest.mark.parametrize("truth", ["42", "0.5"])
def test_an_answer_that_math_does_not_compare_within_its_limit_is_wrong_and_counted(monkeypatch, truth):
    monkeypatch.setattr("megagrpo.reward.verifiers.math.LIMIT_SECONDS", 0.1)
    assert made("math", "{}")(r"\boxed{9^{9^{9^{9}}}}", truth) == {"score": 0.0, "limit_reached": 1.0}
    assert made("math", "{}")(rf"\boxed{{{truth}}}", truth)["limit_reached"] == 0.0


def test_a_ground_truth_that_math_does_not_read_within_its_limit_is_refused(monkeypatch):
    monkeypatch.setattr("megagrpo.reward.verifiers.math.LIMIT_SECONDS", 0.05)
    monkeypatch.setattr(module("math.comparing"), "read_truth", lambda _: next(n for n in count() if n < 0))
    with pytest.raises(ValueError, match="ground truth"):
        made("math", "{}")(r"\boxed{43}", "43")


EQUAL = (
    (r"\frac{1}{2}", "0.5", "50\\%", "2/4", "x = .5"),
    ("x^2 + 2x + 1", "(x+1)^2", "(x+1)(x+1)", "y = 1 + 2x + x^2"),
    (r"2\sqrt{2}", r"\sqrt 8", r"\frac{4}{\sqrt{2}}"),
    (r"\{1, 2\}", "2, 1", "x = 1, x = 2"),
    ("[0, 1)", r"\left[0, \frac{2}{2}\right)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 2/2 \\ 2.0 \end{bmatrix}"),
    ("1,234", "1234.0", r"1234\text{ cm}"),
    (r"3 \times 10^5", "300000"),
    ("x > 3", "3 < x"),
    ("2", "2.0"),
    (r"\text{Tuesday}", r"\textbf{Tuesday}"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    ("0.25", "1/4"),
)


def test_wrong_answers_of_math_that_are_equal_have_one_text():
    """Compares the texts by which majority votes count answers that are not the ground truth's."""
    texts = [
        {returned("math", {"response": f"\\boxed{{{latex}}}", "ground_truth": "99"})["answer"] for latex in equal}
        for equal in EQUAL
    ]
    assert [len(of_one) for of_one in texts] == [1] * len(EQUAL)
    assert len(set().union(*texts)) == len(EQUAL)


@pytest.mark.parametrize("name", ["gsm8k", "math", "strict_math", "multiple_choice"])
def test_right_answers_to_a_question_have_one_text_that_wrong_ones_do_not_have(name):
    texts: dict[str, tuple[set[str], set[str]]] = {}
    for row, value in results(name):
        if value is not None and "answer" in value:
            question = json.dumps([row["ground_truth"], row.get("arguments"), row.get("extra_info")])
            texts.setdefault(question, (set(), set()))[value["score"] < 1.0].add(value["answer"])
    assert [texts for texts in texts.values() if len(texts[0]) > 1 or texts[0] & texts[1]] == []


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
        response = f"so 3 #### {written}{tail}"
        assert score(response, str(number)) == {"score": 1.0, "answer": gsm8k.number_text(number)}
        assert score(response, f"{number + 1:,}")["score"] == 0.0
