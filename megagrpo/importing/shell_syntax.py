"""The tree of a shell script by tree-sitter's grammar of bash, and its tests. Words are taken from the tree as they
were written: the grammar parts some in two. Any text gives a tree; parts that no grammar has are other nodes.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Point, Query, QueryCursor, Range

from megagrpo.importing.shell_words import UNKNOWN, Shell, Status, Word, matches, span, unknown_part

CHARACTERS_MAX = 1024 * 1024
PIPES_MAX = 2000
"""Most pipes of a text that is parsed: where their end is missing, they take memory by the square of their number."""
SECONDS_MAX = 1.0
"""Processor time after which a text is parsed for a part only: one that is no script may take it by the square of its
length."""
CHUNK_BYTES = 4096
PASSES = 5
"""Most times that a text is parsed again: a form that is mended may hide another one."""
ODD_MAX = 10
"""Most places that notes name."""
BASH = Language(tree_sitter_bash.language())
END = 2**32 - 1
EXPRESSIONS = ("test_command", "binary_expression", "unary_expression", "parenthesized_expression")
SIGNS = re.compile(
    r"[\\'\"`$\n]|(?<![^\s;&|()])#.*|<<<|<<-?[ \t]*((?:\\.|'[^'\n]*'|\"[^\"\n]*\"|[^\s\\'\"`;|&<>()])+)"
    r"|\(\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)\)"
)
"""Beginnings of here-documents, with the name of the end, and signs that may hide one."""
LAST_FALL = re.compile(r";;?&(?=(?:\s|#[^\n]*\n){0,200}\besac\b)")
"""The end of a last case, which the grammar knows as ;; only."""
BACKQUOTES = re.compile(r"`[ \t]+`")
NEXT_LINE = re.compile(rb"[ \t]*(#.*)?\n")
SPANNED = ("expansion", "arithmetic_expansion", "command_substitution", "string")
FORMS = Query(
    BASH,
    "(ERROR) @odd (MISSING) @odd [(command (variable_assignment) @assigned) (ERROR (variable_assignment) @assigned)]",
)
OUTPUT = re.compile(r"&?1?>")
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


def parsed(text: str, line: int = 1) -> tuple[Node, list[str]]:
    """Returns the tree of a text, and notes on what is not read. line: of its beginning."""
    text = LAST_FALL.sub(";;", _without_documents(text.replace("\r\n", "\n")))
    pipes = [sign.start() for sign in re.finditer(r"\|", text)]
    end = min(CHARACTERS_MAX, *pipes[PIPES_MAX : PIPES_MAX + 1], len(text))
    while isinstance(root := _tree(source := text[:end].encode("utf-8", "surrogatepass"), line), int):
        end = min(root, end) // 2
    notes = list[str]()
    if len(text) > end:
        last = line + text.count("\n", 0, end)
        notes.append(f"the script is read up to a place in line {last} only: it is too long, or no script")
    found = QueryCursor(FORMS).captures(root)
    for _ in range(PASSES):  # after several assignments, the grammar takes the next line for their command
        ends = sorted(one.end_byte for one in found.get("assigned", ()) if NEXT_LINE.match(source, one.end_byte))
        lines = [source[start:end] for start, end in zip([0, *ends], [*ends, len(source)], strict=True)]
        again = _tree(b";".join(lines), line) if ends else 0
        if isinstance(again, int):
            break
        source, root = b";".join(lines), again
        found = QueryCursor(FORMS).captures(root)
    odd = islice(filter(_is_odd, found.get("odd", ())), ODD_MAX)
    for first, last in sorted({(one.start_point.row + 1, one.end_point.row + 1) for one in odd}):
        where = f"line {first} has" if first == last else f"lines {first} to {last} have"
        notes.append(f"{where} a form that is not known here: look at {'it' if first == last else 'them'}")
    return root, notes


def _without_documents(text: str) -> str:
    """Returns a text with empty lines in the place of the here-documents outside of its substitutions: the grammar
    knows only some of the commands that may stand behind their beginning."""
    pieces, names, at, done = list[str](), list[str](), 0, 0
    while sign := SIGNS.search(text, at):
        at = sign.end()
        if sign[1]:
            names.append(re.sub(r"[\"'\\]", "", sign[1]))
            pieces += [text[done : sign.start()], "< ", sign[1]]
            done = at
        elif sign[0] == "\n":
            for name in names:
                end = re.compile(rf"^[ \t]*{re.escape(name)}[ \t]*$", re.MULTILINE).search(text, at)
                stop = end.end() if end else len(text)
                pieces += [text[done:at], "\n" * text.count("\n", at, stop)]
                at = done = stop
            names.clear()
        elif sign[0] in "\\'\"`$":
            at = span(text, sign.start())
    return "".join([*pieces, text[done:]])


def _is_odd(node: Node) -> bool:
    """Returns whether what no grammar has is outside of the parts of words that are read by their text."""
    if node.start_byte == node.end_byte and not node.is_missing:
        return False
    above = node.parent
    while above:
        if above.type in SPANNED and span(text := source_of(above), 0) == len(text):
            return False
        above = above.parent
    return True


def _tree(source: bytes, line: int) -> Node | int:
    """Returns the tree of a source, or how far the parser came if it takes too long. line: of its beginning."""
    place = Range(Point(max(line - 1, 0), 0), Point(END, END), 0, len(source))
    end, reached = time.thread_time() + SECONDS_MAX, 0

    def is_late(at: int, _: bool) -> bool:
        nonlocal reached
        reached = at
        return time.thread_time() > end

    with suppress(ValueError):
        parser = Parser(BASH, included_ranges=[place])
        tree = parser.parse(lambda at, _: source[at : at + CHUNK_BYTES], progress_callback=is_late)
        if tree:
            return tree.root_node
    return reached


def parts(node: Node) -> list[Node]:
    return [child for child in node.children if child.type != "comment"]


def source_of(node: Node, start: int = 0, end: int = END) -> str:
    """Returns the text of a node, between two bytes of the script if they are given."""
    first = node.start_byte
    return _decoded((node.text or b"")[max(0, start - first) : end - first])


def _decoded(source: bytes) -> str:
    return source.decode("utf-8", "surrogatepass")


def inside(node: Node, opening: str, closing: str) -> str:
    """Returns the text between the first and the last of a node's signs."""
    signs = [child for child in node.children if child.type in (opening, closing)]
    return source_of(node, signs[0].end_byte, signs[-1].start_byte)


def words(nodes: Sequence[Node], source: Node) -> list[tuple[Word, Node]]:
    """Returns the words of `source` that the nodes are, each with its first node. Nodes that touch are one word,
    whatever the grammar takes them for; other signs are words of their own."""
    ends: list[tuple[Node, int]] = []
    text, first = source.text or b"", source.start_byte
    for node in nodes:
        before, end = ends[-1] if ends else (node, -1)
        touches = end >= 0 and not text[end - first : node.start_byte - first].replace(b"\\\n", b"")
        if touches and node.is_named and (before.is_named or before.type in "~$"):
            ends[-1] = (before, node.end_byte)
        else:
            ends.append((node, node.end_byte))
    return [
        (Word(part, node.start_point.row + 1), node)
        for node, end in ends
        for part in _parted(_decoded(text[node.start_byte - first : end - first]))
    ]


def _parted(word: str) -> list[str]:
    """Parts a word at blanks between two of its substitutions by backquotes, which the grammar takes for one."""
    if "(" in word or not BACKQUOTES.search(word):
        return [word]
    parted, at = [""], 0
    while at < len(word):
        end = span(word, at)
        if word[at] in " \t":
            parted += [""] if parted[-1] else []
        else:
            parted[-1] += word[at:end]
        at = end
    return parted


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
