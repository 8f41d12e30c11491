"""The translation of a configuration to the fields of a recipe, with an outcome for every option that it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import pydantic

from megagrpo.importing.options import Configuration, Given
from megagrpo.importing.rows import ABSENT, Missing, NotKnownError, Options, Row, Table, Together, Write, read_table
from megagrpo.importing.shell_syntax import Word
from megagrpo.importing.shell_words import UNKNOWN
from megagrpo.recipe.schema import Recipe
from megagrpo.section import tree_of

Kind = Literal["translated", "same", "missing", "unknown"]
"""same: nothing to write, because it is so here by default, or has no effect. missing: no counterpart."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one option that was given."""

    option: str
    value: Any
    line: int
    kind: Kind
    why: str = ""


@dataclass(frozen=True)
class Field:
    """One field of the recipe, by its dotted path. source: the origin of its value."""

    path: str
    value: Any
    source: str


@dataclass(frozen=True)
class Framework:
    """One framework: how its files are read, and its options, from the rows of NAME.yaml."""

    name: str
    title: str
    program: str
    """Pattern of the word in a script that names the program."""
    command: str
    """The beginning of a command that runs it, for errors."""
    words: Callable[[Sequence[Word]], dict[str, Given]]
    """Returns the options of the program's arguments."""
    module: ModuleType
    """Functions that rows and conditions name, and `rest`: fields that no single option gives, from all options and the
    fields so far, each with its reason."""
    files: Mapping[str, Callable[[Path], dict[str, Given]]] = field(default_factory=dict)
    """Readers of files that are no scripts, by suffix; "": of any other."""
    negates: bool = False
    """True if `--no_NAME` switches NAME off."""

    @cached_property
    def table(self) -> Table:
        """Reads the rows, when they are first needed."""
        return read_table(Path(__file__).with_name(f"{self.name}.yaml"), vars(self.module))

    def row(self, option: str) -> Row | None:
        if option in self.table:
            return self.table[option]
        ends = [at + 1 for at, character in enumerate(option) if character in "._"]
        patterns = [f"{option[:end]}*" for end in reversed(ends)] + [f"*.{option.rpartition('.')[2]}"]
        return next((self.table[pattern] for pattern in patterns if pattern in self.table), None)


@dataclass(frozen=True)
class Translation:
    """A recipe's fields in the order of its schema, and the outcome of every option."""

    framework: Framework
    configuration: Configuration
    fields: Sequence[Field]
    outcomes: Sequence[Outcome]
    notes: Sequence[str] = ()

    def of_kind(self, *kinds: Kind) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind in kinds]


@dataclass
class _Written:
    """Fields as rows write them: the first to write a field decides; lists are joined."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    readers: dict[str, set[str]] = field(default_factory=dict)
    """Options that decided about each field."""
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str) -> str:
        """Writes the value and returns "", unless the field has another value: then returns that value's sources."""
        before = self.values.get(path)
        if path not in self.values:
            self.values[path] = value
        elif isinstance(before, list) and isinstance(value, list):
            self.values[path] = before + [item for item in value if item not in before]
        elif before != value:
            return ", ".join(self.sources[path])
        self.sources.setdefault(path, []).append(source)
        return ""


def translate(framework: Framework, configuration: Configuration, name: str) -> Translation:
    """Translates a configuration. name: the recipe's, if the configuration gives none."""
    given, written, answers = configuration.given, _Written(), dict[str, Write | Together | Outcome]()
    defaults = {option: row.default for option, row in framework.table.items() if row.default is not ABSENT}
    options = Options(given, defaults)
    for option in sorted(options, key=lambda one: one not in given):  # what is given decides before defaults
        options.read = set()
        answered = _answer(framework, options, option)
        if option in given:
            answers[option] = answered
        elif not isinstance(answered, Write):
            continue
        if isinstance(answered, Write):
            source = answered.source or (option if option in given else f"{framework.title}'s default of {option}")
            for path, value in answered.fields.items():
                written.readers.setdefault(path, set()).update(options.read)
                if (others := written.put(path, value, source)) and option in given:
                    why = f"{others} gives {path} another value, which counts"
                    answers[option] = Outcome(option, given[option].value, given[option].line, "missing", why)
            if answered.note and option in given:
                written.notes.append(f"{option}: {answered.note}")
    try:
        rest = framework.module.rest(options, written.values)
    except (NotKnownError, ZeroDivisionError) as error:
        rest = {}
        written.notes.append(f"what depends on several options is left out: {error}")
    for path, (value, why) in rest.items():
        if path not in written.values:
            written.put(path, value, why)
            written.readers[path] = {option for option in given if option in why.split()}
    if "name" not in written.values:
        written.put("name", name, "the file's name")
    kept = _without_defaults(written.values)
    for option, answer in answers.items():
        if isinstance(answer, Together):
            paths = [path for path in kept if option in written.readers.get(path, ())]
            answers[option] = Write(dict.fromkeys(paths))
            for path in paths:
                if not any(option in source.split() for source in written.sources[path]):
                    written.sources[path].append(option)
    outcomes = [_outcome(given[option].line, option, given[option].value, answers[option], kept) for option in given]
    fields = [Field(path, value, ", ".join(written.sources[path])) for path, value in _in_order(kept)]
    return Translation(framework, configuration, fields, outcomes, [*configuration.notes, *written.notes])


def _answer(framework: Framework, options: Options, option: str) -> Write | Together | Outcome:
    row = framework.row(option)
    found = options.given.get(option)
    line, value = (found.line, found.value) if found else (0, None)

    def outcome(kind: Kind, why: str) -> Outcome:
        return Outcome(option, value, line, kind, why)

    if row is None:
        elsewhere = "another file sets it: add what it has besides the model's shape, which config.json says"
        unlisted = f"no such option of {framework.title} is known here"
        return outcome("unknown", elsewhere if UNKNOWN in option else unlisted)
    try:
        answer = row.of(options[option], options)
    except NotKnownError as error:
        return outcome("unknown", str(error))
    except ZeroDivisionError:
        return outcome("missing", "an option that it is divided by is 0")
    if isinstance(answer, Write):
        last = option.rpartition(".")[2]
        fields = {path.replace("*", last): value for path, value in answer.fields.items()}
        return Write(fields, answer.note, answer.source)
    if isinstance(answer, Together):
        return answer
    return outcome("missing" if isinstance(answer, Missing) else "same", answer.why)


def _outcome(
    line: int, option: str, value: Any, answer: Write | Together | Outcome, kept: Mapping[str, Any]
) -> Outcome:
    if isinstance(answer, Outcome):
        return answer
    paths = list(answer.fields) if isinstance(answer, Write) else []
    if stays := [path for path in paths if path in kept]:
        return Outcome(option, value, line, "translated", ", ".join(stays))
    why = f"{', '.join(paths)} is so by default" if paths else "it changes nothing here"
    return Outcome(option, value, line, "same", why)


def _without_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drops fields without which the same recipe would be read. Keeps all if they are no valid recipe yet."""
    whole = _recipe(fields)
    kept = dict(fields)
    if whole is None:
        return kept
    for path in fields:
        fewer = {at: value for at, value in kept.items() if at != path}
        if _recipe(fewer) == whole:
            kept = fewer
    return kept


def _recipe(fields: Mapping[str, Any]) -> Recipe | None:
    try:
        return Recipe.model_validate(tree_of(fields))
    except pydantic.ValidationError:
        return None


def _in_order(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Sorts by the schema's order of sections, and of the fields in each."""

    def place(path: str) -> list[int]:
        places, model = list[int](), cast(Any, Recipe)
        for key in path.split("."):
            fields = getattr(model, "model_fields", {})
            places.append(list(fields).index(key) if key in fields else len(fields))
            model = fields[key].annotation if key in fields else None
        return places

    return sorted(fields.items(), key=lambda item: place(item[0]))
