"""The base of every section of a recipe: strict fields, rules between them, methods chosen by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

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


class Section(BaseModel):
    """One mapping of a recipe. Its fields are checked one by one when it is parsed, its rules by `broken_rules`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def rules(self) -> Iterator[Problem]:
        """Yields the broken rules between this section's fields. `where` is a path from here; each has a fix."""
        return iter(())

    def given(self, key: str) -> bool:
        """Returns whether the field's value differs from its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


def broken_rules(section: Section, path: str = "", checked: Section | None = None) -> list[Problem]:
    """Returns all broken rules of a section and of the sections in it; `where` is a dotted path.

    `checked` is a section without broken rules, if there is one: parts that both share are not checked again.
    """
    found = []
    for name in type(section).model_fields:
        value, good = getattr(section, name), getattr(checked, name, None)
        if isinstance(value, Section) and value is not good:
            found += broken_rules(value, f"{path}{name}.", good)
        elif isinstance(value, list | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, Section):
                    found += broken_rules(item, f"{path}{name}.{key}.")
    return found + [replace(problem, where=path + problem.where) for problem in section.rules()]


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
        found: dict[str, type[Section]] = {}
        for member in get_args(union) or (union,):
            annotation = member.model_fields[self.key].annotation
            names = get_args(annotation) if get_origin(annotation) is Literal else (self.OWN,)
            found |= dict.fromkeys(names, member)
        return found

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
            own = [key["const"]] if "const" in key else key.get("enum", [])
            names += own
            if self.default not in own:
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
