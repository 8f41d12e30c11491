"""The rubric of a judge, a text with {{variables}} that runs no code, and the verdict in the answer to it.

A verdict is a number from 0 to 1, or an error. It is never guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
from pydantic import Field

from megagrpo.errors import brief
from megagrpo.reward.answer_text import after_thinking
from megagrpo.section import Number, Section

VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][\w.-]*)\s*\}\}")
EXTRA_INFO = "extra_info."
FILES = (".txt", ".md")
OF_ROW = ("question", "prompt", "ground_truth", "data_source", "ability")
"""Variables that every rubric may have, besides `fence` and extra_info.NAME."""


def fence_of(texts: Collection[str]) -> str:
    """Returns a word that the texts cannot contain, since it is their hash. Equal texts give the same word."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(hashlib.blake2b(text.encode(errors="surrogatepass")).digest())
    return f"text-{digest.hexdigest()}"


class Rubric:
    """A template. `text`: the template itself, or the path of a file that ends in .txt or .md.

    shows: variables that show responses; the template must name one. Raises ValueError if the template is wrong.
    Other braces, as in JSON or LaTeX, are text. A value that is filled in is never read as a variable. {{fence}} is a
    word that no response contains.
    """

    def __init__(self, text: str, shows: Collection[str]) -> None:
        self.text = text
        if is_file(text):
            try:
                self.text = Path(text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"the rubric {text} cannot be read: {error}") from None
        self.variables = frozenset(VARIABLE.findall(self.text))
        known = ("fence", *OF_ROW, *shows)
        if wrong := sorted(name for name in self.variables if name not in known and not name.startswith(EXTRA_INFO)):
            raise ValueError(f"{{{{{wrong[0]}}}}} is not one of {', '.join(known)}, extra_info.NAME")
        if not self.variables & set(shows):
            needed = " or ".join(f"{{{{{name}}}}}" for name in shows)
            raise ValueError(f"the rubric has no {needed}: it must show the judge what to score")

    def rendered(self, responses: Sequence[str], prompt_text: str) -> list[str]:
        """Returns the responses that a comparison shows: whole if the text names {{response...}}, else without the
        reasoning."""
        if any(name.startswith("response") for name in self.variables):
            return list(responses)
        return [after_thinking(response, prompt_text) for response in responses]

    def filled(self, row: Mapping[str, Any], shown: Mapping[str, str]) -> str:
        """Returns the text for a row (a reward function's arguments). Raises ValueError if the row lacks a variable."""
        values = {"fence": fence_of(shown.values()), **shown}
        return VARIABLE.sub(lambda name: values[name[1]] if name[1] in values else value_of(name[1], row), self.text)


def value_of(name: str, row: Mapping[str, Any]) -> str:
    """Returns a variable's value. Raises ValueError if the row lacks it."""
    match name:
        case "question":
            questions = [message for message in row["prompt"] if message["role"] == "user"]
            if not questions:
                raise ValueError("the prompt has no message of the user, whose {{question}} the rubric names")
            return _content(questions[-1])
        case "prompt":
            return "\n\n".join(f"{message['role']}: {_content(message)}" for message in row["prompt"])
    if not name.startswith(EXTRA_INFO):
        return str(row[name])
    value: Any = row["extra_info"]
    for key in name.removeprefix(EXTRA_INFO).split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"the row has no {name}, which the rubric names")
        value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _content(message: Mapping[str, Any]) -> str:
    """Returns the text of a message; of a list of parts, the text parts joined."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def is_file(rubric: str) -> bool:
    """Returns whether a rubric is the path of a file, and not the text itself."""
    return "\n" not in rubric and rubric.endswith(FILES)


# --- verdicts ---------------------------------------------------------------------------------------------------------

CHARACTERS_READ = 20_000
"""Characters at the end of an answer that are read for its verdict."""
PATTERN_SECONDS = 1.0
"""Timeout of a recipe's own pattern, which may backtrack."""
LARGEST = 1e15

SCORE = re.compile(
    r"""(?ix) \b(?:score|rating|grade)\b [\s*_"'`]* [:=] [\s*_"'`\[(]*
    (?P<number> [-+]?+ \d++ (?:\.\d++)?+ ) (?! \s*[-–]\s*\d )
    (?: \s*/\s* (?P<most> \d++ (?:\.\d++)?+ ) )?"""
)
DECISIONS, ANSWERS = r"verdict|judge?ment|decision|winner", r"answer|choice"
MARKS = tuple(
    re.compile(rf"(?i)\b(?:{names})[\s*_\"'`]*(?:{sign})[\s*_\"'`\[(]*")
    for names, sign in ((DECISIONS, "[:=]"), (DECISIONS, r"is\b"), (ANSWERS, r"[:=]|is\b"))
)
"""Marks before a verdict. Marks of an earlier kind override those of later kinds: an answer may be cited."""
END = r"[ \t*_\"'`\])}]*(?:[.,;:!(<\r\n]|[-–—]\s|\Z)"
YES_NO = re.compile(rf"(?i)(yes|no)\b{END}")
A_B = re.compile(rf"(?i:(?:response|assistant|answer|option)\s+)?(A|B|(?i:tie))\b{END}")
YES_NO_ALONE = re.compile(r"(?i)[\s*_\"'`\[(#>-]*(yes|no)[\s*_\"'`\]).!]*")
A_B_ALONE = re.compile(r"[\s*_\"'`\[(]*(?i:(?:response|assistant|answer|option)\s+)?(A|B|(?i:tie))[\s*_\"'`\]).!]*")
A_B_BRACKETS = re.compile(r"\[\[\s*(A|B|C|(?i:tie))\s*\]\]")


class UnreadableError(ValueError):
    """The error of an answer without a verdict. The request is sent again."""


class Share(float):
    """A verdict from 0 to 1, which no scale changes."""


WORDS = {word: Share(1) for word in ("yes", "true", "a")} | {word: Share(0) for word in ("no", "false", "b")}
WORDS["tie"] = Share(0.5)


class PatternConfig(Section):
    """A verdict by a regular expression."""

    pattern: str
    """Its last match counts: group 1 is a number, or yes, no, true, false, A, B or tie."""


class FieldConfig(Section):
    """A verdict in JSON."""

    field: str
    """Key of the last JSON object of the answer, such as score, or result.score."""


VerdictConfig = Literal["score", "yes_no", "a_b"] | PatternConfig | FieldConfig
Scale = Annotated[list[Number], Field(min_length=2, max_length=2)]
Reader = Callable[[str], float]


def reader(verdict: VerdictConfig, scale: Scale | None) -> Reader:
    """Returns a function from an answer's text to the verdict, from 0 to 1. That function raises UnreadableError.

    scale: the numbers that mean 0 and 1; by default 0 and 10 for `score`, 0 and 1 for others. A number that is not
    between them is unreadable. Raises ValueError for a bad pattern or scale.
    """
    low, high = scale or ([0.0, 10.0] if verdict == "score" else [0.0, 1.0])
    if low == high:
        raise ValueError(f"scale {[low, high]}: its two numbers mean 0 and 1, and must differ")
    find: Reader
    if isinstance(verdict, PatternConfig):
        find = _pattern(verdict.pattern)
    elif isinstance(verdict, FieldConfig):
        find = partial(_field, verdict.field.split("."))
    else:
        named: dict[str, Reader] = {"score": partial(_score, max(low, high)), "yes_no": yes_no, "a_b": a_b}
        find = named[verdict]

    def read(text: str) -> float:
        number = find(text.rpartition("</think>")[2][-CHARACTERS_READ:])
        if isinstance(number, Share):
            return float(number)
        if not min(low, high) <= number <= max(low, high):
            raise UnreadableError(f"the verdict {number:g} is not between {low:g} and {high:g}")
        return (number - low) / (high - low)

    return read


def _score(most: float, text: str) -> float:
    """Returns the number of the last "Score: 7", "**Rating**: 7/10" or "score": 7."""
    *_, last = [None, *SCORE.finditer(text)]
    if last is None:
        raise UnreadableError("no 'Score: NUMBER'")
    if last["most"] is not None and float(last["most"]) != most:
        raise UnreadableError(f"a score of {last['most']}, not of {most:g}")
    return float(last["number"])


def yes_no(text: str) -> Share:
    """Returns 1 for yes, 0 for no: from "Verdict: yes", else from a first or last line that is yes or no alone."""
    return _word(text, YES_NO, YES_NO_ALONE, "neither yes nor no")


def a_b(text: str) -> Share:
    """Returns 1 for A, 0 for B, 0.5 for a tie: [[A]] (C: tie), "Verdict: A", or a first or last line of just A or B."""
    if bracketed := A_B_BRACKETS.findall(text):
        return WORDS.get(bracketed[-1].lower(), WORDS["tie"])
    return _word(text, A_B, A_B_ALONE, "neither A nor B")


def _word(text: str, value: re.Pattern[str], alone: re.Pattern[str], none: str) -> Share:
    """Returns the value behind the last mark of the first kind found; without marks, that of a first or last line."""
    for kind in MARKS:
        if marks := list(kind.finditer(text)):
            word = value.match(text, marks[-1].end())
            words = {word[1].lower()} if word else set()
            break
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        words = {word[1].lower() for line in lines[:1] + lines[-1:] if (word := alone.fullmatch(line))}
    if len(words) != 1:
        raise UnreadableError(none)
    return WORDS[words.pop()]


def _pattern(pattern: str) -> Callable[[str], float]:
    try:
        compiled = regex.compile(pattern)
    except regex.error as reason:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {reason}") from None
    if not compiled.groups:
        raise ValueError(f"pattern {pattern!r} has no group: its first group is the verdict")

    def find(text: str) -> float:
        try:
            matches: list[Any] = list(compiled.finditer(text, timeout=PATTERN_SECONDS))
        except TimeoutError:
            raise UnreadableError(f"the pattern takes longer than {PATTERN_SECONDS:g} s") from None
        if not matches:
            raise UnreadableError("nothing that the pattern matches")
        return _value(matches[-1][1])

    return find


def _field(path: list[str], text: str) -> float:
    last: Any = None
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:  # the outermost JSON objects, in order
        value: Any = None
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        last = last if value is None else value
        at = text.find("{", at)
    if last is None:
        raise UnreadableError(f"no JSON object with {'.'.join(path)}")
    return _value(last)


def _value(given: object) -> float:
    value = given
    if isinstance(value, str):
        word = value.strip().lower()
        if word in WORDS:
            return WORDS[word]
        with suppress(ValueError):
            value = float(word)
    if isinstance(value, bool):
        return Share(value)
    if not isinstance(value, int | float) or not abs(value) < LARGEST:  # nor is NaN
        raise UnreadableError(f"{brief(given)} is no number")
    return float(value)
