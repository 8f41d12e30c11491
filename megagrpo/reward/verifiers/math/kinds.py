r"""Answers that are no expressions, which math-verify would misread: congruences, numbers in a base, times of day,
amounts with units, words, unions of named sets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

from megagrpo.reward.verifiers.strict_math import normalised

_STYLE = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox|operatorname)\s*\{([^{}]*)\}")
_BLANK = re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\\left(?![a-z])|\\right(?![a-z])|\$")

_CONGRUENCE = re.compile(
    r"(?:(?P<name>[^=<>]*?)\s*(?:\\equiv|=)\s*)?(?P<residues>[^=<>]*?)"
    r"\s*(?:\\pmod|\(?\s*(?:\\bmod|\\mod|\\?mod(?:ulo)?))(?![a-z])\s*\{?\s*(?P<modulus>\d+)\s*\}?\s*\)?"
)
_LIST = re.compile(r"\s*(?:,|\band\b|\bor\b)\s*")

_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "sixteen": 16,
}  # fmt: skip
_IN_BASE = re.compile(
    r"\(?\s*(?P<digits>\d[\dA-Z]*|[A-Z]+\d[\dA-Z]*|[A-Z]+(?=_\{?\d\d))\s*\)?\s*_\s*\{?\s*(?P<base>\d+|[a-z]+)\s*\}?"
)

_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:([ap])\.?\s*m\.?|o'?clock|h)?", re.IGNORECASE)

_UNITS: dict[str, tuple[str, Fraction]] = {
    name: (kind, Fraction(size))
    for kind, units in {
        "time": {"s|secs?|seconds?": "1", "mins?|minutes?": "60", "h|hrs?|hours?": "3600", "days?": "86400",
                 "weeks?": "604800"},
        "months": {"months?": "1", "years?|yrs?": "12"},
        "length": {"mm|millimet(?:er|re)s?": "0.001", "cm|centimet(?:er|re)s?": "0.01", "m|met(?:er|re)s?": "1",
                   "km|kilomet(?:er|re)s?": "1000", "in|inch(?:es)?": "0.0254", "ft|foot|feet": "0.3048",
                   "yds?|yards?": "0.9144", "miles?": "1609.344"},
        "mass": {"mg|milligrams?": "0.001", "g|grams?": "1", "kg|kilograms?": "1000", "oz|ounces?": "28.349523125",
                 "lbs?|pounds?": "453.59237"},
        "volume": {"ml|mL|millilit(?:er|re)s?": "0.001", "L|lit(?:er|re)s?": "1"},
        "spoons": {"tsp|teaspoons?": "1", "tbsp|tablespoons?": "3", "cups?": "48"},
        "gallons": {"pints?": "1", "quarts?": "2", "gallons?": "8"},
        "money": {"cents?": "0.01", "dollars?": "1"},
    }.items()
    for name, size in units.items()
}  # fmt: skip
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+"
_AMOUNT = re.compile(rf"({_NUMBER})\s*([A-Za-z]+)(?:\s*(?:,|and|\\&)?\s*)", re.ASCII)
_PERCENT = re.compile(rf"({_NUMBER})(\s*\\?%)?")

_WORDS = re.compile(r"[A-Za-z]+(?:[ '-]+[A-Za-z]+)*[.!]?")
_SET = re.compile(
    r"\s*([A-Z](?:_\{?\d\}?)?|\\(?:cup|cap|setminus|emptyset)(?![a-z])|[()']|\^\s*\{?\s*(?:c|C|\\complement)\s*\}?)"
)


def same_kind(truth: str, answer: str) -> bool | None:
    """Returns whether the answer is right if either is of a kind that math-verify misreads; None if neither is.

    >>> [same_kind(r"n \\equiv 3 \\pmod 5", text) for text in (r"n \\equiv 8 \\pmod{5}", r"n \\equiv 2 \\pmod 5", "5")]
    [True, False, False]
    >>> same_kind("1010_2", "1010_{3}"), same_kind("12:00", "1:00"), same_kind("listen", "silent")
    (False, False, False)
    >>> same_kind(r"3 \\text{ hours } 20 \\text{ minutes}", "200 minutes"), same_kind("A \\\\cup B", "B \\\\cup A")
    (True, True)
    """
    truth, answer = _plain(truth), _plain(answer)
    for decide in (_congruences, _percents, _bases, _clocks, _amounts, _words, _sets):
        if (same := decide(truth, answer)) is not None:
            return same
    return None


def _plain(latex: str) -> str:
    return " ".join(_BLANK.sub(" ", _STYLE.sub(r" \1 ", latex)).split())


def _congruences(truth: str, answer: str) -> bool | None:
    if not (wanted := _CONGRUENCE.fullmatch(truth)):
        return None
    given = _CONGRUENCE.fullmatch(answer)
    if not given or int(wanted["modulus"]) != int(given["modulus"]) or not int(wanted["modulus"]):
        return False
    if wanted["name"] and given["name"] and normalised(wanted["name"]) != normalised(given["name"]):
        return False
    return _residues(wanted) == _residues(given)


def _residues(congruence: re.Match[str]) -> set[int | str]:
    texts = _LIST.split(congruence["residues"].strip(" ("))
    modulus = int(congruence["modulus"])
    return {int(text) % modulus if re.fullmatch(r"-?\d+", text) else normalised(text) for text in texts}


def _percents(truth: str, answer: str) -> bool | None:
    """Accepts 12.5% for 12.5, as math-verify accepts 12% for 12. Returns None otherwise: below 1 it may be a share."""
    wanted, given = _PERCENT.fullmatch(truth), _PERCENT.fullmatch(answer)
    if not wanted or not given or bool(wanted[2]) == bool(given[2]):
        return None
    value = _fraction(wanted[1])
    return True if abs(value) >= 1 and value == _fraction(given[1]) else None


def _bases(truth: str, answer: str) -> bool | None:
    wanted, given = _in_base(truth), _in_base(answer)
    if wanted is None:
        return None
    if given is None:
        return answer.replace(",", "").replace(" ", "").upper().lstrip("0") == wanted[0]
    return wanted == given


def _in_base(latex: str) -> tuple[str, int] | None:
    if not (numeral := _IN_BASE.fullmatch(latex)):
        return None
    name, digits = numeral["base"], numeral["digits"].upper()
    base = int(name) if name.isdigit() else _BASES.get(name, 0)
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return digits.lstrip("0"), base


def _clocks(truth: str, answer: str) -> bool | None:
    """Compares times of day. Returns None if the truth may be a ratio: one in lowest terms, without AM or PM."""
    wanted, given = _CLOCK.fullmatch(truth), _CLOCK.fullmatch(answer)
    if not wanted or (int(wanted[1]) > 24):
        return None
    hour, minute = int(wanted[1]), int(wanted[2])
    if not wanted[4] and not wanted[3] and math.gcd(hour, minute) == 1 and not wanted[2].startswith("0"):
        return None
    if not given or wanted[3] != given[3]:
        return False
    of_wanted, of_given = _minutes(wanted), _minutes(given)
    whole_day = all(clock[4] or int(clock[1]) > 12 for clock in (wanted, given))
    return (of_wanted - of_given) % (1440 if whole_day else 720) == 0


def _minutes(clock: re.Match[str]) -> int:
    hour = int(clock[1])
    if half := (clock[4] or "").lower():
        hour = hour % 12 + 12 * (half == "p")
    return hour * 60 + int(clock[2])


def _amounts(truth: str, answer: str) -> bool | None:
    """Compares amounts in units of one kind, as 3 hours 20 minutes with 200 minutes; for others, ignores the unit."""
    wanted, given = _amount(truth), _amount(answer)
    if wanted is not None and given is not None and wanted[0] == given[0]:
        return abs(wanted[1] - given[1]) <= abs(wanted[1]) / 10**6
    several = any(amount is not None and amount[2] > 1 for amount in (wanted, given))
    return False if several else None


def _amount(text: str) -> tuple[str, Fraction, int] | None:
    """Returns the kind of an amount, its size in the base unit, and its number of parts; None for other texts."""
    parts = list(_AMOUNT.finditer(text))
    if "".join(part.group() for part in parts) != text:
        return None
    units = [next((unit for names, unit in _UNITS.items() if re.fullmatch(names, part[2])), ("", 0)) for part in parts]
    kinds = {kind for kind, _ in units}
    if len(kinds) != 1 or "" in kinds:
        return None
    total = sum((_fraction(part[1]) * size for part, (_, size) in zip(parts, units, strict=True)), Fraction(0))
    return kinds.pop(), total, len(parts)


def _fraction(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


def _words(truth: str, answer: str) -> bool | None:
    """Compares texts of letters as words, whose order counts. Returns None if the truth may be a product: xyz."""
    if not _WORDS.fullmatch(truth) or _is_product(truth):
        return None
    if normalised(truth).casefold() == normalised(answer).casefold():
        return True
    return False if _WORDS.fullmatch(answer) else None


def _is_product(letters: str) -> bool:
    ranks = sorted(map(ord, letters))
    following = all(after - before == 1 for before, after in pairwise(ranks))
    return len(letters) <= 2 or (
        len(letters) == 3 and letters.islower() and (following or not set("aeiou") & {*letters})
    )


def _sets(truth: str, answer: str) -> bool | None:
    """Compares unions and intersections of named sets by their members: a truth table over membership in each set."""
    tokens = [_SET.findall(text) if not _SET.sub("", text).strip() else [] for text in (truth, answer)]
    names = sorted({token for text in tokens for token in text if token[0].isalpha()})
    if not all(tokens) or not 1 < len(names) <= 8 or len(tokens[0]) == 1:
        return None
    everything = (1 << (1 << len(names))) - 1
    masks = {
        name: sum(1 << row for row in range(1 << len(names)) if row >> place & 1) for place, name in enumerate(names)
    }
    values = [_members([*text, ""], masks, everything) for text in tokens]
    return None if None in values else values[0] == values[1]


def _members(tokens: list[str], masks: dict[str, int], everything: int) -> int | None:
    r"""Returns the members of a set expression as bits, None if unreadable. \cap binds before \cup and \setminus."""
    place = 0

    def one() -> int:
        nonlocal place
        token = tokens[place]
        place += 1
        if token == "(":
            value = either()
            if tokens[place] != ")":
                raise ValueError(tokens[place])
            place += 1
        else:
            value = 0 if token == "\\emptyset" else masks[token]
        while tokens[place] == "'" or tokens[place].startswith("^"):
            value, place = everything & ~value, place + 1
        return value

    def chain(signs: dict[str, Callable[[int, int], int]], part: Callable[[], int]) -> int:
        nonlocal place
        value = part()
        while tokens[place] in signs:
            place += 1
            value = signs[tokens[place - 1]](value, part())
        return value

    def both() -> int:
        return chain({"\\cap": int.__and__}, one)

    def either() -> int:
        return chain({"\\cup": int.__or__, "\\setminus": lambda left, right: left & ~right}, both)

    try:
        value = either()
    except (KeyError, ValueError, IndexError, RecursionError):
        return None
    return value if place == len(tokens) - 1 else None
