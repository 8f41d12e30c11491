"""Programs that a response writes, run in a sandbox against the tests of the ground truth.

The expected results are never in the sandbox of the program: outputs and values are compared here, and tests that are
code run in a second sandbox, which asks the first for what the program's functions return. Tests come in the formats of
public data sets. No format is unpickled: LiveCodeBench's private tests have to be converted to JSON first.
"""

from __future__ import annotations

import builtins
import json
import math
import random
import re
import symtable
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache, lru_cache
from hashlib import sha256
from itertools import zip_longest
from typing import Any, Literal

from megagrpo.reward.answer_text import after_thinking, last_program
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.sandbox.programs import CodeTests, Program, checked_kind, verdicts
from megagrpo.reward.sandbox.sandbox import Isolation, Limits, Sandbox, installed_packages


def make(
    credit: Literal["all", "share"] = "all",
    threshold: float = 0.0,
    tests_max: int | None = None,
    test_seconds: float = 4.0,
    seconds: float = 8.0,
    memory_mib: int = 1024,
    program: Literal["block", "response"] = "block",
    packages: bool = False,
    tolerance: float = 1e-6,
    isolation: Isolation = "auto",
) -> RewardCallable:
    r"""Makes a reward function: 1.0 if the response's program passes all tests (`credit: all`), or the share of passed
    tests (`share`), 0 below `threshold`.

    The program is the last fenced block of Python after the reasoning, or the whole response. If there are more than
    `tests_max` tests, the same ones are taken each time. Each test has `test_seconds`, all together have `seconds`:
    tests that are not reached have failed; keep that below reward.timeout_seconds. `packages`: the program may import
    what is installed, such as numpy. Raises ValueError for bad arguments, or if this machine has no such isolation.

    >>> code = make()
    >>> right = "```python\nprint(int(input()) + 1)\n```"
    >>> code(right, '{"inputs": ["1", "2"], "outputs": ["2", "3"]}')["score"]
    1.0
    >>> make("share")(right, '{"inputs": ["1", "2"], "outputs": ["2", "4"]}')
    {'score': 0.5, 'passed': 1, 'tests': 2, 'failure': 'test 2: wrong'}
    >>> code("```python\ndef double(x): return 2 * x\n```", '["assert double(4) == 8"]')["score"]
    1.0
    """
    if not 0 <= threshold <= 1 or (threshold and credit == "all"):
        raise ValueError("threshold is a share from 0 to 1, with credit: share")
    if tests_max is not None and tests_max < 1:
        raise ValueError("tests_max is at least 1")
    if min(test_seconds, seconds, memory_mib) <= 0 or tolerance < 0:
        raise ValueError("test_seconds, seconds and memory_mib have to be more than 0, tolerance at least 0")
    kind, limits = checked_kind(isolation), Limits(memory_bytes=memory_mib << 20)
    sandbox_of = cache(lambda _: Sandbox(kind, limits, installed_packages() if packages else []))
    runner = Runner(sandbox_of, test_seconds, seconds, tolerance)

    def code(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        tests = _read(ground_truth, tests_max)
        source = last_program(after_thinking(response, prompt_text)) if program == "block" else response
        if source is None:
            return {"score": 0.0, "passed": 0, "tests": len(tests.tests), "failure": "no program"}
        passed, failure = 0, ""
        for number, reason in enumerate(runner.failures(tests, source), 1):
            passed += not reason
            if reason and not failure:
                failure = f"test {number}: {reason}"
            if failure and credit == "all":
                break
        share = passed / len(tests.tests)
        score = float(passed == len(tests.tests)) if credit == "all" else share * (share >= threshold)
        return {"score": score, "passed": passed, "tests": len(tests.tests), "failure": failure}

    return code


@lru_cache(maxsize=64)
def _read(ground_truth: str, tests_max: int | None) -> Tests:
    tests = read_tests(ground_truth)
    return tests if tests_max is None else tests.sample(tests_max, ground_truth)


@dataclass(frozen=True, slots=True)
class Runner:
    """The sandboxes "program" and "tests", which start when they are first needed, and the limits of a run."""

    sandbox_of: Callable[[str], Sandbox]
    test_seconds: float
    seconds: float
    tolerance: float

    def failures(self, tests: Tests, source: str) -> Iterator[str]:
        """Yields for each test why it failed, empty if it passed. Ends at the deadline."""
        sandbox = self.sandbox_of("program")
        sandbox.renew()  # the time that a sandbox takes to start is not the program's
        if tests.code is not None:
            self.sandbox_of("tests").renew()
        deadline = time.monotonic() + self.seconds
        source = f"{tests.prefix}\n{source}" if tests.prefix else source
        if tests.code is not None:
            of_tests, seconds = self.sandbox_of("tests"), self.test_seconds
            yield from verdicts(sandbox, of_tests, source, tests.code, seconds=seconds, deadline=deadline)
            return
        with Program(sandbox, source, deadline=deadline) as program:
            for test in tests.tests:
                failure = self._failure(program, test)
                if failure and program.runs != 1:  # an earlier test may have changed the process
                    program.stop()
                    failure = self._failure(program, test)
                yield failure
                if time.monotonic() > deadline:
                    return

    def _failure(self, program: Program, test: Any) -> str:
        if isinstance(test, ScriptTest):
            ran = program.run(test.stdin, self.test_seconds)
            right = not ran.failure and same_output(ran.value, test.stdout, self.tolerance)
        else:
            ran = program.call(test.name, test.arguments, self.test_seconds)
            right = not ran.failure and any(same_value(ran.value, one, self.tolerance) for one in test.expected)
        return ran.failure or ("" if right else "wrong")


# --- tests ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScriptTest:
    """The standard input of a program, and its expected output."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call of one of the program's functions, and its accepted return values."""

    name: str
    arguments: tuple[Any, ...]
    expected: tuple[Any, ...]
    """Any of these is right."""


@dataclass(frozen=True, slots=True)
class Tests:
    """All tests of one problem, of one of three kinds. `tests`: the tests of `code`, if that is given."""

    tests: tuple[ScriptTest, ...] | tuple[CallTest, ...] | tuple[str, ...] = ()
    code: CodeTests | None = None
    prefix: str = ""
    """Text before the program, such as the beginning of the function that the prompt asks to complete."""

    def sample(self, most: int, seed: str) -> Tests:
        """Returns at most so many of the tests, in their order; the same ones for the same seed text."""
        if len(self.tests) <= most:
            return self
        number = int.from_bytes(sha256(seed.encode(errors="replace")).digest()[:8])
        kept = sorted(random.Random(number).sample(range(len(self.tests)), most))
        tests: Any = tuple(self.tests[index] for index in kept)
        return replace(self, tests=tests, code=replace(self.code, tests=tests) if self.code else None)


def read_tests(ground_truth: str) -> Tests:
    """Returns the tests that a ground truth in one of these forms of JSON describes. Raises ValueError for others.

    TACO, APPS, verl: `{"inputs": [...], "outputs": [...], "fn_name"?}`, or with `assert_case`, a list of asserts.
    LiveCodeBench: `{"public_test_cases", "private_test_cases", "metadata": {"func_name"}}`, or a list of
    `{"input", "output", "testtype", "metadata"}`. open-instruct: a list of asserts, or of `{"input", "output",
    "fn_name"?}`. HumanEval: `{"prompt", "entry_point", "test"}`. MBPP: `{"test_list", "test_setup_code"}`.
    """
    try:
        given = json.loads(ground_truth)
    except (ValueError, RecursionError):
        # A single test is often written as it is.
        given = [ground_truth] if ground_truth.lstrip().startswith("assert ") else None
    try:
        tests = _tests(given)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the ground truth is no tests of a program: {type(error).__name__} {error}") from None
    if tests is None or not tests.tests:
        raise ValueError("the ground truth has no tests of a program")
    return tests


def _tests(given: Any) -> Tests | None:
    if isinstance(given, list):
        if all(isinstance(test, str) for test in given):
            return code_tests("", given)
        return _from_cases(given, None)
    if not isinstance(given, dict):
        return None
    if given.get("assert_case"):
        return code_tests("", given["assert_case"], given.get("import_prefix") or "")
    if "inputs" in given:
        columns = given["inputs"], given["outputs"]
        if len(columns[0]) != len(columns[1]):
            raise ValueError(f"the ground truth has {len(columns[0])} inputs and {len(columns[1])} outputs")
        cases = [{"input": stdin, "output": stdout} for stdin, stdout in zip(*columns, strict=True)]
        return _from_cases(cases, given.get("fn_name"))
    if "public_test_cases" in given or "private_test_cases" in given:
        cases = [*_cases(given.get("public_test_cases")), *_cases(given.get("private_test_cases"))]
        return _from_cases(cases, _function_of(given))
    if "entry_point" in given:
        test = f"{given['test']}\ncheck({given['entry_point']})"
        return code_tests("", [test], given.get("prompt", ""))
    if "test_list" in given:
        setup = "\n".join([*given.get("test_imports", []), given.get("test_setup_code", "")])
        return code_tests(setup, [*given["test_list"], *given.get("challenge_test_list", [])])
    return None


def _from_cases(cases: Iterable[Mapping[str, Any]], name: str | None) -> Tests:
    scripts, calls = [], []
    for case in cases:
        function = name or _function_of(case)
        if case.get("testtype") == "functional" and not function:
            raise ValueError("the ground truth has a functional test without metadata.func_name")
        if function and case.get("testtype") != "stdin":
            calls.append(_call(function, case["input"], case["output"]))
        else:
            scripts.append(ScriptTest(_text(case["input"]), _text(case["output"])))
    if scripts and calls:
        raise ValueError("the ground truth has tests by standard input beside tests of functions")
    return Tests(tuple(scripts) or tuple(calls))


def _cases(cases: object) -> list[Any]:
    """Returns LiveCodeBench's tests, given as a list or as the JSON of one. Raises ValueError for other texts."""
    try:
        if isinstance(cases, str):
            return list(json.loads(cases))
        return cases if isinstance(cases, list) else []
    except ValueError:
        raise ValueError(
            "the ground truth's private_test_cases are no JSON. LiveCodeBench's files have a pickle there, which is"
            " not read because it could run anything: convert it to JSON where you trust it"
        ) from None


def _function_of(case: Mapping[str, Any]) -> str | None:
    metadata = case.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    return case.get("fn_name") or metadata.get("func_name")


def _text(value: object) -> str:
    """Returns lines as one text; some data sets give a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, arguments: object, output: object) -> CallTest:
    """Returns a test of a call. Arguments are a list, or a line of JSON each; then the output is JSON too."""
    if isinstance(arguments, str):
        expected = json.loads(output) if isinstance(output, str) else output
        return CallTest(name, tuple(map(json.loads, arguments.strip().split("\n"))), (expected,))
    given = tuple(arguments) if isinstance(arguments, list) else (arguments,)
    # APPS wraps what is returned in a list, TACO does not always.
    return CallTest(name, given, (output, *(output if isinstance(output, list) and len(output) == 1 else ())))


# --- tests that are Python --------------------------------------------------------------------------------------------


def code_tests(setup: str, tests: Sequence[str], prefix: str = "") -> Tests:
    """Returns the tests with the names that the program has to define. Raises ValueError if they are no Python.

    >>> code_tests("import math", ["assert area(1) == math.pi", "assert area(0) == 0"]).code.names
    ('area',)
    >>> code_tests("", ["assert sum(1, 2) == 3"]).code.names  # a name of Python's own only if there is no other
    ('sum',)
    """
    try:
        scopes = [symtable.symtable(source, "test", "exec") for source in (setup, *tests)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the ground truth has a test that is no Python: {error}") from None
    for scope in scopes:  # which grows by the scopes within
        scopes += scope.get_children()
    symbols = [symbol for scope in scopes for symbol in scope.get_symbols()]
    bound = {
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported() or symbol.is_parameter()
    }
    used = dict.fromkeys(symbol.get_name() for symbol in symbols if symbol.is_referenced())
    free = [name for name in used if name not in bound]
    names = [name for name in free if name not in dir(builtins)] or free[:1]
    return Tests(tuple(tests), CodeTests(setup, tuple(names), tuple(tests)), prefix)


# --- comparisons ------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    r"""Returns whether the words of every line are the same, without empty lines. Compares numbers as numbers, with the
    tolerance if the expected one has a fraction or an exponent.

    >>> same_output("1 2\n3.0000000001\n\n", "1  2 \n3.0", 1e-6), same_output("3.0", "3", 1e-6)
    (True, True)
    >>> same_output("1\n2", "1 2", 1e-6), same_output("1e9", "1000000007", 1e-6)
    (False, False)
    """
    if printed == expected:
        return True
    lines, wanted = ([line.split() for line in text.splitlines() if line.strip()] for text in (printed, expected))
    return len(lines) == len(wanted) and all(
        _same_word(word, expected_word, tolerance)
        for line, expected_line in zip(lines, wanted, strict=True)
        for word, expected_word in zip_longest(line, expected_line)
    )


def _same_word(word: str | None, expected: str | None, tolerance: float) -> bool:
    if word == expected:
        return True
    if not word or not expected or not _NUMBER.fullmatch(word) or not _NUMBER.fullmatch(expected):
        return False
    if Decimal(word) == Decimal(expected):
        return True
    fractional = any(mark in expected for mark in ".eE")  # whole numbers are exact
    return fractional and math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Returns whether a function returned the value in JSON, where tuples are lists and the keys of dicts are text. The
    tolerance applies to numbers with a fraction or an exponent in the JSON.

    >>> same_value((1, [2.0000000001]), [1, [2.0]], 1e-6), same_value({1: True}, {"1": True}, 1e-6)
    (True, True)
    >>> same_value("1", 1, 1e-6), same_value(10**20 + 1, 10**20, 1e-6), same_value({1}, [1], 1e-6)
    (False, False, False)
    >>> same_value(2.0, 2, 1e-6), same_value(1e9, 1000000007, 1e-6)
    (True, False)
    """
    if isinstance(expected, dict):
        keyed = {str(key): item for key, item in value.items()} if isinstance(value, dict) else None
        if keyed is None or keyed.keys() != expected.keys():
            return False
        value, expected = [keyed[key] for key in expected], list(expected.values())
    if isinstance(expected, list):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(expected)
            and all(same_value(one, other, tolerance) for one, other in zip(value, expected, strict=True))
        )
    if isinstance(expected, float) and isinstance(value, (int, float)):
        try:
            return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:
            return False
    return isinstance(value, (str, int, float, type(None))) and value == expected
