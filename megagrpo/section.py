"""The base of every section of a recipe: strict fields, rules between them, methods chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from megagrpo.errors import Problem

# Every number has an upper bound: beyond it a run would hang or fill the memory, not be large.
PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e9)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=65_536)]
"""Ranks along one axis of a layout, devices, engines, requests at once."""
Tokens = Annotated[int, Field(ge=1, le=2**24)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e7)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-3, 1e3
Temperature = Annotated[float, Field(ge=TEMPERATURE_MIN, le=TEMPERATURE_MAX)]

FORMATTER = Formatter()
FILE_AND_FUNCTION = r"^.+\.py:[A-Za-z_]\w*$"
"""A user's own method, as FILE.py:FUNCTION."""


def tree_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested mappings from dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in fields.items():
        *above, last = path.split(".")
        section = tree
        for key in above:
            section = section.setdefault(key, {})
        section[last] = value
    return tree


def entry_of(data_source: str, entries: Collection[str]) -> str | None:
    """Returns a row's entry: its data source, or else the first pattern that fits, such as math*. None without one."""
    return data_source if data_source in entries else next((e for e in entries if fnmatchcase(data_source, e)), None)


Kind = TypeVar("Kind", bound=BaseModel)
Of = TypeVar("Of", contravariant=True)
Rules = Mapping[str, Callable[[Of], object]]
"""Rules between values of one object: by the name that rules.yaml has for its text, what breaks it.

A rule is broken if the function returns a true value. A mapping has values that the text names (so return bool() of a
mapping of the recipe's); an iterator, or a list of mappings, has one mapping for each problem.
"""


def table_beside(module: str, name: str) -> Any:
    """Reads a YAML file of the package, which lies beside the file of a module."""
    import yaml  # a recipe without a broken rule needs none

    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def rule_texts() -> dict[str, Problem]:
    """Reads rules.yaml: each rule's problem by its name, of templates in which {path} stands for a value."""
    rows: dict[str, dict[str, str]] = table_beside(__file__, "rules.yaml")
    return {name: Problem(*next(iter(row.items())), row["needed"], row["fix"]) for name, row in rows.items()}


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Returns a template with values in it, each as a recipe has it. Formatter.vformat takes twice as long."""
    text = ""
    for literal, name, form, _ in FORMATTER.parse(template):
        text += literal
        if name is not None:
            text += _written(FORMATTER.get_field(name, (), values)[0], form or "")
    return text


def _written(value: Any, form: str) -> str:
    """Formats a value as a recipe has it: lists with commas, true, false and null."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    text = "null" if value is None else format(value, form)
    return text.lower() if isinstance(value, bool) else text


def problem(rule: str, /, **values: Any) -> Problem:
    """Returns the problem of a rule, with these values in its text."""
    return Problem(*(_filled(part, values) for part in vars(rule_texts()[rule]).values()))


def broken(rules: Rules[Of], of: Of) -> Iterator[Problem]:
    """Yields the problems of an object's broken rules, in their order."""
    for rule, breaks in rules.items():
        result: Any = breaks(of)
        if not result:
            continue
        many = isinstance(result, Iterator) or (isinstance(result, list) and isinstance(result[0], Mapping))
        for values in result if many else [result]:
            yield problem(rule, **{**vars(of), "self": of, **(values if isinstance(values, Mapping) else {})})


class Section(BaseModel):
    """One mapping of a recipe. Its fields are checked one by one when it is parsed, its rules by `broken_rules`."""

    RULES: ClassVar[Rules[Any]] = {}
    """Rules between its fields, and those of sections in it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def given(self, key: str) -> bool:
        """Returns whether the field's value differs from its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


def broken_rules(section: Section, path: str = "", checked: Section | None = None) -> list[Problem]:
    """Returns all broken rules of a section and of the sections in it; `where` is a dotted path. Each has a fix.

    `checked` is a section without broken rules, if there is one: parts that both share are not checked again.
    """
    problems: list[Problem] = []
    for name in type(section).model_fields:
        value, good = getattr(section, name), getattr(checked, name, None)
        if isinstance(value, Section) and value is not good:
            problems += broken_rules(value, f"{path}{name}.", good)
        elif isinstance(value, list | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, Section):
                    problems += broken_rules(item, f"{path}{name}.{key}.")
    return [*problems, *(replace(p, where=path + p.where) for p in broken(section.RULES, section))]


def changed(section: Kind, fields: Mapping[str, Any]) -> Kind:
    """Returns a section with other values of fields, by dotted path: itself if it has them already. Checks no rules."""
    update = {}
    for key, value in tree_of(fields).items():
        old: Any = getattr(section, key, None)
        new = changed(old, value) if isinstance(value, dict) else value
        if new is not old and new != old:
            update[key] = new
    return section.model_copy(update=update) if update else section


def repeated(names: Sequence[object]) -> list[str]:
    """Returns what is more than once among the names, sorted, as text."""
    return sorted({str(name) for name in names if names.count(name) > 1})


def each_once(*fields: str) -> Callable[[Section], object]:
    """Makes the rule named_twice of these lists of names."""
    return lambda section: (
        {"list": field, "names": twice} for field in fields if (twice := repeated(getattr(section, field)))
    )


@dataclass(frozen=True)
class ByName:
    """A choice by `key` from a union of sections: Annotated[OneConfig | OtherConfig, ByName(default=…)].

    A plain text stands for the section of that name; without the key it is the default's. FILE.py:FUNCTION chooses the
    member whose key is any text.
    """

    key: str = "name"
    default: str | None = None

    OWN: ClassVar[str] = "FILE.py:FUNCTION"

    def members(self, union: Any) -> dict[str, type[Section]]:
        """Returns the sections by their names."""
        sections: dict[str, type[Section]] = {}
        for member in get_args(union) or (union,):
            annotation = member.model_fields[self.key].annotation
            names = get_args(annotation) if get_origin(annotation) is Literal else (self.OWN,)
            sections |= dict.fromkeys(names, member)
        return sections

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {name: handler.generate_schema(member) for name, member in self.members(source).items()}
        union = core_schema.tagged_union_schema(choices, discriminator=self._chosen)
        return core_schema.no_info_before_validator_function(self._written_out, union)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        members = handler(schema)["oneOf"]
        names: list[str] = []
        for member in members:
            described = handler.resolve_ref_schema(member)
            key = described["properties"][self.key]
            chosen_by = [key["const"]] if "const" in key else key.get("enum", [])
            names += chosen_by
            if self.default not in chosen_by:
                described["required"] = [self.key, *(k for k in described.get("required", []) if k != self.key)]
        texts: list[dict[str, Any]] = [{"enum": names}]
        if len(names) < len(members):
            texts.append({"type": "string", "pattern": FILE_AND_FUNCTION})
        return {"anyOf": [*texts, *members]}

    def _written_out(self, value: Any) -> Any:
        if isinstance(value, str):
            return {self.key: value}
        if isinstance(value, dict) and self.key not in value and self.default is not None:
            return {self.key: self.default, **value}
        return value

    def _chosen(self, value: Any) -> Any:
        name = value.get(self.key) if isinstance(value, dict) else getattr(value, self.key, None)
        if not isinstance(name, str):
            return None
        return self.OWN if ".py:" in name else name
