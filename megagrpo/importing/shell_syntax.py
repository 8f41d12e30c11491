"""The tree of a shell script by tree-sitter's grammar of bash, and its tests. Words are taken from the tree as they
were written: the grammar parts some in two. Any text gives a tree; parts that no grammar has are other nodes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Point, Range

from megagrpo.importing.shell_words import UNKNOWN, Shell, Status, Word, matches, unknown_part

CHARACTERS_MAX = 64 * 1024
"""Most characters that are parsed: a text that is no script takes time and memory by the square of its length."""
BASH = Language(tree_sitter_bash.language())
END = 2**32 - 1
EXPRESSIONS = ("test_command", "binary_expression", "unary_expression", "parenthesized_expression")
DOCUMENT = re.compile(r"(<<-?[ \t]*(['\"]?)[A-Za-z_]\w*\2)(?=[;|&])")
"""The beginning of a here-document, behind which the grammar needs a blank."""
OUTPUT = re.compile(r"&?1?>")
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


def parsed(text: str, line: int = 1) -> Node:
    """Returns the tree of a text. line: of its beginning."""
    text = DOCUMENT.sub(r"\1 ", text[:CHARACTERS_MAX].replace("\r\n", "\n"))
    source = text.encode("utf-8", "surrogatepass")
    place = Range(Point(max(line - 1, 0), 0), Point(END, END), 0, len(source))
    return Parser(BASH, included_ranges=[place]).parse(source).root_node


def parts(node: Node) -> list[Node]:
    return [child for child in node.children if child.type != "comment"]


def source_of(node: Node, start: int = 0, end: int = END) -> str:
    """Returns the text of a node, between two bytes of the script if they are given."""
    first = node.start_byte
    return (node.text or b"")[max(0, start - first) : end - first].decode("utf-8", "surrogatepass")


def inside(node: Node, opening: str, closing: str) -> str:
    """Returns the text between the first and the last of a node's signs."""
    signs = [child for child in node.children if child.type in (opening, closing)]
    return source_of(node, signs[0].end_byte, signs[-1].start_byte)


def words(nodes: Sequence[Node], source: Node) -> list[tuple[Word, Node]]:
    """Returns the words of `source` that the nodes are, each with its first node. Nodes that touch are one word,
    whatever the grammar takes them for; other signs are words of their own."""
    ends: list[tuple[Node, int]] = []
    for node in nodes:
        before, end = ends[-1] if ends else (node, -1)
        touches = end >= 0 and not source_of(source, end, node.start_byte).replace("\\\n", "")
        if touches and node.is_named and (before.is_named or before.type in "~$"):
            ends[-1] = (before, node.end_byte)
        else:
            ends.append((node, node.end_byte))
    return [(Word(source_of(source, node.start_byte, end), node.start_point.row + 1), node) for node, end in ends]


def operands(test: Node) -> list[Node]:
    """Returns the operands and operators of a test in their order."""
    return [one for part in parts(test) for one in operands(part)] if test.type in EXPRESSIONS else [test]


def moves_output(redirect: Node) -> bool:
    """Returns whether a redirection is of a command's output to elsewhere."""
    further = redirect.children_by_field_name("redirect")
    return any(map(moves_output, further)) or OUTPUT.match(source_of(redirect)) is not None


# --- tests ------------------------------------------------------------------------------------------------------------


def negated(status: Status) -> Status:
    return None if status is None else not status


class Tested:
    """A test, [ ... ], or [[ ... ]], whose words are as they were written (raw): || of && of ! of a comparison."""

    def __init__(self, words: list[Word], shell: Shell, *, raw: bool) -> None:
        self.words, self.shell, self.raw = words, shell, raw
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
            return negated(self._one())
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
        is_pattern = self.raw and sign in ("=", "==", "!=")
        return self._compared(left, sign, self.shell.pattern(right) if is_pattern else self._text(right), first.line)

    def _text(self, word: Word) -> str:
        return self.shell.text(word) if self.raw else word.text

    def _is(self, sign: str, text: str) -> Status:
        """Evaluates a test of one word. Files are not looked at: they are another machine's."""
        if sign == "-v":
            return True if text in self.shell.variables else self.shell.doubt(f"${text}")
        if sign not in ("-n", "-z"):
            return self.shell.doubt(f"[ {sign} {text} ]")
        if UNKNOWN in text:
            return self.shell.doubt(unknown_part(text))
        return bool(text) == (sign == "-n")

    def _compared(self, left: str, sign: str, right: str, line: int) -> Status:
        if UNKNOWN in left + right:
            return self.shell.doubt(unknown_part(left + right))
        if sign in COMPARISONS:
            one, other = self.shell.number(left or "0", line), self.shell.number(right or "0", line)
            if one is None or other is None:
                return self.shell.doubt(f"[ {left} {sign} {right} ]") if self.raw else False
            return COMPARISONS[sign](one, other)
        match sign:
            case "=" | "==" | "!=":
                return (matches(right, left) if self.raw else left == right) == (sign != "!=")
            case "<" | ">":
                return left < right if sign == "<" else left > right
            case "=~":
                with suppress(re.error):
                    return re.search(right, left) is not None
        return None
