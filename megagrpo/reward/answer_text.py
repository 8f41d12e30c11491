r"""Functions that find the answer in a response, and that normalise texts as question-answering benchmarks do.

Each takes time linear in the length of the text.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

# A box without braces has a number, a command or a letter: \boxed 5, \boxed\frac{1}{2}, $\boxed x$. Words are prose.
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[-+]?[.]?\d|[-+]?\\[A-Za-z{]|[A-Za-z]\s*\$))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_BARE = re.compile(r"(?:(?!\\[)\]])[^\s$])+")
_FINAL_ANSWER = re.compile(r"(?i)\bfinal answer is\b *:?")
_MATHEMATICAL = re.compile(r"[\d\\$]")
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])")
_HOPE = re.compile(r"(?i)I hope it is correct")


class _Table(dict[int, int | None]):
    """A table for str.translate, which asks a function once for each character; None drops it."""

    def __init__(self, written_as: Callable[[str], int | None]) -> None:
        self.written_as = written_as

    def __missing__(self, code: int) -> int | None:
        self[code] = self.written_as(chr(code))
        return self[code]


def _in_plain(character: str) -> int | None:
    # The full-width comma parts no thousands.
    code = ord(character) - (0xFEE0 if "\uff01" <= character <= "\uff5e" and character != "\uff0c" else 0)
    return None if unicodedata.category(character) == "Cf" else code


_PLAIN = _Table(_in_plain)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{…}` or `\fbox{…}`; without braces, it ends at white space or
    the end of the formula; None if there is no box, or if it is not closed.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}")
    ('\\frac{1}{2}', None)
    >>> last_boxed(r"$\boxed 5$."), last_boxed(r"\(\boxed\frac{1}{2}\)"), last_boxed(r"\boxed{5}, by \boxed as asked")
    ('5', '\\frac{1}{2}', '5')
    """
    *_, box = [None, *BOX.finditer(text)]
    if box is None:
        return None
    if not box.group(1):
        bare = _BARE.match(text, box.end())
        return bare.group().rstrip(".,;") if bare else None
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[box.end() : brace.start()]
    return None


def plain(text: str) -> str:
    """Returns the text with full-width letters, digits and signs in ASCII, and without zero-width characters.

    >>> plain("１０\u200b＋Ａ"), plain("½²，é")
    ('10+A', '½²，é')
    """
    return text if text.isascii() else text.translate(_PLAIN)


def after_thinking(response: str, prompt_text: str = "") -> str:
    """Returns the text after the reasoning: after the last `</think>`, and before a `<think>` that is not closed.

    If the prompt ends in `<think>`, the response begins inside the reasoning. Returns "" if that is not closed.

    >>> after_thinking("<think>3? no</think>It is 4."), after_thinking("It is 4."), after_thinking("<think>is it 3")
    ('It is 4.', 'It is 4.', '')
    >>> after_thinking("It is 4.", "User: 2 + 2?\\n<think>\\n"), after_thinking("Hm.</think>It is 4.", "<think>")
    ('', 'It is 4.')
    """
    if "</think>" not in response and prompt_text.rstrip().endswith("<think>"):
        return ""
    return response.rpartition("</think>")[2].partition("<think>")[0]


def final_answer(text: str) -> str | None:
    r"""Returns the answer at the end of a text: its last `\boxed{…}` or its last "final answer is", the later one.

    The second is Minerva's form, "Final Answer: The final answer is X. I hope it is correct.": X ends with its line or
    sentence. A box wins over mere words, as in "the final answer is correct". Returns None if there is neither.

    >>> final_answer("Final Answer: The final answer is $x=4$. I hope it is correct.")
    '$x=4$'
    >>> final_answer(r"The final answer is \boxed{4}."), final_answer("It is 4.")
    ('4', None)
    >>> final_answer("The final answer is **42**. It took 3."), final_answer(r"\boxed{4} The final answer is so.")
    ('42', '4')
    """
    *_, announced = [None, *_FINAL_ANSWER.finditer(text)]
    if announced is None or BOX.search(text, announced.end()):
        return last_boxed(text)
    start = announced.end()
    hope = _HOPE.search(text, start)
    stated = text[start : hope.start()] if hope else text[start:].lstrip(" *\n\t").partition("\n")[0]
    stated = _SENTENCE_END.split(stated, maxsplit=1)[0].strip(" *\n\t")
    stated = (stated[:-1] if stated.endswith((".", "!")) else stated).strip(" *\n\t")
    box = last_boxed(text)
    return box if box is not None and not _MATHEMATICAL.search(stated) else stated or None


def tagged(text: str, tag: str) -> str | None:
    """Returns the stripped text of the last `<tag>…</tag>`, or None if there is none.

    >>> tagged("<answer>no</answer> <answer> Paris </answer>", "answer"), tagged("Paris </answer>", "answer")
    ('Paris', None)
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    return None if start < 0 else text[start + len(opening) : text.find(closing, start)].strip()


_FENCE = re.compile(r"([ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(```+)([^`]*)")
_PYTHON = re.compile(r"(?:py|python)[0-9.]*|")


def blocks(text: str) -> list[tuple[str, str]]:
    r"""Returns the closed fenced blocks of a text in order, those of its list items included. Each has a label, the
    first word behind the fence in lower case, and its lines, without the indentation of the fence.

    >>> blocks("1. So:\n   ```JSON title=x\n   {}\n   ```\nand ```this``` is none")
    [('json', '{}\n')]
    """
    closed: list[tuple[str, str]] = []
    lines: list[str] | None = None
    fence, label, indent = "", "", 0
    for line in text.splitlines(keepends=True):
        if lines is None:
            if opening := _FENCE.fullmatch(line.rstrip()):
                lines, fence, indent = [], opening[2], len(opening[1])
                label = (opening[3].split() or [""])[0].lower()
        elif line.strip().startswith(fence) and not line.strip().strip("`"):
            closed.append((label, "".join(lines)))
            lines = None
        else:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    return closed


def last_program(text: str) -> str | None:
    r"""Returns the last of `blocks` labelled as Python, else the last without a label (possibly output), or None.

    >>> last_program("```python3\nfirst\n```\n```\nsecond\n```\n```text\nthird\n```")
    'first\n'
    """
    programs = [block for block in reversed(blocks(text)) if _PYTHON.fullmatch(block[0])]
    return next((program for _, program in [*(block for block in programs if block[0]), *programs]), None)


_WITHOUT_SIGNS = _Table(  # of Unicode's punctuation, and of ASCII's symbols
    lambda sign: None if sign in string.punctuation or unicodedata.category(sign).startswith("P") else ord(sign)
)
_ARTICLES = frozenset({"a", "an", "the"})
_FRACTION = re.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")  # of 1½, which is not 11/2
_POWER = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070\u2074-\u207b])")  # of 10², which is not 102
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[-./:^*+=\u2010\u2212\u2013\u2044]+(?=\d)")
_PARTING = re.compile(r"(?<=\d)[^\w\s,'\u2019\ue000-\ue0ff]+(?=\d)")  # what else stands between digits, as in (5)(3)
_NUMBER_MINUS = re.compile(r"(?:(?<![\w)])|(?<=\de))[-\u2010\u2212\u2013](?=[.$]?\d)")  # of -5 and 5e-3
_FIRST_POINT = re.compile(r"(?<![\w.)])\.(?=\d)")  # of .75
_ONE_SIGN = str.maketrans("\u2010\u2212\u2013\u2044", "---/")
_KEPT = str.maketrans({sign: chr(0xE000 + ord(sign)) for sign in "-./:^*+="})  # private characters are no punctuation
_BACK = str.maketrans({kept: chr(sign) for sign, kept in _KEPT.items()})


def squad_words(text: str) -> list[str]:
    """Returns the words of a text as SQuAD compares them: lower case, without punctuation and articles.

    Unlike SQuAD, keeps a number's minus and the signs between digits except commas and apostrophes: 3.5 is not 35, 5/6
    is not 56. Reads .75 as 0.75. Keeps the articles of a text that has no other words. Like SQuAD, drops other signs of
    ASCII: C++ and C# are C.

    >>> squad_words("The  Beatles' 1st U.S. tour!"), squad_words("-3.50 $"), squad_words("A")
    (['beatles', '1st', 'us', 'tour'], ['-3.50'], ['a'])
    >>> squad_words("5/6 at 1:30, 1990–1995, 1½, 10⁻³, C++")
    ['5/6', 'at', '1:30', '1990-1995', '1', '1/2', '10^-3', 'c']
    """
    text = unicodedata.normalize("NFKC", _POWER.sub("^", _FRACTION.sub(" ", text))).casefold()
    text = _NUMBER_MINUS.sub(_kept, _BETWEEN_DIGITS.sub(_kept, _FIRST_POINT.sub("0.", text)))
    words = _PARTING.sub(" ", text).translate(_WITHOUT_SIGNS).translate(_BACK).split()
    return [word for word in words if word not in _ARTICLES] or words


def _kept(sign: re.Match[str]) -> str:
    return sign.group().translate(_ONE_SIGN).translate(_KEPT)


@lru_cache(maxsize=65536)
def accepted_answers(ground_truth: str) -> tuple[str, ...]:
    """Returns the accepted texts: the ground truth, those of a JSON list, or those of Search-R1's {"target": […]}.

    Raises ValueError if there is none, or if one is neither a text nor a number.

    >>> accepted_answers("Paris"), accepted_answers('["NYC", "New York"]'), accepted_answers('{"target": "Paris"}')
    (('Paris',), ('NYC', 'New York'), ('Paris',))
    """
    answers: Any = None
    with suppress(ValueError, RecursionError):
        answers = json.loads(ground_truth)
    if isinstance(answers, dict) and "target" in answers:
        answers = answers["target"] if isinstance(answers["target"], list) else [answers["target"]]
    if not isinstance(answers, list):
        answers = [ground_truth]
    if not all(isinstance(answer, str | int | float) for answer in answers):
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is a list of something other than texts")
    answers = [str(answer) for answer in answers if str(answer).strip()]
    if not answers:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} has no answer")
    return tuple(answers)


@lru_cache(maxsize=65536)
def accepted_words(ground_truth: str) -> tuple[tuple[str, ...], ...]:
    """Returns the words of each accepted answer that has any, by squad_words. Raises ValueError if none has."""
    answers = tuple(tuple(words) for words in map(squad_words, accepted_answers(ground_truth)) if words)
    if not answers:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} has no word")
    return answers
