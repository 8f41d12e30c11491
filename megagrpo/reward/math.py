"""Mathematical expressions compared by math-verify (https://github.com/huggingface/Math-Verify).

math-verify's own time limits use SIGALRM, which only works on a main thread and outside long C calls. They are off
here; the worker process that runs this is killed at the time limit instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megagrpo.reward.functions import RewardCallable


def make() -> RewardCallable:
    r"""1.0 if an expression in the response equals the ground truth, else 0.0; `\boxed{}` is preferred to others.

    The ground truth is LaTeX or plain text, with or without `$` or `\boxed{}`. Imports sympy: about a second.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    from math_verify import parse, verify

    def math(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
        truth = parse(_as_latex(ground_truth), parsing_timeout=None)
        if not truth:
            raise ValueError(f"the ground truth {ground_truth!r} is not an expression")
        return float(verify(truth, parse(response, parsing_timeout=None), timeout_seconds=None))

    math("", "$1$", "1", {})  # the first parse builds the grammar, which would count for the first response
    return math


def _as_latex(ground_truth: str) -> str:
    return ground_truth if "$" in ground_truth or "\\boxed" in ground_truth else f"${ground_truth}$"
