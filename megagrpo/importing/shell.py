"""The commands that a shell script would run, found without running anything: it is followed through its branches,
loops and functions, with its variables, arrays and arithmetic.

Values that only a shell could tell are UNKNOWN: variables that are not set here, and the output of most commands.
If a branch depends on one, all of its sides are followed, and variables that they leave with different values are
not known either. Programs that look for chips find NVIDIA's.
"""

from __future__ import annotations

import operator
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from megagrpo.importing import shell_syntax as syntax
from megagrpo.importing.shell_syntax import Assignment, Block, Node, Parser, Word
from megagrpo.importing.shell_words import UNKNOWN, Shell, Value, matches, unknown_part

Status = bool | None
"""True if a command succeeds; None if unknown."""
CHARACTERS_MAX = 1024 * 1024
COMMANDS_MAX = 20_000
"""Most commands that are followed: a loop may have no end."""
CALLS_MAX = 20
OTHER_CHIPS = re.compile(r"\b(torch_npu|npu-smi|rocm-smi|rocminfo|amd-smi|xpu-smi|hl-smi|torch_xla)\b")
FINDERS = ("command", "which", "type", "hash")
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
SUCCEEDING = (":", "true", "cd", "echo", "export", "mkdir", "printf", "popd", "pushd", "set", "shopt", "source", ".")


def read_script(
    text: str, variables: Mapping[str, str], fixed: Mapping[str, str], *, exits: bool = True, line: int = 1
) -> Script:
    """Reads the commands of a script. variables: those that are set before it begins, such as HOME; fixed: those that
    keep their values whatever it assigns; exits: whether it ends at an `exit`; line: of its first line."""
    script = Script(variables, fixed, exits)
    try:
        script.block(Parser(text[:CHARACTERS_MAX].replace("\r\n", "\n"), line).block())
    except _LeaveError:
        pass
    except RecursionError:
        script.notes.append("the script is too deep in itself to be followed to its end")
    return script


class _LeaveError(Exception):
    """The end of what is followed: of the script (exit), a function (return) or loop (break), or a turn (continue)."""

    def __init__(self, how: str, levels: int = 1) -> None:
        super().__init__(how)
        self.how, self.levels = how, levels


class Script(Shell):
    """A script's commands so far, in order, and its state behind the last of them."""

    def __init__(self, variables: Mapping[str, str], fixed: Mapping[str, str], exits: bool) -> None:
        super().__init__({**variables, **fixed})
        self.fixed, self.exits, self.count = fixed, exits, 0
        self.commands, self.notes = list[list[Word]](), list[str]()
        self.doubtful: dict[int, str] = {}
        """Lines of commands that a branch may leave out, with what the branch depends on."""
        self.ended = 0
        """The line of the `exit` that ended it, if one did."""
        self.functions: dict[str, Node] = {}
        self.written: list[str] | None = None
        """Output of commands; None if it is not kept."""
        self.cause = ""
        """Cause of the last status that is not known."""
        self.doubts: list[str] = []
        """Causes of the branches around this command."""
        self.outside: list[dict[str, Value | None]] = []
        """For each function that runs, values outside of it of the variables that are its own; None: not set."""

    def block(self, block: Block) -> Status:
        status: Status = True
        for node in block:
            status = self.node(node)
        return status

    def node(self, node: Node) -> Status:
        self.count += not isinstance(node, syntax.Arithmetic)  # a counted loop's turn counts once
        if self.count > COMMANDS_MAX:
            self.notes.append(f"the script is followed for {COMMANDS_MAX} commands only")
            raise _LeaveError("exit")
        match node:
            case syntax.Simple():
                return self._simple(node)
            case syntax.Pipe(parts, negated):
                status = self.node(parts[0]) if len(parts) == 1 else self._piped(parts)
                return _negated(status) if negated else status
            case syntax.If(test, body, otherwise):
                status = self.block(test)
                if status is None:
                    return self._either(lambda: self.block(body), lambda: self.block(otherwise))
                return self.block(body if status else otherwise)
            case syntax.While():
                return self._while(node)
            case syntax.For():
                return self._for(node)
            case syntax.Case():
                return self._case(node, 0)
            case syntax.Function(name, function):
                self.functions[name] = function
                return True
            case syntax.Group(body, apart):
                return self._apart(body) if apart else self.block(body)
            case syntax.Arithmetic(text):
                number = self.number(text, 0)
                return self.doubt(f"(({text.strip()}))") if number is None else number != 0
            case syntax.Test(words):
                return _Tested(list(words), self, raw=True).status()

    # --- branches -----------------------------------------------------------------------------------------------------

    def _case(self, node: syntax.Case, at: int) -> Status:
        """Follows the first branch that fits. An unknown subject may fit all branches. A case that falls through
        is read as if its subject were unknown."""
        subject = self.text(node.subject)
        for patterns, body in node.branches[at:]:
            at += 1
            texts = [self.pattern(pattern) for pattern in patterns]
            if "*" in texts and not node.falls:
                return self.block(body)
            if node.falls or UNKNOWN in subject + "".join(texts):
                self.doubt(unknown_part(subject + "".join(texts)) or f"case {node.subject.text}")
                return self._either(lambda body=body: self.block(body), lambda at=at: self._case(node, at))  # type: ignore[misc]
            if any(matches(pattern, subject) for pattern in texts):
                return self.block(body)
        return True

    def _while(self, node: syntax.While) -> Status:
        while True:
            status = self.block(node.test)
            if status is None:
                return self._either(lambda: self._turn(node.body) and None, lambda: None)
            if not status or not self._turn(node.body):
                return True
            self.block(node.next)

    def _for(self, node: syntax.For) -> Status:
        words = [text for word in node.words or () for text in self.values(word)]
        for text in words if node.words is not None else list(self.arguments):
            self.assign(node.name, text)
            if UNKNOWN in text and " " not in text:
                self.doubt(unknown_part(text))
                return self._either(lambda: self._turn(node.body) and None, lambda: None)
            if not self._turn(node.body):
                break
        return True

    def _turn(self, body: Block) -> bool:
        """Follows one turn of a loop. Returns False if the loop ends with it."""
        try:
            self.block(body)
        except _LeaveError as left:
            if left.how not in ("break", "continue"):
                raise
            if left.levels > 1:
                raise _LeaveError(left.how, left.levels - 1) from None
            return left.how == "continue"
        self.count += 1
        return self.count <= COMMANDS_MAX

    def _either(self, *sides: Callable[[], Status]) -> Status:
        """Follows all sides, each from this state. Variables, output and status in which they differ become unknown."""
        before, written, cause = self.variables, self.written, self.cause
        ends: list[tuple[dict[str, Value], Status, list[str] | None]] = []
        left: _LeaveError | None = None
        self.doubts.append(cause)
        for side in sides:
            self.variables, self.written = dict(before), None if written is None else list(written)
            try:
                ends.append((self.variables, side(), self.written))
            except _LeaveError as leaving:
                left = leaving
                ends += [(self.variables, None, self.written)] if leaving.how in ("break", "continue") else []
        self.doubts.pop()
        self.variables, self.written, self.cause = before, written, cause
        if not ends:
            raise left or _LeaveError("exit")
        names = {name for variables, _, _ in ends for name in variables}
        merged = {name: _merged(name, [variables.get(name) for variables, _, _ in ends], cause) for name in names}
        before.clear()
        before.update({name: value for name, value in merged.items() if value is not None})
        if written is not None:
            same = all(end[2] == ends[0][2] for end in ends)
            written[:] = (ends[0][2] or []) if same else [*written, UNKNOWN + cause]
        return ends[0][1] if all(status is ends[0][1] for _, status, _ in ends) else None

    def _apart(self, body: Block) -> Status:
        """Follows commands with variables of their own, and then restores the variables."""
        before = self.variables
        self.variables = dict(before)
        try:
            return self.block(body)
        except _LeaveError as left:
            if left.how != "exit":
                raise
            return None
        finally:
            self.variables = before

    def _piped(self, parts: Sequence[Node]) -> Status:
        written, self.written = self.written, None if self.written is None else []
        status: Status = None
        for part in parts:
            status = self._apart([part])
        self.written = written
        if written is not None:
            written.append(UNKNOWN)
        return self.doubt("a pipe") if status is None else status

    def doubt(self, cause: str) -> Status:
        self.cause = cause.replace(UNKNOWN, "")
        return None

    # --- commands -----------------------------------------------------------------------------------------------------

    def _simple(self, node: syntax.Simple) -> Status:
        words = [Word(text, word.line) for word in node.words for text in self.values(word)]
        name = words[0].text if words else ""
        if name in ("declare", "local", "typeset") and self.outside:
            for one in node.assignments:
                self.outside[-1].setdefault(one.name, self.variables.get(one.name))
        if name in ("export", "declare", "local", "readonly", "typeset") or not words:
            unknown = [part for one in node.assignments if (part := unknown_part(self._assign(one)))]
            if not words and unknown and unknown[0].startswith(("$(", "`")):
                return self.doubt(unknown[0])
            return True
        arguments = [word.text for word in words[1:]]
        if name in self.functions and len(self.outside) < CALLS_MAX:
            return self._call(name, arguments)
        if name in ("exit", "return", "break", "continue"):
            return self._leave(name, words)
        if name in ("[", "test"):
            tested = words[1:-1] if name == "[" else words[1:]
            return _Tested([Word(word.text, words[0].line) for word in tested], self, raw=False).status()
        self.commands.append(words)
        if self.doubts:
            self.doubtful[words[0].line] = self.doubts[-1]
        if self.written is not None and not node.quiet:
            self.written.append(self._printed(name, arguments))
        return self._builtin(name, arguments, words[0].line)

    def _leave(self, how: str, words: Sequence[Word]) -> Status:
        if how == "exit":
            if not self.exits:
                return True
            if not self.doubts and not self.outside:
                self.ended = words[0].line
        levels = words[1].text if len(words) > 1 and how in ("break", "continue") else "1"
        raise _LeaveError(how, int(levels) if levels.isdigit() else 1)

    def _builtin(self, name: str, arguments: Sequence[str], line: int) -> Status:
        """Applies a builtin's changes and returns its status."""
        command = " ".join([name, *arguments]).replace(UNKNOWN, "")
        if name == "cd" and arguments:
            path = os.path.join(str(self.variables.get("PWD", UNKNOWN + "$PWD")), arguments[-1])
            self.assign("PWD", path if UNKNOWN in path else os.path.normpath(path))
        elif name == "shift":
            del self.arguments[: int(arguments[0]) if arguments and arguments[0].isdigit() else 1]
        elif name == "set" and "--" in arguments:
            self.arguments[:] = arguments[arguments.index("--") + 1 :]
        elif name == "unset":
            for one in arguments:
                self.variables.pop(one, None)
        elif name in ("read", "mapfile", "readarray"):
            for one in filter(str.isidentifier, arguments):
                self.assign(one, f"{UNKNOWN}${one}")
        elif name == "let":
            for one in arguments:
                self.number(one, line)
        elif name == "eval":
            return self.block(Parser(" ".join(arguments), line).block())
        elif OTHER_CHIPS.search(command):
            self.notes.append(f"line {line} looks for other chips, and finds none: the recipe is for NVIDIA GPUs")
            return False
        elif name == "nvidia-smi" or (name in FINDERS and arguments[-1:] == ["nvidia-smi"]):
            return True
        return True if name in SUCCEEDING else name != "false" and self.doubt(f"`{command}`")

    def _printed(self, name: str, arguments: list[str]) -> str:
        """Returns the output of a command, as far as it is known."""
        words = [one for one in arguments if one != "--"]
        if any(UNKNOWN in one for one in words) and name != "echo":
            return UNKNOWN
        match name:
            case "echo":
                return " ".join(words[1:] if words[:1] in (["-n"], ["-e"]) else words)
            case "printf" if len(words) == 1 and "%" not in words[0] and "\\" not in words[0]:
                return words[0]
            case "basename" if words:
                last = os.path.basename(words[0].rstrip("/"))
                return last.removesuffix(words[1]) if len(words) > 1 and last != words[1] else last
            case "dirname" if words:
                return os.path.dirname(words[0].rstrip("/")) or ("/" if words[0].startswith("/") else ".")
            case "pwd":
                return str(self.variables.get("PWD", UNKNOWN))
            case "seq" if 0 < len(words) < 4 and all(re.fullmatch(r"-?\d{1,6}", one) for one in words):
                begin, step = int(words[0]) if len(words) > 1 else 1, int(words[1]) if len(words) == 3 else 1
                end = int(words[-1]) + (1 if step > 0 else -1)
                return "\n".join(str(one) for one in (range(begin, end, step) if step else ()))
            case "cd" | "true" | "false" | ":" | "set" | "export" | "unset" | "mkdir" | "shift":
                return ""
        return "" if OTHER_CHIPS.search(" ".join(arguments)) else UNKNOWN

    def output(self, command: str, line: int) -> str:
        written, variables, commands = self.written, self.variables, list(self.commands)
        self.written, self.variables = [], dict(variables)
        with suppress(_LeaveError):
            self.block(Parser(command, line).block())
        text = "\n".join(one for one in self.written if one)
        self.written, self.variables, self.commands[:] = written, variables, commands
        return text

    def _call(self, name: str, arguments: list[str]) -> Status:
        before, self.arguments = self.arguments, arguments
        self.outside.append({})
        try:
            return self.node(self.functions[name])
        except _LeaveError as left:
            if left.how != "return":
                raise
            return None
        finally:
            self.arguments = before
            for variable, value in self.outside.pop().items():
                self.variables.pop(variable, None)
                if value is not None:
                    self.variables[variable] = value

    # --- variables ----------------------------------------------------------------------------------------------------

    def assign(self, name: str, value: Value) -> None:
        if name not in self.fixed:
            self.variables[name] = value

    def _assign(self, one: Assignment) -> str:
        """Assigns a value. Returns its text, "" for an array."""
        before, rest = self.variables.get(one.name), f"{UNKNOWN}${{{one.name}[@]}}"
        items = before if isinstance(before, list) else [Word(before, 0)] if before else []
        if not isinstance(one.value, Word):
            values = [Word(text, word.line) for word in one.value for text in self.values(word)]
            if any(re.match(r"\[[^]]+\]=", word.text) for word in one.value):
                values = [Word(rest, one.value[0].line)]
            self.assign(one.name, [*items, *values] if one.more else values)
            return ""
        text = self.text(one.value)
        if one.index is not None:
            at = self.number(one.index or "0", 0) if isinstance(before, list) else None
            known = at is not None and 0 <= at <= len(items)
            self.assign(one.name, [*items[:at], Word(text, one.value.line), *items[(at or 0) + 1 :]] if known else rest)
        elif one.more and isinstance(before, list):
            self.assign(one.name, [Word(f"{before[0].text if before else ''}{text}", one.value.line), *before[1:]])
        else:
            self.assign(one.name, f"{before if before is not None else ''}{text}" if one.more else text)
        return text


def _merged(name: str, values: Sequence[Value | None], cause: str) -> Value | None:
    """Returns the value that all sides share. Of arrays that begin alike, the beginning, and the rest as unknown."""
    texts = [[word.text for word in value] if isinstance(value, list) else value for value in values]
    if all(text == texts[0] for text in texts):
        return values[0]
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        return UNKNOWN + (cause if cause.startswith("$") else f"${name}")
    rest = Word(f"{UNKNOWN}${{{name}[@]}}", lists[0][-1].line if lists[0] else 0)
    shortest = min(lists, key=len)
    alike = len(lists) == len(values) and all(value[: len(shortest)] == shortest for value in lists)
    return [*shortest, rest] if alike else [rest]


def _negated(status: Status) -> Status:
    return None if status is None else not status


class _Tested:
    """A test, [ ... ], or [[ ... ]], whose words are as they were written (raw): || of && of ! of a comparison."""

    def __init__(self, words: list[Word], script: Script, *, raw: bool) -> None:
        self.words, self.script, self.raw = words, script, raw
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
            return _negated(self._one())
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
        return self._compared(left, sign, self.script.pattern(right) if is_pattern else self._text(right), first.line)

    def _text(self, word: Word) -> str:
        return self.script.text(word) if self.raw else word.text

    def _is(self, sign: str, text: str) -> Status:
        """Evaluates a test of one word. Files are not looked at: they are another machine's."""
        if sign == "-v":
            return True if text in self.script.variables else self.script.doubt(f"${text}")
        if sign not in ("-n", "-z"):
            return self.script.doubt(f"[ {sign} {text} ]")
        if UNKNOWN in text:
            return self.script.doubt(unknown_part(text))
        return bool(text) == (sign == "-n")

    def _compared(self, left: str, sign: str, right: str, line: int) -> Status:
        if UNKNOWN in left + right:
            return self.script.doubt(unknown_part(left + right))
        if sign in COMPARISONS:
            one, other = self.script.number(left or "0", line), self.script.number(right or "0", line)
            if one is None or other is None:
                return self.script.doubt(f"[ {left} {sign} {right} ]") if self.raw else False
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
