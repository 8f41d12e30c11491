"""YAML as recipes use it: YAML 1.2's core schema on PyYAML's safe loader, with the line of every node.

PyYAML follows YAML 1.1, in which `1e-6` is text and `off` is false. Here a number is a number, only true and false are
booleans, and a key given twice is an error. Mapping keys are always text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from megagrpo.errors import Problem, RecipeError

CHARACTERS_MAX, VALUES_MAX = 256 * 1024, 10_000
"""Limits of a recipe's file; usual recipes have about 4,000 and 100. An alias counts at each use."""
NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")
"""NUL and halves of surrogate pairs, which escapes can write: no file can be named so."""
SYNTAX_FIXES = {
    r"'\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "put quotes around a value that contains ': ', and check the indentation",
}
"""The fix for each part of a message of PyYAML's."""
TAG = "tag:yaml.org,2002:"
CORE_SCHEMA = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ("~", "n", "N", "")),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), tuple("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), tuple("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        tuple("-+.0123456789"),
    ),
)
"""Tag, pattern and first characters, from https://yaml.org/spec/1.2.2/#103-core-schema."""


class _Loader(yaml.SafeLoader):
    """The safe loader without YAML 1.1's ways to read scalars; the core schema's are added below."""


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which YAML 1.1 or 1.2 would not read back as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


# Double quotes escape line ends and control characters; in PyYAML's other styles some of them change.
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(TAG + "str", text, style=None if text.isprintable() else '"')
)
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in CORE_SCHEMA:
    _Loader.add_implicit_resolver(TAG + _name, _pattern, list(_first))
    _Dumper.add_implicit_resolver(TAG + _name, _pattern, list(_first))


@dataclass
class Document:
    """A parsed document: plain values, the line (from 1) of every dotted path, and the problems with their paths."""

    where: Callable[[int], str]
    tree: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    values: int = 0
    problems: list[tuple[str, Problem]] = field(default_factory=list)

    def read(self, node: yaml.Node, path: str = "", above: tuple[yaml.Node, ...] = ()) -> Any:
        """Returns the value of a node, None where there is a problem."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.values += 1
        if self.values > VALUES_MAX:
            where = self.where(node.start_mark.line + 1)
            raise RecipeError(Problem(where, f"more than {VALUES_MAX:,} values", "a recipe: it needs about 100"))
        if node in above:
            return self._refuse(node, path, "a value that contains itself", "a finite value")
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, _join(path, index), (*above, node)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            if NO_TEXT.search(node.value):
                return self._refuse_text(node, path)
            try:
                return _scalar(node.tag.removeprefix(TAG), node.value)
            except ValueError:
                given = f"{node.value!r} with the tag {node.tag.replace(TAG, '!!')}"
                needed = "plain YAML: text, a number, true, false, null, a list or a mapping"
                return self._refuse(node, path, given, needed, "remove the tag")
        mapping: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, path, "a list or mapping as a key", "a name")
            elif NO_TEXT.search(key):
                self._refuse_text(key_node, path)
            elif key in mapping:
                given = f"`{key}` a second time (the first is on line {first_lines[key]})"
                self._refuse(key_node, _join(path, key), given, "each key once", "remove one of them")
            else:
                first_lines[key] = key_node.start_mark.line + 1
                self.lines.setdefault(_join(path, key), first_lines[key])
                mapping[key] = self.read(value_node, _join(path, key), (*above, node))
        return mapping

    def _refuse_text(self, node: yaml.Node, path: str) -> None:
        character = ord(NO_TEXT.findall(node.value)[0])
        self._refuse(node, path, f"the character U+{character:04X}", "text that a file's name could have", "remove it")

    def _refuse(self, node: yaml.Node, path: str, given: str, needed: str, fix: str = "") -> Any:
        where = f"{self.where(node.start_mark.line + 1)} {path}".rstrip()
        self.problems.append((path, Problem(where, given, needed, fix)))
        return None


def parse(text: str, where: Callable[[int], str]) -> Document:
    """Reads one YAML document. `where` names a line (from 1) in messages.

    Raises RecipeError if the text is not YAML at all or too large; repeated keys and unknown tags are in
    Document.problems.
    """
    if len(text) > CHARACTERS_MAX:
        needed = f"a recipe, of at most {CHARACTERS_MAX:,}"
        raise RecipeError(Problem(where(1), f"{len(text):,} characters or more", needed))
    document = Document(where)
    try:
        node = _Loader(text).get_single_node()
        if node is not None:
            document.tree = document.read(node)
        return document
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        lines = text.splitlines()
        given = lines[line].strip() if line < len(lines) else "the end of the text"
        since = f" on line {error.context_mark.line + 1}" if error.context_mark else ""
        reason = f"{error.context}{since}, {error.problem}" if error.context else error.problem
        fix = next((fix for part, fix in SYNTAX_FIXES.items() if part in str(error.problem)), "")
        problem = Problem(where(line + 1), given, f"valid YAML: {reason}", fix)
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        problem = Problem(where(line + 1), f"the character U+{error.character:04X}", "printable text")
    except RecursionError:
        problem = Problem(where(1), "lists or mappings nested too deeply", "a recipe")
    raise RecipeError(problem)


def to_text(tree: Any) -> str:
    """Returns the YAML of plain values, keys in their order; `parse` returns the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)


def _join(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


def _scalar(tag: str, text: str) -> Any:
    """Returns the value of a scalar. Raises ValueError if its tag is not in the core schema or misfits its text."""
    if tag in ("str", "null"):
        return text if tag == "str" else None
    if tag == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if tag == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if tag == "float":
        name = text.lower().lstrip("+-")
        if name in (".inf", ".nan"):
            return math.copysign(float(name[1:]), -1 if text[0] == "-" else 1)
        return float(text)
    raise ValueError(tag)
