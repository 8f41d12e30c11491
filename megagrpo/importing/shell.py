"""The commands that a shell script would run, found without running anything: it is followed through its branches,
loops and functions, with its variables, arrays and arithmetic.

Values that only a shell could tell are UNKNOWN: variables that are not set here, and the output of most commands.
If a branch depends on one, all of its sides are followed, and variables that they leave with different values are
not known either. Programs that look for chips find NVIDIA's.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tree_sitter import Node

from megagrpo.importing.shell_syntax import (
    Tested,
    inside,
    moves_output,
    negated,
    operands,
    parsed,
    parts,
    source_of,
    words,
)
from megagrpo.importing.shell_words import UNKNOWN, Shell, Status, Value, Word, matches, unknown_part

COMMANDS_MAX = 20_000
"""Most commands that are followed: a loop may have no end."""
CALLS_MAX = 20
OTHER_CHIPS = re.compile(r"\b(torch_npu|npu-smi|rocm-smi|rocminfo|amd-smi|xpu-smi|hl-smi|torch_xla)\b")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]\n]*)\])?(\+?)=")
FINDERS = ("command", "which", "type", "hash")
SUCCEEDING = (":", "true", "cd", "echo", "export", "mkdir", "printf", "popd", "pushd", "set", "shopt", "source", ".")


def read_script(
    text: str, variables: Mapping[str, str], fixed: Mapping[str, str], *, exits: bool = True, line: int = 1
) -> Script:
    """Reads the commands of a script. variables: set before it begins, such as HOME; fixed: variables that
    the script cannot change; exits: whether it ends at an `exit`; line: of its first line."""
    script = Script(variables, fixed, exits)
    try:
        script.follow(text, line)
    except _LeaveError:
        pass
    except RecursionError:
        script.notes.append("the script is too deep in itself to be followed to its end")
    return script


class _LeaveError(Exception):
    """The end of a followed part: the script (exit), a function (return), a loop (break) or a turn of it (continue)."""

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
        self.functions: dict[str, Sequence[Node]] = {}
        self.written: list[str] | None = None
        """Output of commands; None if it is not kept."""
        self.doubts: list[str] = []
        """Causes of the branches around this command."""
        self.outside: list[dict[str, Value | None]] = []
        """For each function that runs, values outside of it of the variables that are its own; None: not set."""

    def follow(self, text: str, line: int) -> Status:
        """Follows the commands of a text. line: of its beginning."""
        root, notes = parsed(text, line)
        self.notes += notes
        return self.node(root)

    def block(self, nodes: Sequence[Node]) -> Status:
        status: Status = True
        for node in nodes:
            if node.is_named:
                self.count += 1
                status = self.node(node)
        return status

    def node(self, node: Node, redirects: Sequence[Node] = ()) -> Status:
        """Follows a command. redirects: of its input and output."""
        if self.count > COMMANDS_MAX:
            self.notes.append(f"the script is followed for {COMMANDS_MAX} commands only")
            raise _LeaveError("exit")
        inner, fields = parts(node), node.children_by_field_name
        match node.type:
            case "redirected_statement":
                return self.node(fields("body")[0], fields("redirect")) if fields("body") else True
            case "variable_assignment":
                return self._simple(node, [node], redirects)
            case "command" | "variable_assignments" | "declaration_command" | "unset_command":
                return self._simple(node, inner, redirects)
            case "compound_statement" | "test_command" if inner[0].type == "((":
                return self._counts(inside(node, "((", "))"))
            case "test_command" if inner[0].type == "[":
                return self._simple(node, operands(node), redirects)
            case "test_command":
                return Tested([word for word, _ in words(operands(node)[1:-1], node)], self, raw=True).status()
            case "negated_command":
                return negated(self.node(inner[-1], redirects))
            case "list":
                right, is_and = inner[-1], inner[1].type == "&&"
                sides: Sequence[Callable[[], Status]] = (lambda: self.node(right, redirects), lambda: not is_and)
                return self._chosen(self.node(inner[0]), *(sides if is_and else reversed(sides)))
            case "pipeline":
                status = self._piped([one for one in inner if one.is_named])
                return negated(status) if inner[0].type == "negated_command" else status
            case "if_statement":
                return self._if([node, *(one for one in inner if one.type in ("elif_clause", "else_clause"))])
            case "while_statement":
                return self._while(lambda: self.block(fields("condition")), fields("body"), inner[0].type == "until")
            case "c_style_for_statement":
                first, test, step = [*inside(node, "((", "))").split(";"), "", ""][:3]
                self.number(first, 0)
                return self._while(lambda: self._counts(test or "1"), fields("body"), step=step)
            case "for_statement":
                return self._for(node)
            case "case_statement":
                falls = any(one.child_by_field_name("fallthrough") for one in inner)
                subject = Word("".join(map(source_of, fields("value"))), node.start_point.row + 1)
                return self._case(subject, [one for one in inner if one.type == "case_item"], falls)
            case "function_definition":
                self.functions["".join(map(source_of, fields("name")))] = fields("body")
                return True
            case "subshell":
                return self._apart(inner)
        return self.block(inner)

    # --- branches -----------------------------------------------------------------------------------------------------

    def _counts(self, expression: str) -> Status:
        """Evaluates ((...)): it succeeds unless it is 0."""
        number = self.number(expression, 0)
        return self.doubt(f"(({expression.strip()}))") if number is None else number != 0

    def _chosen(self, status: Status, yes: Callable[[], Status], no: Callable[[], Status]) -> Status:
        if status is None:
            return self._either(yes, no)
        return yes() if status else no()

    def _if(self, clauses: Sequence[Node]) -> Status:
        """Follows the first of the clauses, if, elif and else, that holds."""
        if not clauses:
            return True
        inner = parts(clauses[0])
        if clauses[0].type == "else_clause":
            return self.block(inner)
        then = next((at for at, part in enumerate(inner) if part.type == "then"), len(inner))
        body = [part for part in inner[then:] if part not in clauses]
        return self._chosen(self.block(inner[:then]), lambda: self.block(body), lambda: self._if(clauses[1:]))

    def _case(self, subject: Word, items: Sequence[Node], falls: bool) -> Status:
        """Follows the first branch that fits. An unknown subject may fit all branches. A case that falls through
        is read as if its subject were unknown."""
        text = self.text(subject)
        for at, item in enumerate(items, start=1):
            patterns = item.children_by_field_name("value")
            texts = [self.pattern(pattern) for pattern, _ in words(patterns, item)]
            body = [part for part in parts(item) if part not in patterns]
            if "*" in texts and not falls:
                return self.block(body)
            if falls or UNKNOWN in text + "".join(texts):
                self.doubt(unknown_part(text + "".join(texts)) or f"case {subject.text}")
                others = items[at:]
                return self._either(lambda: self.block(body), lambda: self._case(subject, others, falls))  # noqa: B023
            if any(matches(pattern, text) for pattern in texts):
                return self.block(body)
        return True

    def _while(self, test: Callable[[], Status], body: Sequence[Node], until: bool = False, step: str = "") -> Status:
        """Follows a loop as long as the test succeeds, or until it does. step: arithmetic between two turns."""
        while True:
            status = test()
            if status is None:
                return self._either(lambda: self._turn(body) and None, lambda: None)
            if status == until or not self._turn(body):
                return True
            self.number(step, 0)

    def _for(self, node: Node) -> Status:
        name = "".join(map(source_of, node.children_by_field_name("variable")))
        body = node.children_by_field_name("body")
        listed = [text for word, _ in words(node.children_by_field_name("value"), node) for text in self.values(word)]
        for text in listed if any(one.type == "in" for one in node.children) else list(self.arguments):
            self.assign(name, text)
            if UNKNOWN in text and " " not in text:
                self.doubt(unknown_part(text))
                return self._either(lambda: self._turn(body) and None, lambda: None)
            if not self._turn(body):
                break
        return True

    def _turn(self, body: Sequence[Node]) -> bool:
        """Follows one turn of a loop. Returns False if the loop ends with it."""
        try:
            self.block(body)
        except _LeaveError as left:
            if left.how not in ("break", "continue"):
                raise
            if left.levels > 1:
                raise _LeaveError(left.how, left.levels - 1) from None
            return left.how == "continue"
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

    def _apart(self, body: Sequence[Node]) -> Status:
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

    def _piped(self, commands: Sequence[Node]) -> Status:
        before, self.written = self.written, None if self.written is None else []
        status: Status = None
        for command in commands:
            status = self._apart([command])
        self.written = before
        if before is not None:
            before.append(UNKNOWN)
        return self.doubt("a pipe") if status is None else status

    # --- commands -----------------------------------------------------------------------------------------------------

    def _simple(self, node: Node, inner: Sequence[Node], redirects: Sequence[Node]) -> Status:
        assignments, raw = list[tuple[re.Match[str], Word, Node]](), list[Word]()
        for word, part in words(inner, node):
            may_assign = not raw or raw[0].text in DECLARING
            if may_assign and (sign := ASSIGNMENT.match(word.text)):
                assignments.append((sign, word, part))
            elif not part.type.endswith("_redirect"):
                raw.append(word)
        for redirect in redirects:
            more = redirect.children_by_field_name("destination")[1:] + redirect.children_by_field_name("argument")
            raw += [word for word, _ in words(more, redirect)]
        if raw and raw[0].text == "time":
            del raw[0]
        given = [Word(text, word.line) for word in raw for text in self.values(word)]
        name = given[0].text if given else ""
        if name in ("declare", "local", "typeset") and self.outside:
            for sign, *_ in assignments:
                self.outside[-1].setdefault(sign[1], self.variables.get(sign[1]))
        if name in DECLARING or not given:
            unknown = [text for one in assignments if (text := unknown_part(self._assign(*one)))]
            if not given and unknown and unknown[0].startswith(("$(", "`")):
                return self.doubt(unknown[0])
            return True
        arguments = [word.text for word in given[1:]]
        if name in self.functions and len(self.outside) < CALLS_MAX:
            return self._call(name, arguments)
        if name in ("exit", "return", "break", "continue"):
            return self._leave(name, given)
        if name in ("[", "test"):
            tested = given[1:-1] if name == "[" else given[1:]
            return Tested([Word(word.text, given[0].line) for word in tested], self, raw=False).status()
        self.commands.append(given)
        if self.doubts:
            self.doubtful[given[0].line] = self.doubts[-1]
        if self.written is not None and not any(map(moves_output, redirects)):
            self.written.append(self._printed(name, arguments))
        return self._builtin(name, arguments, given[0].line)

    def _leave(self, how: str, given: Sequence[Word]) -> Status:
        if how == "exit":
            if not self.exits:
                return True
            if not self.doubts and not self.outside:
                self.ended = given[0].line
        levels = given[1].text if len(given) > 1 and how in ("break", "continue") else "1"
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
            return self.follow(" ".join(arguments), line)
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
            self.follow(command, line)
        text = "\n".join(one for one in self.written if one)
        self.written, self.variables, self.commands[:] = written, variables, commands
        return text

    def _call(self, name: str, arguments: list[str]) -> Status:
        before, self.arguments = self.arguments, arguments
        self.outside.append({})
        try:
            return self.block(self.functions[name])
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

    def _assign(self, sign: re.Match[str], word: Word, node: Node) -> str:
        """Assigns NAME=value, NAME[index]=value or NAME=(values), or adds with +=. Returns the value's text, "" for an
        array. node: of the word."""
        name, index, more = sign.groups()
        before, rest = self.variables.get(name), f"{UNKNOWN}${{{name}[@]}}"
        items = before if isinstance(before, list) else [Word(before, 0)] if before else []
        array = node.children[-1] if node.children else node
        if array.type == "array":
            listed = [one for one, _ in words(parts(array)[1:-1], array)]
            values = [Word(text, one.line) for one in listed for text in self.values(one)]
            if any(re.match(r"\[[^]]+\]=", one.text) for one in listed):
                values = [Word(rest, listed[0].line)]
            self.assign(name, [*items, *values] if more else values)
            return ""
        text = self.text(Word(word.text[sign.end() :], word.line))
        if index is not None:
            at = self.number(index or "0", 0) if isinstance(before, list) else None
            known = at is not None and 0 <= at <= len(items)
            self.assign(name, [*items[:at], Word(text, word.line), *items[(at or 0) + 1 :]] if known else rest)
        elif more and isinstance(before, list):
            self.assign(name, [Word(f"{before[0].text if before else ''}{text}", word.line), *before[1:]])
        else:
            self.assign(name, f"{before if before is not None else ''}{text}" if more else text)
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
