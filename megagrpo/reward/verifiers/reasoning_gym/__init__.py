"""Tasks of reasoning-gym, each by its own scorer (https://github.com/open-thought/reasoning-gym), in a sandbox.

Scorers were not written for answers that attack them: some evaluate the answer as Python. So each answer is scored in a
process of its own, forked from one that has imported the package. Nothing outlives it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megagrpo.reward.answer_text import after_thinking, tagged
from megagrpo.reward.functions import RewardCallable
from megagrpo.reward.sandbox.programs import Program, Ran, checked_kind
from megagrpo.reward.sandbox.sandbox import Isolation, Kind, Limits, Sandbox, installed_packages

ARGUMENTS = "reasoning_gym_arguments"
ARGUMENTS_CHARACTERS_MAX = 10_000
TASK_SECONDS = 30.0
"""Timeout of the first answer of a task, whose data set is made then."""


def make(
    extract: Literal["tags", "last_line", "either"] = "tags", seconds: float = 4.0, isolation: Isolation = "auto"
) -> RewardCallable:
    """Makes a reward function: the score from 0 to 1 by the scorer of the row's task. Some tasks give parts.

    extract: tags (the last <answer>…</answer>), last_line (the last that is not blank), or either (tags, else the last
    line), after the last </think>. A response without an answer scores 0. So does an answer on which the scorer raises,
    or takes longer than `seconds`. extra_info is the entry's metadata, with source_dataset. Raises ValueError if the
    entry cannot be scored, or if this machine has no such isolation.

    >>> row = {"ground_truth": "4", "extra_info": {"source_dataset": "leg_counting", "source_index": 0}}
    >>> score = make()
    >>> score(response="A dog has <answer>4</answer>", **row)["score"], score(response="4", **row)["score"]
    (1.0, 0.0)
    >>> make(extract="last_line")(response="A dog has\\n4\\n", **row)["score"]
    1.0
    """
    if seconds <= 0:
        raise ValueError("seconds has to be more than 0")
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("reasoning-gym is not installed: pip install 'megagrpo[reasoning-gym]'")
    scorers = _Scorers(checked_kind(isolation), seconds)

    def score(response: str, ground_truth: str, extra_info: Mapping[str, Any], prompt_text: str = "") -> dict[str, Any]:
        task = extra_info.get("source_dataset")
        if not isinstance(task, str):
            raise ValueError("extra_info has no source_dataset, the name of the task")
        arguments = json.dumps(extra_info.get(ARGUMENTS) or {}, sort_keys=True)
        scorers.check(task, arguments)
        text = after_thinking(response, prompt_text)
        answer = tagged(text, "answer") if extract != "last_line" else None
        if answer is None and extract != "tags":
            *_, answer = [None, *map(str.strip, text.strip().splitlines())]
        if answer is None:
            return {"score": 0.0}
        metadata = {name: value for name, value in extra_info.items() if name != ARGUMENTS}
        entry = {"question": "", "answer": ground_truth or None, "metadata": metadata}
        ran = scorers.score(task, arguments, answer, entry)
        if ran.failure and ground_truth and (of_truth := scorers.score(task, arguments, ground_truth, entry)).failure:
            raise ValueError(f"the entry cannot be scored: {of_truth.failure}")
        return {"score": 0.0 if ran.failure else ran.value, "answer": answer}

    return score


def solution(ground_truth: str, extra_info: Mapping[str, Any]) -> str | None:
    """Returns a right response; None for tasks that name no answer."""
    return f"<answer>{ground_truth}</answer>\n{ground_truth}" if ground_truth else None


class _Scorers:
    """The package's scorers in a sandbox, which starts when it is first needed."""

    def __init__(self, kind: Kind, seconds: float) -> None:
        source = Path(__file__).with_name("scoring.py").read_text()
        self._sandbox = cache(lambda: Sandbox(kind, Limits(), installed_packages(), preload=source))
        self._seconds = seconds
        self._usable: set[tuple[str, str]] = set()

    def check(self, task: str, arguments: str) -> None:
        """Raises ValueError if there is no such task, or not with these arguments (JSON)."""
        if (task, arguments) in self._usable:
            return
        if len(task) + len(arguments) > ARGUMENTS_CHARACTERS_MAX:
            raise ValueError(f"{ARGUMENTS} has more than {ARGUMENTS_CHARACTERS_MAX:,} characters")
        refusal = self._call("refusal", task, arguments, seconds=TASK_SECONDS)
        if reason := refusal.failure or refusal.value:
            raise ValueError(f"the entry cannot be scored: {reason}")
        self._usable.add((task, arguments))

    def score(self, task: str, arguments: str, answer: str, entry: Mapping[str, Any]) -> Ran:
        """Returns the score by the task's scorer: a number from 0 to 1."""
        ran = self._call("score", task, arguments, answer, entry, seconds=self._seconds)
        if not ran.failure and not (type(ran.value) is float and 0 <= ran.value <= 1):
            return Ran(f"the scorer gave {str(ran.value)[:100]}")
        return ran

    def _call(self, name: str, task: str, arguments: str, *more: object, seconds: float) -> Ran:
        sandbox = self._sandbox()
        sandbox.renew()
        deadline, source = time.monotonic() + seconds, f"from preloaded import {name}"
        with Program(sandbox, source, deadline=deadline, prepare=(task, arguments)) as program:
            return program.call(name, (task, arguments, *more), math.inf)
