"""The translation of a configuration to the fields of a recipe, with an outcome for every option that it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pydantic

from megagrpo.importing.options import Given, NotKnownError, Options, run_name
from megagrpo.importing.rows import ABSENT, Answer, Kind, Missing, Row, Table, Together, Unknown, Write, read_table
from megagrpo.importing.shell_words import UNKNOWN, Word
from megagrpo.recipe.schema import Recipe, SglangConfig, VllmConfig
from megagrpo.section import tree_of

SERVERS: Mapping[str, SglangConfig | VllmConfig] = {"sglang": SglangConfig(), "vllm": VllmConfig()}
"""Sections of `rollout` that take any argument of a server, without arguments."""


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
    program: str  # pattern of the word in a script that names the program
    command: str  # the beginning of a command that runs it, for errors
    words: Callable[[Sequence[Word]], dict[str, Given]]  # returns the options of the program's arguments
    module: ModuleType
    """Functions that rows and conditions name, and `rest`: fields that no single option gives, from all options and the
    fields so far, each with its reason."""
    files: Mapping[str, Callable[[Path], dict[str, Given]]] = field(default_factory=dict)
    """Readers of files that are no scripts, by suffix; "": of any other."""
    negates: bool = False  # `--no_NAME` switches NAME off

    @cached_property
    def table(self) -> Table:
        """Reads the rows, when they are first needed."""
        return read_table(Path(__file__).with_name(f"{self.name}.yaml"), vars(self.module))

    def row(self, option: str) -> Row | None:
        return self.table.get(self.pattern(option))

    def pattern(self, option: str) -> str:
        """Returns the key of the option's row in the table: its name or a pattern; "" if it has none."""
        ends = [at + 1 for at, character in enumerate(option) if character in "._"]
        patterns = [f"{option[:end]}*" for end in reversed(ends)] + [f"*.{option.rpartition('.')[2]}"]
        return next((one for one in (option, *patterns) if one in self.table), "")


@dataclass(frozen=True)
class Translation:
    """A recipe's fields in the order of its schema, and the outcome of every option."""

    framework: Framework
    path: Path  # the file that the options are from
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
    readers: dict[str, set[str]] = field(default_factory=dict)  # options that decided about each field
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


def translate(framework: Framework, path: Path, given: Mapping[str, Given], notes: Sequence[str] = ()) -> Translation:
    """Translates the options of a file. notes: for a reader of the recipe, about how the file was read."""
    written, answers = _Written(), dict[str, Answer]()
    defaults = {option: row.default for option, row in framework.table.items() if row.default is not ABSENT}
    options = Options(given, defaults)
    for option in sorted(options, key=lambda one: one not in given):  # given options decide before defaults
        options.read = set()
        answered = answer_of(framework, options, option)
        if option in given:
            answers[option] = answered
        elif not isinstance(answered, Write):
            continue
        if isinstance(answered, Write):
            source = answered.source or (option if option in given else f"{framework.title}'s default of {option}")
            for field_, value in answered.fields.items():
                written.readers.setdefault(field_, set()).update(options.read)
                if (others := written.put(field_, value, source)) and option in given:
                    answers[option] = Missing(f"{others} gives {field_} another value, which counts")
            if answered.note and option in given:
                written.notes.append(f"{option}: {answered.note}")
    try:
        rest = framework.module.rest(options, written.values)
    except (NotKnownError, ZeroDivisionError) as error:
        rest = {}
        written.notes.append(f"what depends on several options is left out: {error}")
    for field_, (value, why) in rest.items():
        if field_ not in written.values:
            written.put(field_, value, why)
            written.readers[field_] = {option for option in given if option in why.split()}
    if "name" not in written.values:
        written.put("name", run_name(path.stem), "the file's name")
    kept = _without_defaults(written.values)
    for option, answer in answers.items():
        if isinstance(answer, Together):
            paths = [field_ for field_ in kept if option in written.readers.get(field_, ())]
            answers[option] = Write(dict.fromkeys(paths))
            for field_ in paths:
                if not any(option in source.split() for source in written.sources[field_]):
                    written.sources[field_].append(option)
    outcomes = [_outcome(given[option], answers[option], kept) for option in given]
    fields = [Field(field_, value, ", ".join(written.sources[field_])) for field_, value in _in_order(kept)]
    return Translation(framework, path, fields, outcomes, [*notes, *written.notes])


def answer_of(framework: Framework, options: Options, option: str) -> Answer:
    row = framework.row(option)
    if row is None:
        elsewhere = "another file sets it: add its other settings; the model's shape is in config.json"
        return Unknown(elsewhere if UNKNOWN in option else f"no such option of {framework.title} is known here")
    try:
        answer = row.of(options[option], options)
    except NotKnownError as error:
        return Unknown(str(error))
    except ZeroDivisionError:
        return Missing("an option that it is divided by is 0")
    if not isinstance(answer, Write) or not any("*" in path for path in answer.fields):
        return answer
    rest = option.removeprefix(framework.pattern(option).rstrip("*"))
    fields = {path.replace("*", rest): value for path, value in answer.fields.items()}
    owners = [owner for path in fields if (owner := owner_of(path))]
    return Missing(owners[0]) if owners else replace(answer, fields=fields)


def owner_of(path: str) -> str:
    """Returns what decides an argument of servers in the recipe's place; "" if the recipe may give it."""
    rollout, section, name, *_ = [*path.split("."), "", ""]
    settings = SERVERS.get(section) if rollout == "rollout" else None
    owner = settings.engine_kind.arguments.owned.get(name, "") if settings else ""
    return owner.removeprefix("nothing: ") if owner.startswith("nothing") else owner and f"{owner} decides it"


def _outcome(given: Given, answer: Answer, kept: Mapping[str, Any]) -> Outcome:
    if not isinstance(answer, Write | Together):
        return Outcome(given.name, given.value, given.line, answer.kind, answer.why)
    paths = list(answer.fields) if isinstance(answer, Write) else []
    if stays := [path for path in paths if path in kept]:
        return Outcome(given.name, given.value, given.line, "translated", ", ".join(stays))
    why = f"{', '.join(paths)} is so by default" if paths else "it changes nothing here"
    return Outcome(given.name, given.value, given.line, "same", why)


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
