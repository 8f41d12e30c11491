r"""Comparison of mathematical expressions by math-verify (https://github.com/huggingface/Math-Verify).

Its own wall-clock limits are off: the limit here counts computing time, so that a busy machine gives the same scores. A
long C call delays that limit; the worker process is killed at the recipe's time limit.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from megagrpo.reward.answer_text import after_thinking
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.verifiers.strict_math import solution as solution

LIMIT_SECONDS, AGAIN_SECONDS = 2.0, 0.1
"""Limit for reading a ground truth and for comparing an answer; pause before the next signal if one was caught."""


def make() -> RewardCallable:
    r"""Makes a reward function: 1.0 if the response's answer equals the ground truth, else 0.0.

    The answer is the last `\boxed{}` after the reasoning, or the one that "The final answer is" names behind it, else
    the last `<answer>…</answer>`, else the one that math-verify finds near the last "answer" or the end. Several
    answers share a box, as `\boxed{1, 2}`, or a sentence with a box each. Each side of an equation must be right,
    except a name on its left, as in `x = 2`. What math-verify skips (`\neq`, `\to`, `\vee`, not, wrong) makes an answer
    wrong unless the truth has it. The ground truth is LaTeX or plain text, with or without `$` or `\boxed{}`. Raises
    ValueError if it is neither, or is not read in LIMIT_SECONDS. An answer not compared in that time is wrong, with the
    metric limit_reached 1. Equal answers have one text `answer` if it is small enough to compute; right answers always
    have one. Imports sympy: about a second.

    >>> verify = make(); verify(response=r"It is \boxed{\frac{2}{4}}.", ground_truth="0.5")
    {'score': 1.0, 'answer': '1/2', 'limit_reached': 0.0}
    >>> verify(response=r"\boxed{1}, no: \boxed{x^2 - 1}", ground_truth="(x + 1)^2")
    {'score': 0.0, 'answer': 'x**2 - 1', 'limit_reached': 0.0}
    """
    from megagrpo.reward.verifiers.math import comparing  # imports sympy

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

    @lru_cache(maxsize=4096)
    def truth_of(ground_truth: str) -> comparing.Truth:
        with time_limit():
            return comparing.read_truth(ground_truth)

    def verified(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        try:
            truth = truth_of(ground_truth)
        except LimitReachedError:
            problem = f"the ground truth {ground_truth[:200]!r} is not read within {LIMIT_SECONDS:g} s"
            raise ValueError(problem) from None
        try:
            with time_limit():
                return {**comparing.compared(truth, after_thinking(response, prompt_text)), "limit_reached": 0.0}
        except LimitReachedError:
            return {"score": 0.0, "limit_reached": 1.0}

    # The first parse builds the grammar, which would count for the first response.
    comparing.compared(comparing.read_truth("$1$"), "$1$")
    return verified


class LimitReachedError(BaseException):
    """The error of a text that is not read or compared in LIMIT_SECONDS. Not an Exception: sympy catches those."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises LimitReachedError in its context after LIMIT_SECONDS of computing, on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise LimitReachedError

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
