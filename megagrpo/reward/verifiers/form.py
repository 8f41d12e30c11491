"""The form of a response, whatever its answer: its shape, its length and its repetitions."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megagrpo.reward.functions import RewardCallable, RewardReturn


def format(pattern: str) -> RewardCallable:
    r"""Makes a reward function: 1.0 if `re.search(pattern, response)` finds something, else 0.0.

    Write `\A...\Z` for the whole response and `(?s)` to let a dot match line ends. Raises ValueError for a bad pattern.

    >>> verify = format(r"(?s)\A<think>.*</think>"); verify(response="<think>so</think> 5"), verify(response="5")
    (1.0, 0.0)
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as reason:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {reason}") from None

    def matches(response: str) -> float:
        return float(compiled.search(response) is not None)

    return matches


def think_answer(
    tags: Sequence[str] = ("think", "answer"), partial: bool = False, opened: bool = False, text_between: bool = False
) -> RewardCallable:
    """Makes a reward function: 1.0 if the response is each tag once, closed, in order and not empty, else 0.0.

    `opened`: the prompt has the first tag already, so the response may begin inside it. `text_between`: allows text
    around the tags, else only white space. `partial`: in place of 0.0, the share of opening and closing tags that occur
    exactly once, times 0.5 (open-r1's tag count, halved). Raises ValueError for no tags.

    >>> verify = think_answer(); verify(response="<think>2 + 2</think> <answer>4</answer>")
    1.0
    >>> verify(response="<think>2 + 2</think> 4"), think_answer(partial=True)(response="<think>2 + 2</think> 4")
    (0.0, 0.25)
    >>> think_answer(["think"])(response="<think>a</think>b"), think_answer(opened=True)("2</think><answer>4</answer>")
    (0.0, 1.0)
    """
    names = tuple(tags)
    if not names or isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in names):
        raise ValueError(f"tags is {tags!r}, not a list of names such as [think, answer]")
    marks = [mark for tag in names for mark in (f"<{tag}>", f"</{tag}>")]
    around = ".*" if text_between else r"\s*"
    parts = (re.escape(f"<{tag}>") + "(.*)" + re.escape(f"</{tag}>") + around for tag in names)
    shape = re.compile(around + "".join(parts), re.DOTALL)

    def shaped(response: str) -> RewardReturn:
        if opened and marks[0] not in response:
            response = marks[0] + response
        single = sum(response.count(mark) == 1 for mark in marks)
        whole = shape.fullmatch(response) if single == len(marks) else None  # else it would backtrack
        if whole is not None and all(  # a zero-width space is not seen either
            any(not sign.isspace() and unicodedata.category(sign) != "Cf" for sign in part) for part in whole.groups()
        ):
            return 1.0
        return 0.5 * single / len(marks) if partial else 0.0

    return shaped


def think_answer_solution(ground_truth: str, tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> str:
    """Returns a right response, the same for every ground truth."""
    response = "".join(f"<{tag}>text</{tag}>" for tag in tags)
    return response.removeprefix(f"<{tags[0]}>") if opened else response


def length(
    kind: Literal["target", "budget"] = "target",
    length: float | str | None = None,
    key: str = "",
    unit: Literal["tokens", "words", "characters"] = "tokens",
    tolerance: float | str | None = None,
) -> RewardCallable:
    """Makes a reward function: 1.0 at the wanted length, linear to 0.0 at `tolerance` above it (target: below it too).

    target: exactly that long is best. budget: anything up to it is. The wanted length is `length`, else the row's
    extra_info under `key`, else the ground truth. `tolerance` is in units, the wanted length by default. Tokens are
    those of the response, its end token included. L1-Exact (arXiv:2503.04697) subtracts α·|wanted − length|: a
    tolerance of 1/α. Metric: the length. Raises ValueError for lengths not above 0.

    >>> length(length=10, unit="words")(response="five words of the ten", ground_truth="", extra_info={})
    {'score': 0.5, 'length': 5}
    >>> verify = length("budget", key="num_tokens", tolerance=4)
    >>> [verify(tokens=range(n), ground_truth="", extra_info={"num_tokens": 8})["score"] for n in (1, 8, 9, 13)]
    [1.0, 1.0, 0.75, 0.0]
    """
    if length is not None:
        length = _positive(length, "length")
    if tolerance is not None:
        tolerance = _positive(tolerance, "tolerance")

    def scored(units: int, ground_truth: str, extra_info: Mapping[str, Any]) -> RewardReturn:
        if length is not None:
            wanted = length
        elif not key:
            wanted = _positive(ground_truth, "the ground truth")
        elif key in extra_info:
            wanted = _positive(extra_info[key], f"{key} of the row's extra_info")
        else:
            raise ValueError(f"the row's extra_info has no {key}")
        away = max(units - wanted, 0) if kind == "budget" else abs(units - wanted)
        return {"score": max(0.0, 1.0 - away / (tolerance or wanted)), "length": units}

    def by_tokens(tokens: list[int], ground_truth: str, extra_info: Mapping[str, Any]) -> RewardReturn:
        return scored(len(tokens), ground_truth, extra_info)

    def by_text(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> RewardReturn:
        return scored(len(response.split() if unit == "words" else response), ground_truth, extra_info)

    return by_tokens if unit == "tokens" else by_text


def _positive(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (0 < number < math.inf):
        raise ValueError(f"{name} is {value!r}, not a length above 0")
    return number


def repetition(
    ngram: int = 3, penalty: float = 1.0, unit: Literal["words", "tokens", "characters"] = "words"
) -> RewardCallable:
    """Makes a reward function: -`penalty` times the share of n-grams that occurred before; 0.0 without any.

    As open-r1's get_repetition_penalty_reward, after Demystifying Long Chain-of-Thought (arXiv:2502.03373, appendix
    C.2). Words are split at white space, in lower case; take characters, with a larger `ngram`, for languages that do
    not write spaces. Metric: the share. Raises ValueError for an ngram or penalty not above 0.

    >>> verify = repetition(ngram=2); verify(response="so it is so it is so it is")
    {'score': -0.625, 'share': 0.625}
    >>> verify(response="each word stands here once")
    {'score': 0.0, 'share': 0.0}
    """
    if not isinstance(ngram, int) or ngram < 1 or not penalty > 0:
        raise ValueError(f"ngram is {ngram!r} and penalty {penalty!r}: a whole number and a number above 0 are needed")

    def scored(units: Sequence[object]) -> RewardReturn:
        total = max(0, len(units) - ngram + 1)
        different = len(set(zip(*(units[start:] for start in range(ngram)), strict=False)))
        share = 1.0 - different / total if total else 0.0
        return {"score": 0.0 - penalty * share, "share": share}

    def by_tokens(tokens: list[int]) -> RewardReturn:
        return scored(tokens)

    def by_text(response: str) -> RewardReturn:
        return scored(response.lower().split() if unit == "words" else response)

    return by_tokens if unit == "tokens" else by_text
