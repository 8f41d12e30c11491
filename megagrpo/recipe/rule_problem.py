"""A broken rule of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.errors import Problem
from megagrpo.recipe.schema import Section


@dataclass(frozen=True)
class RuleProblem(Problem):
    """A broken rule between fields. `where` is the field to change first; `fields` are all that the rule reads."""

    fields: tuple[str, ...] = ()


def broken(field: str, *, given: str, needed: str, fix: str, reads: tuple[str, ...] = ()) -> RuleProblem:
    """`reads` are the fields that the rule takes into account besides `field`."""
    return RuleProblem(field, given, needed, fix, (field, *reads))


def given_keys(section: Section, *, only: tuple[str, ...] | None = None, except_for: tuple[str, ...] = ()) -> list[str]:
    """Keys whose values differ from their defaults."""
    fields = type(section).model_fields
    return [
        key
        for key, field in fields.items()
        if (only is None or key in only)
        and key not in except_for
        and not field.is_required()
        and getattr(section, key) != field.default
    ]
