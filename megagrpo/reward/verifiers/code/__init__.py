"""Programs that a response writes, run in a sandbox against the tests of the ground truth.

The expected results are never in the sandbox of the program: outputs and values are compared here, and tests that are
code run in a second sandbox, which asks the first for what the program's functions return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from megagrpo.reward.answer_text import after_thinking, last_program
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.sandbox.programs import Program, checked_kind, verdicts
from megagrpo.reward.sandbox.sandbox import Isolation, Limits, Sandbox, installed_packages
from megagrpo.reward.verifiers.code.tests import ScriptTest, Tests, read_tests, same_output, same_value


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
                if failure and program.runs != 1:  # it may come from what an earlier test left in the process
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
