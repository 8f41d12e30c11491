"""The shape `<think>…</think><answer>…</answer>`, with points for its parts if wanted."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from megagrpo.reward.functions import RewardCallable, RewardReturn


def make(
    tags: Sequence[str] = ("think", "answer"), partial: bool = False, opened: bool = False, text_between: bool = False
) -> RewardCallable:
    """Makes a reward function: 1.0 if the response is each tag once, closed, in order and not empty, else 0.0.

    `opened`: the prompt has the first tag already, so the response may begin inside it. `text_between`: allows text
    around the tags, else only white space. `partial`: in place of 0.0, the share of opening and closing tags that occur
    exactly once, times 0.5 (open-r1's tag count, halved). Raises ValueError for no tags.

    >>> verify = make(); verify(response="<think>2 + 2</think> <answer>4</answer>")
    1.0
    >>> verify(response="<think>2 + 2</think> 4"), make(partial=True)(response="<think>2 + 2</think> 4")
    (0.0, 0.25)
    >>> make(opened=True)(response="2 + 2</think><answer>4</answer>"), make(["think"])(response="<think>a</think>b")
    (1.0, 0.0)
    """
    names = tuple(tags)
    if not names or isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in names):
        raise ValueError(f"tags is {tags!r}, not a list of names such as [think, answer]")
    marks = [mark for tag in names for mark in (f"<{tag}>", f"</{tag}>")]
    around = ".*" if text_between else r"\s*"
    parts = (re.escape(f"<{tag}>") + "(.*)" + re.escape(f"</{tag}>") + around for tag in names)
    shape = re.compile(around + "".join(parts), re.DOTALL)

    def think_answer(response: str) -> RewardReturn:
        if opened and marks[0] not in response:
            response = marks[0] + response
        single = sum(response.count(mark) == 1 for mark in marks)
        whole = shape.fullmatch(response) if single == len(marks) else None  # else it would backtrack
        if whole is not None and all(  # a zero-width space is not seen either
            any(not sign.isspace() and unicodedata.category(sign) != "Cf" for sign in part) for part in whole.groups()
        ):
            return 1.0
        return 0.5 * single / len(marks) if partial else 0.0

    return think_answer


def solution(ground_truth: str, tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> str:
    """Returns a right response, the same for every ground truth."""
    response = "".join(f"<{tag}>text</{tag}>" for tag in tags)
    return response.removeprefix(f"<{tags[0]}>") if opened else response
