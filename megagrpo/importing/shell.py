"""The commands of a shell script, read without running anything: words after variables, arrays and arithmetic.

What only a shell could tell stays in a word as it was written, behind UNKNOWN: variables that are not set here, and the
output of commands (but for basename). No branch is chosen: what `if`, `for` and `case` hold is read as if it stood
there, but an assignment in it replaces nothing: Script.undecided has those that might.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

UNKNOWN = "\ue000"
"""Before each expansion in a word whose value is not known. No script has this character (it is for private use)."""
NAME = re.compile(r"[A-Za-z_]\w*")
PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+")
BLANKS = re.compile(r"[ \t\n]+")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
OPENING, CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
LEADING = (*OPENING, "then", "else", "elif", "do", "!", "{", "}", "time")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: int(a / b) if b else 0,
    ast.Mod: lambda a, b: a % b if b else 0,
}
CHARACTERS_MAX = 1024 * 1024


@dataclass(frozen=True)
class Word:
    """One argument of a command. line: where it begins, from 1."""

    text: str
    line: int


@dataclass
class Script:
    """A script's commands, in order, and its variables as they are at the end."""

    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, str | list[Word]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    """Variables that the script does not change."""
    undecided: list[Word] = field(default_factory=list)
    """Variables that a branch may give another value."""


def read_script(text: str, variables: Mapping[str, str], fixed: Mapping[str, str]) -> Script:
    """The commands of a script. variables: those that are set before it begins, such as HOME; fixed: those whose values
    stand whatever it assigns."""
    script = Script(variables={**variables, **fixed}, fixed=frozenset(fixed))
    _Reader(text[:CHARACTERS_MAX].replace("\r\n", "\n"), script).read()
    return script


class _Reader:
    def __init__(self, text: str, script: Script, line: int = 1) -> None:
        self.text, self.script, self.at, self.line, self.depth = text, script, 0, line, 0

    # --- commands -----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        words: list[Word] = []
        while self.at < len(self.text):
            if self._ends_command():
                words = self._end(words)
            elif not self._skip_redirection():
                self._read_word_or_assignment(words)
        self._end(words)

    def _end(self, words: list[Word]) -> list[Word]:
        while words and words[0].text in (*LEADING, *CLOSING):
            first = words.pop(0).text
            self.depth += (first in OPENING) - (first in CLOSING)
        if words and words[0].text not in DECLARING:
            self.script.commands.append(words)
        return []

    def _ends_command(self) -> bool:
        """Passes over blanks and comments; True if a command ended, which is passed over, too."""
        while self.at < len(self.text):
            here = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self._forward(2)
            elif here in " \t":
                self._forward(1)
            elif here == "#":
                self._forward((self.text + "\n").index("\n", self.at) - self.at)
            elif here in "\n;|()" or (here == "&" and not self.text.startswith("&>", self.at)):
                self._forward(1)
                return True
            else:
                return False
        return False

    def _skip_redirection(self) -> bool:
        found = re.compile(r"(?:\d*|&)(<<<|<<-?|[<>]{1,2}[&|]?)").match(self.text, self.at)
        if not found:
            return False
        self._forward(found.end() - self.at)
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self._forward(1)
        target = self._word(split=False)
        if found[1] in ("<<", "<<-") and target:
            end = re.compile(rf"^[ \t]*{re.escape(target[0].text)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
            self._forward((end.end() if end else len(self.text)) - self.at)
        return True

    def _read_word_or_assignment(self, words: list[Word]) -> None:
        assigns = ASSIGNMENT.match(self.text, self.at)
        names = [word.text for word in words]
        if not assigns or any(name not in (*LEADING, *DECLARING) and not name.startswith("-") for name in names):
            words += self._word(split=True)
            return
        self._forward(assigns.end() - self.at)
        value: str | list[Word]
        if self.text.startswith("(", self.at):
            self._forward(1)
            value = self._array()
        else:
            value = "".join(word.text for word in self._word(split=False))
        self._assign(assigns[1], value, more=bool(assigns[2]), branch=self.depth > 0 or bool({*names} & {*LEADING}))

    def _assign(self, name: str, value: str | list[Word], *, more: bool, branch: bool) -> None:
        before = self.script.variables.get(name)
        if name in self.script.fixed:
            return
        if branch and before is not None and not more:
            if before != value:
                self.script.undecided.append(Word(name, self.line))
        elif more and isinstance(before, list) and isinstance(value, list):
            self.script.variables[name] = [*before, *value]
        elif more and isinstance(before, str) and isinstance(value, str):
            self.script.variables[name] = f"{before}{value}"
        else:
            self.script.variables[name] = value

    def _array(self) -> list[Word]:
        found: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\n":
                self._forward(1)
            elif self.text.startswith("\\\n", self.at):
                self._forward(2)
            elif self.text[self.at] == "#":
                self._forward((self.text + "\n").index("\n", self.at) - self.at)
            else:
                found += self._word(split=True)
        self._forward(1)
        return found

    # --- words --------------------------------------------------------------------------------------------------------

    def _word(self, *, split: bool) -> list[Word]:
        """The word here; several, or none, where it is a variable that holds several. split: at blanks in variables."""
        pieces: list[list[str]] = [[]]
        line, quoted, start = self.line, False, self.at
        if self.text.startswith('"$@"', self.at):  # the arguments of the script: none
            self._forward(4)
            return []
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in " \t\n;|&<>" or (here in "()" and self.at > start):
                break
            if here == "\\":
                pieces[-1].append("" if self.text.startswith("\\\n", self.at) else self.text[self.at + 1 : self.at + 2])
                self._forward(2)
            elif here == "'":
                quoted, end = True, self._closing("'")
                pieces[-1].append(self.text[self.at + 1 : end])
                self._forward(end + 1 - self.at)
            elif here == '"':
                quoted = True
                self._add(pieces, self._quoted(), split=False)
            elif here in "$`":
                self._add(pieces, self._expansion(), split=split)
            else:
                pieces[-1].append(here)
                self._forward(1)
        if self.at == start:  # what no word begins with
            self._forward(1)
        texts = ["".join(piece) for piece in pieces]
        return [Word(text, line) for text in texts if text or quoted or not split]

    def _quoted(self) -> list[str]:
        pieces: list[list[str]] = [[]]
        self._forward(1)
        while self.at < len(self.text) and self.text[self.at] != '"':
            here = self.text[self.at]
            if here == "\\" and self.text[self.at + 1 : self.at + 2] in ("\\", '"', "$", "`", "\n"):
                pieces[-1].append(self.text[self.at + 1].replace("\n", ""))
                self._forward(2)
            elif here in "$`":
                self._add(pieces, self._expansion(), split=False)
            else:
                pieces[-1].append(here)
                self._forward(1)
        self._forward(1)
        return ["".join(piece) for piece in pieces]

    @staticmethod
    def _add(pieces: list[list[str]], values: list[str], *, split: bool) -> None:
        """Several values begin words of their own; so do blanks in a value that is split."""
        if split:
            values = [part for one in values for part in (BLANKS.split(one) if UNKNOWN not in one else [one])]
        if values:
            pieces[-1].append(values[0])
        pieces += [[value] for value in values[1:]]

    def _expansion(self) -> list[str]:
        """What stands for the expansion that begins here."""
        text, at = self.text, self.at
        if text.startswith("$((", at) and (end := text.find("))", at)) > 0:
            while text[end + 2 : end + 3] == ")" and text.count("(", at, end + 2) > text.count(")", at, end + 2):
                end += 1
            self._forward(end + 2 - at)
            return [self._calculated(text[at + 3 : end], text[at : end + 2])]
        if text.startswith("$(", at) or text[at] == "`":
            end = self._balanced("(", ")") if text[at] == "$" else self._closing("`") + 1
            self._forward(end - at)
            return [self._output(text[at + 2 : end - 1], text[at:end])]
        if text.startswith("${", at):
            end = self._balanced("{", "}")
            self._forward(end - at)
            return self._braces(text[at + 2 : end - 1], text[at:end])
        if found := NAME.match(text, at + 1):
            self._forward(found.end() - at)
            return self._value(found[0], [UNKNOWN + text[at : found.end()]])
        self._forward(2 if re.match(r"[@*#?!$\d-]", text[at + 1 : at + 2]) else 1)
        if text[at + 1 : at + 2] in ("@", "*"):  # the arguments of the script: none
            return []
        return [UNKNOWN + text[at : self.at]] if self.at > at + 1 else ["$"]

    def _output(self, command: str, whole: str) -> str:
        inner = _Reader(command, Script(variables=self.script.variables))
        words = inner._word(split=True) if command.startswith("basename ") else []
        if words:
            inner._forward(1)
            words += inner._word(split=True)
        known = len(words) == 2 and inner.at >= len(command) and UNKNOWN not in words[1].text
        return words[1].text.rstrip("/").rpartition("/")[2] if known else UNKNOWN + whole

    def _braces(self, inside: str, whole: str) -> list[str]:
        found = PARAMETER.match(inside)
        name, rest = (found[0], inside[found.end() :]) if found else ("", inside)
        unknown = [UNKNOWN + whole]
        if rest in ("", "[@]", "[*]"):
            return self._value(name, unknown)
        told = re.compile(r":?([-=?+])").match(rest)
        if not name or not told:
            return [] if inside.startswith(("@", "*")) else unknown
        value = self._value(name, [])
        if told[1] == "+":
            return self._inner(rest[told.end() :]) if any(value) else []
        if any(value):
            return value
        return unknown if told[1] == "?" else self._inner(rest[told.end() :])

    def _inner(self, text: str) -> list[str]:
        """The words of a default, with its own quotes and expansions."""
        inner = _Reader(text, self.script, self.line)
        pieces: list[list[str]] = [[]]
        while inner.at < len(inner.text):
            here = inner.text[inner.at]
            if here in "$`":
                self._add(pieces, inner._expansion(), split=False)
            else:
                pieces[-1].append("" if here in "\"'\\" else here)
                inner._forward(1)
        return ["".join(piece) for piece in pieces]

    def _value(self, name: str, otherwise: list[str]) -> list[str]:
        value = self.script.variables.get(name)
        if value is None:
            return otherwise
        return [value] if isinstance(value, str) else [word.text for word in value]

    def _calculated(self, expression: str, whole: str) -> str:
        names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression)
        told = NAME.sub(lambda found: "".join(self._value(found[0], ["?"])) or "0", names).replace("/", "//").strip()
        try:
            return str(_number(ast.parse(told, mode="eval").body))
        except (SyntaxError, ValueError, RecursionError):
            return UNKNOWN + whole

    # --- places -------------------------------------------------------------------------------------------------------

    def _forward(self, characters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + characters)
        self.at += characters

    def _closing(self, quote: str) -> int:
        end = self.text.find(quote, self.at + 1)
        return end if end >= 0 else len(self.text)

    def _balanced(self, opening: str, closing: str) -> int:
        """The place behind the bracket that closes the first one from here on."""
        depth = 0
        for at in range(self.at + 1, len(self.text)):
            depth += (self.text[at] == opening) - (self.text[at] == closing)
            if depth == 0:
                return at + 1
        return len(self.text)


def _number(node: ast.expr) -> int:
    """Raises ValueError for what is not arithmetic of whole numbers."""
    match node:
        case ast.Constant(value=int(value)):
            return int(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError("no arithmetic of whole numbers")
