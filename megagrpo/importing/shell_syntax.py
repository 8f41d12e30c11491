"""The grammar of shell scripts: commands as a tree, whose words are as they were written. Any text gives a tree:
parts that no grammar has are passed over."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]\n]*)\])?(\+?)=")
FUNCTION = re.compile(
    r"(?:function[ \t]+([\w:-]+)(?:[ \t]*\([ \t]*\))?|([A-Za-z_][\w:-]*)[ \t]*\([ \t]*\))[ \t\n]*(?=[{(])"
)
REDIRECTION = re.compile(r"(\d*|&)(<<<|<<-?|[<>]{1,2}[&|]?)(?!\()")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
METACHARACTERS = " \t\n;|&<>()"


@dataclass(frozen=True)
class Word:
    """One argument of a command, before or after its expansion. line: where it begins, from 1."""

    text: str
    line: int


@dataclass(frozen=True)
class Assignment:
    """NAME=value, NAME[index]=value, NAME=(values), or += in the place of =."""

    name: str
    index: str | None
    more: bool
    value: Word | Sequence[Word]


@dataclass(frozen=True)
class Simple:
    """A program or a builtin with its arguments. quiet: its output goes elsewhere."""

    assignments: Sequence[Assignment]
    words: Sequence[Word]
    quiet: bool


@dataclass(frozen=True)
class Pipe:
    """Commands of which each reads what the one before it writes. negated: behind !."""

    parts: Sequence[Node]
    negated: bool


@dataclass(frozen=True)
class If:
    """A test with the blocks of both cases. An `elif` is another one in `otherwise`; && and || are tests, too."""

    test: Block
    body: Block
    otherwise: Block


@dataclass(frozen=True)
class While:
    """A loop as long as the test succeeds. next: runs between two turns."""

    test: Block
    body: Block
    next: Block = ()


@dataclass(frozen=True)
class For:
    """A loop over words; over the arguments where there are none."""

    name: str
    words: Sequence[Word] | None
    body: Block


@dataclass(frozen=True)
class Case:
    """A word against patterns; the first that fits decides. falls: a branch ends with ;& or ;;&."""

    subject: Word
    branches: Sequence[tuple[Sequence[Word], Block]]
    falls: bool


@dataclass(frozen=True)
class Function:
    name: str
    body: Node


@dataclass(frozen=True)
class Group:
    """{ ...; }, or (...) whose variables end with it."""

    body: Block
    apart: bool


@dataclass(frozen=True)
class Arithmetic:
    """((...)): it succeeds unless it is 0."""

    text: str


@dataclass(frozen=True)
class Test:
    """[[ ... ]]: its words and operators."""

    words: Sequence[Word]


Node = Simple | Pipe | If | While | For | Case | Function | Group | Arithmetic | Test
Block = Sequence[Node]


def span(text: str, at: int, quoted: bool = False) -> int:
    """Returns the index behind the quotation, the expansion, or the escaped or plain character that begins at `at`."""
    here = text[at]
    if here == "\\":
        return min(at + 2, len(text))
    if here == "'" and not quoted:
        return (text.find("'", at + 1) + 1) or len(text)
    if here in '"`' or (text.startswith("$'", at) and not quoted):
        end, at = ("'", at + 2) if here == "$" else (here, at + 1)
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


@dataclass
class Parser:
    """A place in a text, from which commands are read. line: of the text's first line."""

    text: str
    line: int = 1
    at: int = 0
    documents: list[str] = field(default_factory=list)
    """End markers of here-documents that begin on the next line."""

    def __post_init__(self) -> None:
        self.newlines = [at for at, character in enumerate(self.text) if character == "\n"]

    def block(self, ends: Collection[str] = ()) -> Block:
        """Reads commands up to a reserved word, or to a sign, of `ends`."""
        nodes: list[Node] = []
        while self._blanks(lines=True):
            if any(self._sees(end) for end in ends):
                break
            before = self.at
            if not self.text.startswith((";", "&", ")"), self.at):
                nodes.append(self._joined())
            if self.at == before:
                self.at += 1
        return nodes

    # --- commands -----------------------------------------------------------------------------------------------------

    def _joined(self) -> Node:
        left = self._pipe()
        while self._blanks() and (sign := re.compile(r"&&|\|\|").match(self.text, self.at)):
            self.at = sign.end()
            self._blanks(lines=True)
            right = [self._pipe()]
            left = If([left], right, [Arithmetic("0")]) if sign[0] == "&&" else If([left], (), right)
        return left

    def _pipe(self) -> Node:
        negated = False
        while self._blanks() and (self._takes("!") or self._takes("time")):
            negated = not negated
        parts = [self._command()]
        while self._blanks() and self.text.startswith("|", self.at) and not self.text.startswith("||", self.at):
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self._blanks(lines=True)
            parts.append(self._command())
        return parts[0] if len(parts) == 1 and not negated else Pipe(parts, negated)

    def _command(self) -> Node:
        if named := FUNCTION.match(self.text, self.at):
            self.at = named.end()
            return Function(named[1] or named[2], self._command())
        compound = self._compound()
        if compound is None:
            return self._simple()
        while self._blanks() and self._redirection() is not None:
            pass
        return compound

    def _compound(self) -> Node | None:
        if self.text.startswith("((", self.at) and (text := self._in_double()) is not None:
            return Arithmetic(text)
        if self.text.startswith("(", self.at):
            self.at += 1
            return Group(self._until(")"), apart=True)
        if self._takes("{"):
            return Group(self._until("}"), apart=False)
        if self._takes("[["):
            return Test(self._test())
        if self._takes("if"):
            return self._if()
        if self._takes("while"):
            return While(self._until("do"), self._until("done"))
        if self._takes("until"):
            test = Pipe([Group(self._until("do"), apart=False)], negated=True)
            return While([test], self._until("done"))
        if self._takes("for") or self._takes("select"):
            return self._for()
        return self._case() if self._takes("case") else None

    def _until(self, end: str) -> Block:
        """Reads commands up to the end, which is passed over."""
        nodes = self.block((end,))
        self._takes(end)
        return nodes

    def _if(self) -> Node:
        test = self._until("then")
        body = self.block(("elif", "else", "fi"))
        if self._takes("elif"):
            return If(test, body, [self._if()])
        otherwise = self.block(("fi",)) if self._takes("else") else ()
        self._takes("fi")
        return If(test, body, otherwise)

    def _for(self) -> Node:
        self._blanks()
        counted = self._in_double() if self.text.startswith("((", self.at) else None
        name = self._word().text if counted is None else ""
        words: list[Word] | None = None
        self._blanks(lines=True)
        if self._takes("in"):
            words = []
            while self._blanks() and self.text[self.at] not in METACHARACTERS:
                words.append(self._word())
        while self._blanks(lines=True) and self.text[self.at] == ";":
            self.at += 1
        body = self._until("done" if self._takes("do") else "}" if self._takes("{") else "do")
        if counted is None:
            return For(name, words, body)
        first, test, step = [*counted.split(";"), "", ""][:3]
        loop = While([Arithmetic(test or "1")], body, [Arithmetic(step)])
        return Group([Arithmetic(first), loop], apart=False)

    def _case(self) -> Node:
        self._blanks()
        subject = self._word()
        self._blanks(lines=True)
        self._takes("in")
        branches, falls = list[tuple[Sequence[Word], Block]](), False
        while self._blanks(lines=True) and not self._takes("esac"):
            patterns: list[Word] = []
            while self._blanks(lines=True) and self.text[self.at] != ")":
                before = self.at
                if self.text[self.at] in "|(":
                    self.at += 1
                else:
                    patterns.append(self._word())
                if self.at == before:
                    self.at += 1
            self.at += 1
            branches.append((patterns, self.block((";;", ";&", "esac"))))
            falls = falls or self.text.startswith((";&", ";;&"), self.at)
            end = re.compile(r";;&?|;&").match(self.text, self.at)
            self.at = end.end() if end else self.at
        return Case(subject, branches, falls)

    def _test(self) -> Sequence[Word]:
        words: list[Word] = []
        sign = re.compile(r"&&|\|\||[()<>]")
        while self._blanks(lines=True) and not self._takes("]]"):
            matches = words and words[-1].text == "=~"
            if not matches and (operator := sign.match(self.text, self.at)):
                words.append(Word(operator[0], self._line()))
                self.at = operator.end()
                continue
            if self.text[self.at] in ";|&":  # no grammar has it
                break
            words.append(self._word(" \t\n" if matches else METACHARACTERS))
        return words

    def _in_double(self) -> str | None:
        """Passes over ((...)) and returns its text; None if it is no arithmetic."""
        end = span(f"${self.text[self.at :]}", 0) - 1 + self.at
        if not self.text.startswith("))", end - 2):
            return None
        start, self.at = self.at + 2, end
        return self.text[start : end - 2]

    # --- simple commands ----------------------------------------------------------------------------------------------

    def _simple(self) -> Node:
        assignments, words, quiet = list[Assignment](), list[Word](), False
        while self._blanks() and self.text[self.at] not in "\n;|)":
            may_assign = not words or words[0].text in DECLARING
            if (of_output := self._redirection()) is not None:
                quiet = quiet or of_output
            elif self.text[self.at] in "&(":
                break
            elif may_assign and (name := ASSIGNMENT.match(self.text, self.at)):
                self.at = name.end()
                assignments.append(Assignment(name[1], name[2], bool(name[3]), self._assigned()))
            else:
                words.append(self._word())
        return Simple(assignments, words, quiet)

    def _assigned(self) -> Word | Sequence[Word]:
        if not self.text.startswith("(", self.at):
            return self._word()
        self.at += 1
        values: list[Word] = []
        while self._blanks(lines=True) and self.text[self.at] != ")":
            before = self.at
            values.append(self._word(" \t\n)"))
            if self.at == before:
                self.at += 1
        self.at += 1
        return values

    def _redirection(self) -> bool | None:
        """Passes over a redirection. Returns whether it is of the output; None if there is no redirection."""
        sign = REDIRECTION.match(self.text, self.at)
        if not sign:
            return None
        self.at = sign.end()
        self._blanks()
        target = self._word()
        if sign[2] in ("<<", "<<-"):
            self.documents.append(re.sub(r"[\"'\\]", "", target.text))
        return ">" in sign[2] and sign[1] in ("", "1", "&") and target.text not in ("&1",)

    def _word(self, ends: str = METACHARACTERS) -> Word:
        line, start = self._line(), self.at
        if self.text.startswith(("<(", ">("), self.at):
            self.at = span(f"${self.text[self.at + 1 :]}", 0) + self.at
        while self.at < len(self.text) and self.text[self.at] not in ends:
            self.at = span(self.text, self.at)
        return Word(self.text[start : self.at], line)

    # --- places -------------------------------------------------------------------------------------------------------

    def _line(self) -> int:
        return self.line + bisect_left(self.newlines, self.at)

    def _blanks(self, *, lines: bool = False) -> bool:
        """Passes over blanks and comments, and over ends of lines if `lines`; False at the end of the text."""
        while self.at < len(self.text):
            here = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif here in " \t":
                self.at += 1
            elif here == "#":
                self.at = (self.text.find("\n", self.at) + 1 or len(self.text) + 1) - 1
            elif here == "\n" and lines:
                self.at += 1
                for name in self.documents:
                    end = re.compile(rf"^[ \t]*{re.escape(name)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
                    self.at = end.end() if end else len(self.text)
                self.documents.clear()
            else:
                return True
        return False

    def _sees(self, word: str) -> bool:
        """Returns whether the sign, or the reserved word as a whole word, is next."""
        end = self.at + len(word)
        whole = not (word[0].isalpha() or word in ("{", "}", "!", "[[", "]]")) or self.text[end : end + 1] in (
            "",
            *METACHARACTERS,
        )
        return whole and self.text.startswith(word, self.at)

    def _takes(self, word: str) -> bool:
        sees = self._sees(word)
        self.at += len(word) if sees else 0
        return sees
