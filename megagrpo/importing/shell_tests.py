"""Tests of a shell script: [ ... ], and [[ ... ]], whose words are as they were written (raw)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from megagrpo.importing.shell_syntax import Word
from megagrpo.importing.shell_words import UNKNOWN, Shell, matches, unknown_part

Status = bool | None
"""True if a command succeeds; None if unknown."""
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


class Tested:
    """One test: || of && of ! of a comparison. `doubt` receives the cause of a status that is not known."""

    def __init__(self, words: list[Word], shell: Shell, doubt: Callable[[str], Status], *, raw: bool) -> None:
        self.words, self.shell, self.doubt, self.raw = words, shell, doubt, raw
        self.either, self.both = ("||", "&&") if raw else ("-o", "-a")

    def status(self) -> Status:
        return self._joined(self.either, lambda: self._joined(self.both, self._one, False), True)

    def _joined(self, sign: str, next_status: Callable[[], Status], decides: bool) -> Status:
        """Evaluates statuses with a sign between them, one of which decides if it is `decides`."""
        status = next_status()
        while self.words and self.words[0].text == sign:
            del self.words[0]
            both = (status, next_status())
            status = decides if decides in both else None if None in both else not decides
        return status

    def _one(self) -> Status:
        if not self.words:
            return False
        first = self.words.pop(0)
        if first.text == "!" and self.words:
            status = self._one()
            return None if status is None else not status
        if first.text == "(" and self.raw:
            status = self.status()
            del self.words[:1]
            return status
        signs = (self.either, self.both)
        if first.text.startswith("-") and self.words and self.words[0].text not in (*signs, "==", "=", "!="):
            return self._is(first.text, self._text(self.words.pop(0)))
        left = self._text(first)
        if not self.words or self.words[0].text in (*signs, ")"):
            return self._is("-n", left)
        sign = self.words.pop(0).text
        right = self.words.pop(0) if self.words else Word("", first.line)
        if sign in COMPARISONS:
            return self._compared(left, sign, self._text(right), first.line)
        pattern = self.shell.pattern(right) if self.raw and sign in ("=", "==", "!=") else self._text(right)
        if UNKNOWN in left + pattern:
            return self.doubt(unknown_part(left + pattern))
        return _compare(left, sign, pattern, self.raw)

    def _text(self, word: Word) -> str:
        return self.shell.text(word) if self.raw else word.text

    def _is(self, sign: str, text: str) -> Status:
        """Evaluates a test of one word. Files are not looked at: they are another machine's."""
        if sign == "-v":
            return True if text in self.shell.variables else self.doubt(f"${text}")
        if sign not in ("-n", "-z"):
            return self.doubt(f"[ {sign} {text} ]")
        if UNKNOWN in text:
            return self.doubt(unknown_part(text))
        return bool(text) == (sign == "-n")

    def _compared(self, left: str, sign: str, right: str, line: int) -> Status:
        if UNKNOWN in left + right:
            return self.doubt(unknown_part(left + right))
        one, other = self.shell.number(left or "0", line), self.shell.number(right or "0", line)
        if one is None or other is None:
            return self.doubt(f"[ {left} {sign} {right} ]") if self.raw else False
        return COMPARISONS[sign](one, other)


def _compare(left: str, sign: str, right: str, raw: bool) -> Status:
    match sign:
        case "=" | "==" | "!=":
            return (matches(right, left) if raw else left == right) == (sign != "!=")
        case "<":
            return left < right
        case ">":
            return left > right
        case "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return None
    return None
