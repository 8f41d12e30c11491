"""Right responses, made from ground truths: what a verifier must give full marks to, and to others not.

A verifier's module may have `solution(ground_truth, ...) -> str | None`: a response that is right, None where there is
none, ValueError for a ground truth that cannot be used. It may also name extra_info, and arguments of its `make` by the
same names and with the same defaults.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megagrpo.reward.functions import ASKING, FunctionSpec

Solution = Callable[[str, Mapping[str, Any]], str | None]

ELSEWHERE = (*ASKING, "remote", "reward_model", "agent")
"""These ask models or servers, where what they give costs something, or read what an agent gave."""

FORM = ("format", "language", "length", "repetition")
"""These look at the form of a response alone, and may take an empty one for right."""


def solution_of(spec: FunctionSpec) -> Solution | None:
    """How right responses are made for a function of the recipe: never, if its module has no `solution`. None for those
    that are not called but in a run: a user's own, and ELSEWHERE."""
    if not spec.built_in or spec.function in ELSEWHERE:
        return None
    make = getattr(importlib.import_module(f"megagrpo.reward.verifiers.{spec.function}"), "solution", None)
    if make is None:
        return lambda ground_truth, extra_info: None
    asked = inspect.signature(make).parameters
    own = {name: value for name, value in spec.arguments.items() if name in asked}

    def solution(ground_truth: str, extra_info: Mapping[str, Any]) -> str | None:
        if "extra_info" in asked:
            return make(ground_truth, extra_info, **own)
        return make(ground_truth, **own)

    return solution
