"""The options of a configuration with their values and places, from command lines and YAML files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megagrpo.errors import Problem, RecipeError
from megagrpo.importing.shell import Script, read_script
from megagrpo.importing.shell_words import UNKNOWN, Word, unknown_part
from megagrpo.recipe.yaml12 import parse

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
ELSEWHERE = re.compile(UNKNOWN + r"\$\{\w+\[[@*]\]\}")
"""Arguments in an array that another file sets, or a branch that cannot be chosen here."""
REFERENCES_MAX = 20
"""Most references to references that are followed."""
OFF = (None, False, 0, -1, "", "null", "none", "None", "disabled")
"""Values that turn a feature off."""
PLAIN_NAMES = ("train", "test", "val", "valid", "validation", "eval", "dev", "data")


@dataclass(frozen=True)
class Given:
    """One option as it was written. line: from 1; of the last value, if it was given several times."""

    name: str
    value: Any
    line: int


def unknown_in(value: Any) -> str:
    """Returns the part of a value that only a shell, or another file, could tell; empty if the value is known."""
    if isinstance(value, str):
        return unknown_part(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(unknown_in, parts)), "")


def read_text(path: Path) -> str:
    """Reads a text file. Raises RecipeError if there is no such file, or it is no text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise RecipeError(Problem(str(path), "bytes that are no UTF-8 text", "a script or a YAML file")) from None
    except OSError as error:
        given = (error.strerror or str(error)).lower()
        raise RecipeError(Problem(str(path), given, "a script or a YAML file that can be read")) from None


# --- command lines ----------------------------------------------------------------------------------------------------


def command_line(
    path: Path, program: str, set_to: Mapping[str, str], environment: Mapping[str, str], what: str
) -> tuple[list[Word], list[str]]:
    """Returns the arguments of a script's last command that runs the program, and notes. program: the pattern of its
    name; what: the command, for errors. Raises RecipeError if there is none."""
    text, place = read_text(path), str(path.absolute())
    known = {**environment, "BASH_SOURCE": place, "0": place}
    script = read_script(text, known, set_to)
    is_program = re.compile(program, re.DOTALL).fullmatch
    runs, notes = list(_arguments(script, is_program, set_to)), list[str]()
    if not runs and script.ended:
        notes.append(f"the script ends on line {script.ended}, before it runs it: it is read as if it did not end")
        script = read_script(text, known, set_to, exits=False)
        runs = list(_arguments(script, is_program, set_to))
    if not runs:
        given = f"{len(script.commands)} commands, none of which runs it"
        raise RecipeError(Problem(str(path), given, f"a command such as `{what}`"))
    if len(runs) > 1:
        notes.append(f"the script runs it {len(runs)} times: this is the last, on line {runs[-1][0]}")
    if cause := script.doubtful.get(runs[-1][0]):
        notes.append(f"whether line {runs[-1][0]} is run depends on {cause}, which is not known here")
    return runs[-1][1], [*notes, *dict.fromkeys(script.notes)]


def _arguments(
    script: Script, is_program: Callable[[str], object], set_to: Mapping[str, str]
) -> Iterator[tuple[int, list[Word]]]:
    for command in script.commands:
        at = next((i for i, word in enumerate(command) if is_program(word.text)), None)
        if at is not None:
            yield command[at].line, command[at + 1 :]
            continue
        for word in command:  # bash -c "python ..."
            if " " in word.text and any(is_program(part) for part in word.text.split()):
                texts = {name: value for name, value in script.variables.items() if isinstance(value, str)}
                inner = read_script(word.text, texts, set_to, line=word.line)
                yield from _arguments(inner, is_program, set_to)
                script.notes += inner.notes


def hydra_overrides(words: Sequence[Word]) -> dict[str, Given]:
    """Reads `key=value`, `+key=value`, `++key=value`, `~key` and `--config-name=...` as options."""
    given: dict[str, Given] = {}
    for word in words:
        name, equals, text = word.text.strip().partition("=")
        bare = name.lstrip("+")
        if not bare:
            continue
        value = value_of(text) if equals else None
        given[bare] = Given(bare, value, word.line)
    return given


def flags(words: Sequence[Word]) -> dict[str, Given]:
    """Reads `--name value ...`, `--name=value` and `--name` (true) as options, named with underscores. `--no_name` is
    another option. Each word before all flags is an option of its own."""
    given: dict[str, Given] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word.text):
            flag, equals, text = word.text[2:].partition("=")
            name = flag.replace("-", "_")
            given[name] = Given(name, value_of(text) if equals else True, word.line)
        elif not word.text.strip():
            continue
        elif not name or ELSEWHERE.fullmatch(word.text):
            given[word.text] = Given(word.text, None if name else word.text, word.line)
        else:
            before, value = given[name].value, value_of(word.text)
            several = before if isinstance(before, list) else [before]
            given[name] = Given(name, value if before is True else [*several, value], given[name].line)
    return given


def value_of(text: str) -> Any:
    """Returns the value that YAML 1.2, and so Hydra, gives a text: a number, true, false, null, a list or a mapping;
    else the text."""
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"\d+(_\d+)+", text):
        return int(text)
    if UNKNOWN in text and not text.startswith("["):
        return text
    try:
        value = parse(text, str).tree
    except RecipeError:
        return text
    is_text = isinstance(value, str) or (value is None and text.lower() not in ("null", "~"))
    return text if is_text and (value is None or "#" in text) else value


# --- YAML -------------------------------------------------------------------------------------------------------------


def yaml_options(path: Path) -> dict[str, Given]:
    """Reads the values of a YAML file by their dotted paths; `${...}` that refer to the same file are resolved.

    Raises RecipeError if it is no YAML, or no mapping.
    """
    document = parse(read_text(path), lambda line: f"{path}:{line}")
    if document.problems:
        raise RecipeError([problem for _, problem in document.problems])
    if not isinstance(document.tree, dict):
        raise RecipeError(Problem(str(path), "no mapping", "a YAML file of options"))
    tree = document.tree
    return {
        name: Given(name, _resolved(value, name, tree), document.lines.get(name, 1))
        for name, value in _leaves(tree, "")
    }


def _leaves(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _resolved(value: Any, name: str, tree: Mapping[str, Any], depth: int = 0) -> Any:
    if isinstance(value, list):
        return [_resolved(item, name, tree, depth) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item, f"{name}.{key}", tree, depth) for key, item in value.items()}
    if not isinstance(value, str) or "${" not in value or depth > REFERENCES_MAX:
        return value
    if whole := REFERENCE.fullmatch(value):
        return _referred(whole[1], name, tree, depth)

    inner = REFERENCE.sub(lambda reference: str(_referred(reference[1], name, tree, depth)), value)
    return _resolved(inner, name, tree, depth + 1)


def _referred(expression: str, name: str, tree: Mapping[str, Any], depth: int) -> Any:
    """Resolves `a.b`, `.b` beside this option (`..b` one above), `oc.select:a.b,default`, and the default of
    `oc.env:NAME,default`. Any other expression stays, marked as unknown."""
    resolver, _, rest = expression.rpartition(":")
    path, comma, default = (rest if resolver else expression).partition(",")
    path = path.strip()
    if resolver.strip() == "oc.env" and comma:
        return value_of(default.strip())
    if resolver.strip() not in ("", "oc.select"):
        return f"{UNKNOWN}${{{expression}}}"
    up = len(path) - len(path.lstrip("."))
    above = name.split(".")[:-up] if up else []
    keys = [*above, *path.lstrip(".").split(".")]
    value: Any = tree
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return value_of(default.strip().strip("\"'")) if comma else f"{UNKNOWN}${{{expression}}}"
        value = value[key]
    return _resolved(value, ".".join(keys), tree, depth + 1)


# --- values -----------------------------------------------------------------------------------------------------------


class NotKnownError(Exception):
    """A value that cannot be understood: it depends on another machine or file, or has another type."""


def whole(value: Any) -> int:
    if type(value) is not int and not (type(value) is float and value.is_integer()):
        raise NotKnownError(f"{value!r} is no whole number")
    return int(value)


def number(value: Any) -> float:
    """Returns a number. An integer stays one, so that recipes are read as written. Raises NotKnownError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotKnownError(f"{value!r} is no number")
    return value


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no"):
        return value.lower() in ("true", "1", "yes")
    if value in (None, 0, 1):
        return bool(value)
    raise NotKnownError(f"{value!r} is neither true nor false")


def text(value: Any) -> str:
    if isinstance(value, list | dict | bool) or value is None:
        raise NotKnownError(f"{value!r} is no text")
    return str(value)


def texts(value: Any) -> list[str]:
    return [text(item) for item in (value if isinstance(value, list) else [value])]


def run_name(value: Any) -> str:
    """Returns a name that a run may have: other characters become underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text(value)).strip("._-")[:100] or "imported"


def picked(choices: Mapping[Any, Any], value: Any) -> Any:
    """Returns the choice for a value; None if the value is none of the choices, or a list or mapping."""
    return None if isinstance(value, list | dict) else choices.get(value)


def among(value: Any, values: Collection[Any]) -> bool:
    """Returns whether a value is among others. True is not 1, and False is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def set_name(path: str) -> str:
    """Returns a name for an evaluation set, from its file: gsm8k for gsm8k/test.parquet, aime for aime.jsonl."""
    file = PurePosixPath(path)
    stem = file.name.split(".")[0]
    named = file.parent.name if stem.lower() in PLAIN_NAMES and file.parent.name else stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", named).strip("_-") or "held_out"


TYPES: Mapping[str, Callable[[Any], Any]] = {
    "any": lambda value: value,
    "whole": whole,
    "number": number,
    "truth": truth,
    "text": text,
    "texts": texts,
    "name": run_name,
    "items": lambda value: value if isinstance(value, list) else [value],
    "fraction": lambda value: float(number(value)),
    "from_0": lambda value: max(0, whole(0 if value is None else value)),
    "up_to_1": lambda value: min(number(value), 1),
    "minutes": lambda value: 60.0 * number(value),
    "mebibytes": lambda value: whole(value) * 2**20,
}
"""The value that a field gets from an option of each type: seconds from minutes, bytes from mebibytes."""


class Options:
    """The options of a configuration over a framework's defaults, by name."""

    def __init__(self, given: Mapping[str, Given], defaults: Mapping[str, Any]) -> None:
        self.given, self.defaults = given, defaults
        self.read: set[str] = set()
        """Names that were looked up."""

    def __iter__(self) -> Iterator[str]:
        return iter({**self.defaults, **self.given})

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def __getitem__(self, name: str) -> Any:
        """Returns the option's value or default, else None. Raises NotKnownError if its value is not known."""
        self.read.add(name)
        value = self.given[name].value if name in self.given else self.defaults.get(name)
        if unknown := unknown_in(value):
            raise NotKnownError(
                f"the value needs {unknown}, which is not known here: give one of both by --set NAME=VALUE"
            )
        if value == "???":
            raise NotKnownError("it has no value (???)")
        return value

    def whole(self, name: str) -> int:
        return whole(self[name])

    def number(self, name: str) -> float:
        return number(self[name])

    def true(self, name: str) -> bool:
        return truth(self[name])
