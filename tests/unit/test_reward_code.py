"""The code verifier: forms of tests, comparisons of what programs print and return, arguments."""

import base64
import contextlib
import json
import pickle
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.errors import RewardError
from megagrpo.reward.answer_text import blocks, last_program
from megagrpo.reward.functions import FunctionSpec, load
from megagrpo.reward.sandbox import programs
from megagrpo.reward.sandbox.harness import decode, encode
from megagrpo.reward.sandbox.sandbox import Sandbox
from megagrpo.reward.verifiers.code import CallTest, ScriptTest, make, read_tests, same_output, same_value

ADDS = "```python\nprint(sum(map(int, input().split())))\n```"


def truth(value: object) -> str:
    return json.dumps(value)


def test_livecodebenchs_public_and_private_tests_are_all_run_and_its_pickles_are_refused() -> None:
    case = {"input": "1 2", "output": "3", "testtype": "stdin"}
    row = {"public_test_cases": truth([case]), "private_test_cases": truth([case, case]), "metadata": "{}"}
    assert read_tests(truth(row)).tests == (ScriptTest("1 2", "3"),) * 3
    pickled = base64.b64encode(zlib.compress(pickle.dumps(truth([case])))).decode()
    with pytest.raises(ValueError, match="pickle"):
        read_tests(truth({**row, "private_test_cases": pickled}))
    for no_list in ("null", "3", truth(truth([case]))):
        with pytest.raises(ValueError, match="no tests of a program"):
            read_tests(truth({**row, "private_test_cases": no_list}))


def test_a_functions_name_is_found_where_each_data_set_has_it() -> None:
    case = {"input": '[1, 2]\n"a"', "output": "[3]"}
    found = CallTest("f", ([1, 2], "a"), ([3],))
    for row in (
        [{**case, "fn_name": "f"}],
        [{**case, "testtype": "functional", "metadata": {"func_name": "f"}}],
        {"public_test_cases": [{**case, "testtype": "functional"}], "metadata": '{"func_name": "f"}'},
        {"inputs": [case["input"]], "outputs": [case["output"]], "fn_name": "f"},
    ):
        assert read_tests(truth(row)).tests == (found,)


def test_apps_values_may_be_wrapped_in_a_list_of_one() -> None:
    (test,) = read_tests('{"inputs": [[1]], "outputs": [[5]], "fn_name": "f"}').tests
    assert test.expected == ([5], 5)
    (test,) = read_tests('{"inputs": [[1]], "outputs": [[5, 6]], "fn_name": "f"}').tests
    assert test.expected == ([5, 6],)


@given(st.integers(1, 9), st.integers(1, 9), st.text(max_size=5))
def test_a_sample_of_tests_is_the_same_each_time_and_in_order(count: int, most: int, seed: str) -> None:
    tests = read_tests(truth({"inputs": list(map(str, range(count))), "outputs": ["x"] * count}))
    sample = tests.sample(most, seed)
    numbers = [int(test.stdin) for test in sample.tests]
    assert len(sample.tests) == min(count, most)
    assert numbers == sorted(set(numbers))
    assert sample == tests.sample(most, seed)


NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False, width=32))


@given(st.lists(st.lists(NUMBERS, min_size=1), min_size=1))
def test_white_space_between_words_does_not_matter(lines: list[list[float]]) -> None:
    plain = "\n".join(" ".join(map(str, line)) for line in lines)
    spaced = "\n\n".join("  ".join(map(str, line)) + " \t" for line in lines) + "\n"
    assert same_output(spaced, plain, 1e-6)
    assert not same_output(spaced + "1", plain, 1e-6)


@given(st.integers(), st.integers(-5, 5).filter(bool))
def test_whole_numbers_that_differ_are_different_however_large(number: int, difference: int) -> None:
    assert not same_output(str(number + difference), str(number), 1e-6)
    assert not same_value(number + difference, number, 1e-6)
    assert not same_output(f"{number + difference}.0", str(number), 1e-6)
    assert not same_value(number + difference / 8, number, 1e-6) or abs(number) > 1 << 40


def test_a_float_near_a_whole_number_is_not_the_whole_number() -> None:
    assert not same_output("1e9", "1000000007", 1e-6)
    assert not same_value(1e9, 1000000007, 1e-6)
    assert same_output("1e9", "1000000007.0", 1e-6)
    assert same_value(1000000007, 1e9, 1e-6)


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_any_two_texts_can_be_compared(one: str, other: str) -> None:
    assert isinstance(same_output(one, other, 1e-6), bool)
    assert same_output(one, one, 1e-6)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text()
DATA = st.recursive(
    PLAIN | st.complex_numbers(allow_nan=False) | st.sets(KEYS) | st.frozensets(st.tuples(KEYS)),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


@given(DATA)
def test_values_arrive_as_they_were_sent(value: object) -> None:
    arrived = decode(json.loads(json.dumps(encode(value, []))), lambda number: pytest.fail("an object"))
    assert arrived == value
    assert type(arrived) is type(value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=9
    )
)
def test_what_a_program_makes_up_is_a_value_or_a_value_error(made_up: object) -> None:
    with contextlib.suppress(ValueError):
        decode(made_up, lambda number: None)


def test_equal_to_all_is_equal_to_nothing() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    assert not same_value(Equal(), 3, 1e-6)
    assert not same_value([Equal()], [3], 1e-6)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```c\nb\n```", "a\n"),
        ("```\na\n```\ntext\n```py\nb\n```\n", "b\n"),
        ("```python\na\n```\nOutput:\n```\nb\n```\n", "a\n"),
        ("```Python3.11 title=x\na\n```", "a\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n\n   ```", "if a:\n    b\n\n"),
        ("- ```python\n  a\n  ```", "a\n"),
        ("```python\n    return 1\n```", "    return 1\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("Say ```python\na\n```", None),
        ("```pyrex\na\n```", None),
        ("```python\na\n", None),
    ],
)
def test_the_last_block_of_python_counts(text: str, program: str | None) -> None:
    assert last_program(text) == program


@given(st.text(st.sampled_from("`\n -p1.")))
def test_blocks_of_any_text_are_parts_of_it(text: str) -> None:
    lines = text.splitlines()
    assert all(any(line.endswith(part) for line in lines) for _, block in blocks(text) for part in block.split("\n"))


BAD = [
    {"credit": "half"}, {"threshold": 0.5}, {"credit": "share", "threshold": 2}, {"program": "last"},
    {"isolation": "docker"}, {"tests_max": 0}, {"seconds": 0}, {"memory_mib": -1},
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(RewardError):
        load(FunctionSpec("code", "code", 1.0, arguments, "reward.functions[0]"))


def test_without_a_sandbox_it_is_refused_unless_the_recipe_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(**_: bool) -> bytes:
        raise OSError("libseccomp.so.2: cannot open shared object file")

    monkeypatch.setattr("megagrpo.reward.sandbox.sandbox.filter_bytes", no_library)
    programs.search.cache_clear()
    try:
        with pytest.raises(ValueError, match="libseccomp"):
            make()
        assert make(isolation="none")(ADDS, '{"inputs": ["1 2"], "outputs": ["3"]}')["score"] == 1.0
    finally:
        programs.search.cache_clear()


def test_all_tests_together_have_a_time_and_those_not_reached_have_failed() -> None:
    slow = "```python\nimport time\ntime.sleep(float(input()))\nprint(1)\n```"
    row = truth({"inputs": ["0", "60", "60", "60", "0"], "outputs": ["1"] * 5})
    found = make("share", seconds=1.0, test_seconds=50.0)(slow, row)
    assert (found["passed"], found["tests"], found["failure"]) == (1, 5, "test 2: took too long")


def test_the_time_that_a_sandbox_takes_to_start_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, start = [0.0], Sandbox._start

    def late(sandbox: Sandbox) -> None:
        start(sandbox)
        slept[0] += 1000.0

    monkeypatch.setattr(Sandbox, "_start", late)
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + slept[0])
    leaves_a_file = ADDS.replace("print", "try: open('x', 'w')\nexcept OSError: pass\nprint")
    code = make(seconds=500.0, isolation="none")
    assert [code(ADDS, '{"inputs": ["1 2"], "outputs": ["3"]}')["score"] for _ in range(2)] == [1.0, 1.0]
    assert code("```python\ndef f(): return 1\n```", '["assert f() == 1"]')["score"] == 1.0
    code = make(seconds=500.0)
    assert [code(leaves_a_file, '{"inputs": ["1 2"], "outputs": ["3"]}')["passed"] for _ in range(2)] == [1, 1]


def test_programs_may_import_installed_packages_if_the_recipe_says_so() -> None:
    uses = "```python\nimport numpy\nprint(numpy.arange(3).sum())\n```"
    row = '{"inputs": [""], "outputs": ["3"]}'
    assert make(packages=True)(uses, row)["score"] == 1.0
    assert make()(uses, row)["score"] == 0.0
