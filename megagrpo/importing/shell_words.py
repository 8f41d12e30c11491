"""Words of a shell script after expansion: variables, arrays, arithmetic, patterns, and the output of commands.

An expansion whose value is not known stays in a word as it was written, behind UNKNOWN.
"""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

UNKNOWN = "\ue000"
"""Prefix of each expansion in a word whose value is not known. No script has this character (it is for private use)."""
EXPANSION = re.compile(UNKNOWN + r"(\$\(.*\)|\$\{[^}]*\}|\$\w+|`[^`]*`|.*)", re.DOTALL)
BLANKS = re.compile(r"[ \t\n]+")
PARAMETER = re.compile(r"(#|!)?([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^]]*)\])?")
SEQUENCE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
EMPTY_LIST = re.compile(r'"\$(@|\{[^}]*\[@\][^}]*\}|\{@[^}]*\})"')
"""Words that expand to no word at all if the list in them is empty."""
PATTERNS = re.compile(r"[@?*+!]\(")
ITEMS_MAX = 10_000
TOKEN = re.compile(
    r"\s*(\d+#\w+|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|&&|\|\||[-+*/%<>=!]=|\+\+|--|[-+*/%<>=!~?:(),&|^])"
)
LEVELS: Sequence[dict[str, Callable[[int, int], int]]] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda a, b: a << min(b, 63), ">>": operator.rshift},
    {"+": operator.add, "-": operator.sub},
    {
        "*": operator.mul,
        "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
        "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    },
)
"""Operators from those that bind least to those that bind most."""


@dataclass(frozen=True)
class Word:
    """One argument of a command, before or after its expansion. line: where it begins, from 1."""

    text: str
    line: int


Value = str | list[Word]
Status = bool | None
"""True if a command succeeds; None if unknown."""


def unknown_part(text: str) -> str:
    """Returns the first expansion in a text that is not known, as it was written; empty if all are known."""
    expansion = EXPANSION.search(text)
    return expansion[1] if expansion else ""


def glob(pattern: str) -> str:
    """Returns a shell's pattern as a regular expression; a backslash escapes the next character."""
    expression, at = "", 0
    while at < len(pattern):
        character, at = pattern[at], at + 1
        end = pattern.find("]", at + 1 + pattern.startswith("!", at)) if character == "[" else -1
        if character == "\\":
            expression, at = expression + re.escape(pattern[at : at + 1]), at + 1
        elif character in "*?":
            expression += {"*": ".*", "?": "."}[character]
        elif end > 0:
            inside = pattern[at:end].replace("\\", r"\\")
            expression, at = expression + f"[{'^' + inside[1:] if inside[0] in '!^' else inside}]", end + 1
        else:
            expression += re.escape(character)
    return expression


def matches(pattern: str, text: str) -> bool:
    try:
        return re.compile(glob(pattern), re.DOTALL).fullmatch(text) is not None
    except re.error:
        return False


def span(text: str, at: int, quoted: bool = False) -> int:
    """Returns the index behind the quotation, the expansion, or the escaped or plain character that begins at `at`."""
    character = text[at]
    if character == "\\":
        return min(at + 2, len(text))
    if character == "'" and not quoted:
        return (text.find("'", at + 1) + 1) or len(text)
    if character in '"`' or (text.startswith("$'", at) and not quoted):
        end, at = ("'", at + 2) if character == "$" else (character, at + 1)
        while at < len(text) and text[at] != end:
            at = span(text, at, True) if end == '"' or text[at] == "\\" else at + 1
        return min(at + 1, len(text))
    if text.startswith(("$(", "${"), at):
        opening, closing = ("(", ")") if text[at + 1] == "(" else ("{", "}")
        depth, at = 1, at + 2
        while at < len(text):
            depth += (text[at] == opening) - (text[at] == closing)
            if depth == 0:
                return at + 1
            at = span(text, at, quoted and closing == "}")
        return len(text)
    return at + 1


class Shell(ABC):
    """The state that words are expanded from. arguments: of the script or function."""

    def __init__(self, variables: dict[str, Value]) -> None:
        self.variables, self.arguments = variables, list[str]()
        self.cause = ""
        """Cause of the last status that is not known."""

    def doubt(self, cause: str) -> Status:
        self.cause = cause.replace(UNKNOWN, "")
        return None

    @abstractmethod
    def output(self, command: str, line: int) -> str:
        """Returns the output of a command's text."""

    @abstractmethod
    def assign(self, name: str, value: Value) -> None:
        """Sets a variable."""

    def values(self, word: Word) -> list[str]:
        """Expands a word to one word; to several or none, if it is a variable that holds several, or blanks."""
        return [text for one in braces(word.text) for text in _Expansion(one, word.line, self).words()]

    def text(self, word: Word) -> str:
        """Expands a word to one text, as in an assignment."""
        return " ".join(_Expansion(word.text, word.line, self).pieces(split=False))

    def pattern(self, word: Word) -> str:
        """Expands a word to one pattern, with a backslash before quoted signs; UNKNOWN if it has another pattern in
        it, such as @(a|b)."""
        pattern = " ".join(_Expansion(word.text, word.line, self, pattern=True).pieces(split=False))
        return UNKNOWN + pattern if PATTERNS.search(pattern) else pattern

    def number(self, expression: str, line: int) -> int | None:
        """Evaluates arithmetic; None if it needs an unknown value, or is no arithmetic."""
        text = " ".join(_Expansion(expression.replace('"', ""), line, self).pieces(split=False))
        try:
            return None if UNKNOWN in text else _Number(text, self).whole()
        except (ValueError, ZeroDivisionError, OverflowError):
            return None


def braces(text: str) -> list[str]:
    """Expands {a,b} and {1..3} in a word, without quotes or expansions, to words."""
    parts = re.fullmatch(r"([^\\\"'$`{}]*)\{([^\\\"'$`{}\s]*)\}([^\\\"'$`]*)", text)
    if not parts:
        return [text]
    inside = parts[2].split(",")
    if numbers := SEQUENCE.fullmatch(parts[2]):
        first, last = int(numbers[1][-9:]), int(numbers[2][-9:])
        step = max(1, abs(int((numbers[3] or "1")[-9:])))
        numbered = range(first, last + (1 if first <= last else -1), step if first <= last else -step)
        inside = [str(one) for one in numbered[: ITEMS_MAX + 1]]
    following = braces(parts[3])
    if len(inside) < 2 or len(inside) * len(following) > ITEMS_MAX:
        return [text]
    return [f"{parts[1]}{one}{rest}" for one in inside for rest in following]


@dataclass
class _Expansion:
    """A place in a word as it was written."""

    raw: str
    line: int
    shell: Shell
    pattern: bool = False
    at: int = 0
    quoted: bool = False  # a word with quotation marks is a word even if empty

    def words(self) -> list[str]:
        pieces = self.pieces(split=True)
        empty_list = self.quoted and pieces == [""] and EMPTY_LIST.fullmatch(self.raw)
        return [] if empty_list else [piece for piece in pieces if piece or self.quoted]

    def pieces(self, *, split: bool, end: str = "") -> list[str]:
        """Expands up to the quotation mark `end`, or to the end. split: at blanks outside quotations."""
        pieces = [""]
        if not end and re.match(r"~(/|$)", self.raw[self.at :]) and isinstance(self.shell.variables.get("HOME"), str):
            pieces, self.at = [str(self.shell.variables["HOME"])], self.at + 1
        while self.at < len(self.raw) and not (end and self.raw[self.at] == end):
            character, stop = self.raw[self.at], span(self.raw, self.at, bool(end))
            piece = self.raw[self.at : stop]
            if character == "\\":
                kept = not end or piece[1:] in ("\\", '"', "$", "`", "\n")
                pieces[-1] += self._plain(piece[1:].replace("\n", "") if kept else piece)
            elif character == "'" and not end:
                self.quoted = True
                pieces[-1] += self._plain(piece[1:].removesuffix("'"))
            elif character == '"' and not end:
                self.quoted, self.at = True, self.at + 1
                self._add(pieces, self.pieces(split=False, end='"'), split=False)
                stop = self.at + 1
            elif character in "$`" and len(piece) > 1:
                self._add(pieces, self._expanded(piece, bool(end)), split=split and not end, plain=bool(end))
            elif character == "$" and not piece[1:]:
                stop, values = self._named(bool(end))
                self._add(pieces, values, split=split and not end, plain=bool(end))
            else:
                pieces[-1] += self._plain(character) if end else character
            self.at = stop
        return pieces

    def _plain(self, text: str) -> str:
        return re.sub(r"([*?\[\]\\(])", r"\\\1", text) if self.pattern else text

    def _add(self, pieces: list[str], values: list[str], *, split: bool, plain: bool = False) -> None:
        """Appends values: the first to the last piece, others as words of their own. split: splits values at blanks."""
        if split:
            values = [part for one in values for part in (BLANKS.split(one) if UNKNOWN not in one else [one])]
        if plain:
            values = [self._plain(value) for value in values]
        if values:
            pieces[-1] += values[0]
        pieces += values[1:]

    def _named(self, quoted: bool) -> tuple[int, list[str]]:
        """Expands $NAME, or a dollar sign. Returns the index behind it, and its values."""
        name = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!\d-])").match(self.raw, self.at)
        if not name:
            return self.at + 1, ["$"]
        return name.end(), self._value(name[1], None, name[0], quoted)

    def _expanded(self, piece: str, quoted: bool) -> list[str]:
        if piece.startswith("$'"):
            self.quoted = True
            return [re.sub(r"\\(.)", lambda text: {"n": "\n", "t": "\t"}.get(text[1], text[1]), piece[2:-1])]
        if piece.startswith("$((") and piece.endswith("))"):
            number = self.shell.number(piece[3:-2], self.line)
            return [UNKNOWN + piece if number is None else str(number)]
        if piece.startswith("${"):
            return self._braces(piece[2:].removesuffix("}"), piece, quoted)
        inside = piece[1:].removesuffix("`") if piece[0] == "`" else piece[2:].removesuffix(")")
        text = self.shell.output(inside, self.line)
        return [UNKNOWN + piece if UNKNOWN in text else text]

    def _value(self, name: str, index: str | None, whole: str, quoted: bool = False) -> list[str]:
        """Returns a variable's value, or all or one of an array's; [] if empty, the written text if unknown."""
        arguments = self.shell.arguments
        if name in ("@", "*"):
            return [" ".join(arguments)] if name == "*" and quoted else list(arguments)
        if name == "#":
            return [str(len(arguments))]
        if name.isdigit() and name != "0":
            return [arguments[int(name) - 1]] if 0 < int(name[:4]) <= len(arguments) else [UNKNOWN + whole]
        value = self.shell.variables.get(name)
        if value is None:
            return [UNKNOWN + whole]
        values = [value] if isinstance(value, str) else [word.text for word in value]
        if index in ("@", "*"):
            return [" ".join(values)] if index == "*" and quoted else values
        number = self.shell.number(index or "0", self.line)
        if number is None:
            return [UNKNOWN + whole]
        return [values[number] if -len(values) <= number < len(values) else ""]

    def _braces(self, inside: str, whole: str, quoted: bool) -> list[str]:
        parameter = PARAMETER.match(inside)
        if not parameter:
            return [UNKNOWN + whole]
        (sign, name, index), rest = parameter.groups(), inside[parameter.end() :]
        if sign == "#" and not rest.strip():
            values = self._value(name, index, whole)
            unknown = any(UNKNOWN in value for value in values)
            return [UNKNOWN + whole if unknown else str(len(values if index in ("@", "*") else values[0]))]
        if sign == "!" and not rest:
            other = "".join(self._value(name, None, whole))
            return [other] if UNKNOWN in other else self._value(other, None, whole)
        if sign:
            return [UNKNOWN + whole]
        values = self._value(name, index, whole, quoted)
        if not rest:
            return values
        if default := re.compile(r":?([-=?+])").match(rest):
            is_set = name in ("@", "*") or name in self.shell.variables or UNKNOWN not in "".join(values)
            used = is_set and (any(values) or (bool(values) and not rest.startswith(":")))
            if default[1] == "+":
                return self._inner(rest[default.end() :]) if used else []
            if used or default[1] == "?":
                return values if used else [UNKNOWN + whole]
            others = self._inner(rest[default.end() :])
            if default[1] == "=":
                self.shell.assign(name, " ".join(others))
            return others
        if any(UNKNOWN in value for value in values):
            return [UNKNOWN + whole]
        return self._changed(values, rest, several=name in ("@", "*") or index in ("@", "*"), whole=whole)

    def _inner(self, text: str) -> list[str]:
        """Expands a default, with its own quotes and expansions."""
        return _Expansion(text, self.line, self.shell, self.pattern).pieces(split=False)

    def _changed(self, values: list[str], rest: str, *, several: bool, whole: str) -> list[str]:
        """Returns each value without a prefix or suffix, with a replacement, in another case, or a part of it."""
        if case := {"^^": str.upper, ",,": str.lower}.get(rest):
            return [case(value) for value in values]
        if rest in ("^", ","):
            return [(value[:1].upper() if rest == "^" else value[:1].lower()) + value[1:] for value in values]
        if rest.startswith(":"):
            return self._part(values, rest[1:], several=several, whole=whole)
        sign = re.compile(r"##?|%%?|//?[#%]?").match(rest)
        if not sign:
            return [UNKNOWN + whole]
        replaces, at = sign[0].startswith("/"), sign.end()
        end = at
        while replaces and end < len(rest) and rest[end] != "/":
            end = span(rest, end)
        pattern = self.shell.pattern(Word(rest[at:end] if replaces else rest[at:], self.line))
        new = "".join(self._inner(rest[end + 1 :])) if replaces else ""
        if UNKNOWN in pattern + new:
            return [UNKNOWN + whole]
        try:
            return [_without(value, sign[0], pattern, new) for value in values]
        except re.error:
            return [UNKNOWN + whole]

    def _part(self, values: list[str], rest: str, *, several: bool, whole: str) -> list[str]:
        start, colon, count = rest.partition(":")
        first, length = self.shell.number(start, self.line), self.shell.number(count, self.line) if colon else ITEMS_MAX
        if first is None or length is None or (several and first < 0):
            return [UNKNOWN + whole]
        if several:
            return values[first - (whole.startswith("${@") and first > 0) :][:length]
        return [value[first:][:length] if length >= 0 else value[first:length] for value in values]


def _without(value: str, sign: str, pattern: str, new: str) -> str:
    compiled = re.compile(glob(pattern), re.DOTALL)
    if sign[0] == "/":
        if sign[1:] in ("#", "%"):
            compiled = re.compile(f"^(?:{glob(pattern)})" if sign[1] == "#" else f"(?:{glob(pattern)})$", re.DOTALL)
        return compiled.sub(lambda _: new, value, count=0 if sign == "//" else 1) if pattern else value
    ends = range(len(value) + 1)
    for at in ends if sign in ("#", "%%") else reversed(ends):
        if compiled.fullmatch(value[:at] if sign[0] == "#" else value[at:]):
            return value[at:] if sign[0] == "#" else value[:at]
    return value


class _Number:
    """Arithmetic of whole numbers, with names and assignments. Raises ValueError for an unknown value or other text."""

    def __init__(self, text: str, shell: Shell, depth: int = 0) -> None:
        self.tokens, self.shell, self.depth, at = list[str](), shell, depth, 0
        while text[at:].strip():
            token = TOKEN.match(text, at)
            if not token or depth > 20:
                raise ValueError(text)
            self.tokens.append(token[1])
            at = token.end()
        self.tokens.append("")

    def whole(self) -> int:
        value = self._several() if self.tokens[0] else 0
        if self.tokens[0]:
            raise ValueError(self.tokens[0])
        return value

    def _take(self, *wanted: str) -> str:
        return self.tokens.pop(0) if self.tokens[0] in wanted else ""

    def _several(self) -> int:
        value = self._assigned()
        while self._take(","):
            value = self._assigned()
        return value

    def _assigned(self) -> int:
        name, sign = [*self.tokens, ""][:2]
        if name.isidentifier() and (sign == "=" or sign in ("+=", "-=", "*=", "/=", "%=")):
            del self.tokens[:2]
            value = self._assigned()
            value = value if sign == "=" else int(ChainMap(*LEVELS)[sign[0]](self._named(name), value))
            self.shell.assign(name, str(value))
            return value
        value = self._level(0)
        if not self._take("?"):
            return value
        one = self._assigned()
        if not self._take(":"):
            raise ValueError("? without :")
        other = self._assigned()
        return one if value else other

    def _level(self, level: int) -> int:
        if level == len(LEVELS):
            return self._power()
        value = self._level(level + 1)
        while sign := self._take(*LEVELS[level]):
            value = int(LEVELS[level][sign](value, self._level(level + 1)))
        return value

    def _power(self) -> int:
        value = self._one()
        if not self._take("**"):
            return value
        power = self._power()
        if not 0 <= power < 64 or abs(value) > 2**32:
            raise ValueError("a power beyond 64 bits")
        return int(value**power)

    def _one(self) -> int:
        if sign := self._take("-", "+", "!", "~"):
            value = self._one()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        if self._take("("):
            value = self._several()
            if not self._take(")"):
                raise ValueError("( without )")
            return value
        changed = self._take("++", "--")
        token = self.tokens.pop(0)
        if not token.isidentifier():
            base, sharp, digits = token.partition("#")
            return int(digits, int(base)) if sharp else int(token, 8 if re.fullmatch(r"0\d+", token) else 0)
        value = self._named(token)
        if after := changed or self._take("++", "--"):
            self.shell.assign(token, str(value + (1 if after == "++" else -1)))
        return value + ((1 if changed == "++" else -1) if changed else 0)

    def _named(self, name: str) -> int:
        value = self.shell.variables.get(name)
        if not isinstance(value, str) or UNKNOWN in value:
            raise ValueError(name)
        return _Number(value, self.shell, self.depth + 1).whole()
