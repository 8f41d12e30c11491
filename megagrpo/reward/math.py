"""Mathematical expressions compared by math-verify (https://github.com/huggingface/Math-Verify).

math-verify's own time limits use SIGALRM, which only works on a main thread and outside long C calls. They are off
here; the worker process that runs this is killed at the time limit instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megagrpo.reward.functions import RewardCallable

_BOXED = "\\boxed{"


def make() -> RewardCallable:
    r"""1.0 if an expression in the response equals the ground truth, else 0.0; the last `\boxed{}` is preferred.

    The ground truth is LaTeX or plain text, with or without `$` or `\boxed{}`. Imports sympy: about a second.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    from math_verify import parse, verify

    def math(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
        truth = parse(_as_latex(ground_truth), parsing_timeout=None)
        if not truth:
            raise ValueError(f"the ground truth {ground_truth!r} is not an expression")
        boxed = last_boxed(response)  # math-verify reads several boxes as a set
        answer = response if boxed is None else f"\\boxed{{{boxed}}}"
        return float(verify(truth, parse(answer, parsing_timeout=None), timeout_seconds=None))

    math("", "$1$", "1", {})  # the first parse builds the grammar, which would count for the first response
    return math


def last_boxed(text: str) -> str | None:
    r"""The text between the braces of the last `\boxed{…}`; None if there is none, or if its braces do not close."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(_BOXED) : end]
    return None


def _as_latex(ground_truth: str) -> str:
    return ground_truth if "$" in ground_truth or "\\boxed" in ground_truth else f"${ground_truth}$"
