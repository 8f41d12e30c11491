"""Grade-school arithmetic: the final number of a response against the ground truth, compared as numbers.

An expression is not a number here (1/2, 1e3, 2 * 9; the verifier `math` reads those), nor are two numbers (18 or 19).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Literal

from megagrpo.reward.answer_text import after_thinking, plain
from megagrpo.reward.functions import RewardCallable, RewardReturn

# 1,234,567.5 or 1234567.5 or .5; a comma that does not separate thousands is not part of a number.
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
_SIGN = r"[-+\u2212\u2013]"  # with the minus of Unicode and the en dash
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
_NUMERAL = r"[\d½¼¾⅐-⅟²³¹⁰-₉]"

# Before the number: blanks, stars of bold text, $, \(, \[ and \boxed{.
_STRICT = re.compile(
    rf"####(?:[\s*]|{_CURRENCY}|\\[(\[]|\\boxed\{{)*((?:{_SIGN}?{_CURRENCY}?|{_CURRENCY}{_SIGN}){_DIGITS})"
)
# Behind it, to the end of the line: no numeral but the 2 or 3 of m² and ft^3 (1/2, 1e3, 2 * 9, 18 or 19 are none).
_REST = re.compile(rf"(?:(?<=[mt])[23²³]|(?<=[mt]\^)[23]|(?!{_NUMERAL})[^\n])*")
# No number alone on the next line, and no word or letter for thousands or millions.
_SECOND = re.compile(rf"\s*(?:(?:or|and)\s+)?{_SIGN}?{_CURRENCY}?[0-9][0-9.,]*[^\S\n]*(?:\n|$)")
_MANY = re.compile(r"(?:[kKMB]|\s?(?:hundred|thousand|million|billion))\b")
# A minus after a digit or a parenthesis is a subtraction, not a sign.
_FLEXIBLE = re.compile(rf"(?:(?<![0-9)]){_SIGN})?\$?{_DIGITS}")
_WITHIN = re.compile(r"[0-9)}] ?/ ?\$?\Z|\^[({]?\Z|[0-9][eE][-+]?\Z|\}\{\Z")  # 1/, 2^, 1e, \frac{1}{
_NO_DIGIT = re.compile(r"[,$€£¥₹\\]")
_MINUS = str.maketrans("\u2212\u2013", "--")
_OF_NUMBERS = frozenset("0123456789,.$-+\u2212\u2013")


def make(method: Literal["strict", "flexible"] = "strict") -> RewardCallable:
    """Makes a reward function: 1.0 if the number after any `<think>…</think>` equals the ground truth, else 0.0.

    strict: the number after the last `####`, if units and words, but no other number, follow it on the line. flexible:
    the last number anywhere, unless it is a part of an expression such as 1/18.

    >>> verify = make(); verify(response="1200 + 34 = 1234\\n#### $1,234.00", ground_truth="1234")
    {'score': 1.0, 'answer': '1234'}
    >>> verify(response="It is 1234.", ground_truth="1234")
    {'score': 0.0}
    >>> make("flexible")(response="It is 1234.", ground_truth="1234")
    {'score': 1.0, 'answer': '1234'}
    """
    extract = {"strict": strict_answer, "flexible": flexible_answer}[method]

    def gsm8k(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        truth = _truth(ground_truth)
        number = extract(plain(after_thinking(response, prompt_text)))
        return {"score": 0.0} if number is None else {"score": float(number == truth), "answer": number_text(number)}

    return gsm8k


def solution(ground_truth: str) -> str:
    """Returns a right response."""
    return f"#### {ground_truth.strip()}"


def number_text(number: Decimal) -> str:
    """Returns one text for equal numbers: without leading and trailing zeros.

    >>> [number_text(Decimal(text)) for text in ("18", "0018.50", "-0.0", "1200")]
    ['18', '18.5', '0', '1200']
    """
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if text == "-0" else text


def strict_answer(response: str) -> Decimal | None:
    """Returns the number right after the last `####`, None if there is none, or if it is not the only one there."""
    start = response.rfind("####")
    match = _STRICT.match(response, start) if start >= 0 else None
    if match is None or _MANY.match(response, match.end()):
        return None
    rest = _REST.match(response, match.end())
    end = rest.end() if rest else match.end()
    is_alone = response[end : end + 1] in ("", "\n") and not _SECOND.match(response, end)
    return _decimal(match.group(1)) if is_alone else None


def flexible_answer(response: str) -> Decimal | None:
    """Returns the last number of the response, None if there is none or if it is part of an expression such as 1/18."""
    end = max(map(response.rfind, "0123456789"))
    if end < 0:
        return None
    start = end
    while start and response[start - 1] in _OF_NUMBERS:  # no number reaches beyond: the rest need not be searched
        start -= 1
    numbers = list(_FLEXIBLE.finditer(response, start))
    if not numbers or re.match(_NUMERAL, response[end + 1 : end + 2]) or _MANY.match(response, end + 1):
        return None
    before = response[max(numbers[-1].start() - 4, 0) : numbers[-1].start()]
    return None if _WITHIN.search(before) else _decimal(numbers[-1].group())


def _decimal(text: str) -> Decimal:
    return Decimal(_NO_DIGIT.sub("", text).translate(_MINUS))


@lru_cache(maxsize=65536)
def _truth(ground_truth: str) -> Decimal:
    try:
        truth = _decimal(plain(ground_truth).strip())
    except InvalidOperation:
        truth = Decimal("nan")
    if not truth.is_finite():
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return truth
