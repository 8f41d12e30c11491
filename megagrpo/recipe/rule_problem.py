"""A broken rule of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.errors import Problem


@dataclass(frozen=True)
class RuleProblem(Problem):
    """A broken rule between fields. `where` is the field to change first; `fields` are all that the rule reads."""

    fields: tuple[str, ...] = ()


def broken(field: str, *, given: str, needed: str, fix: str, reads: tuple[str, ...] = ()) -> RuleProblem:
    """`reads` are the fields that the rule takes into account besides `field`."""
    return RuleProblem(field, given, needed, fix, (field, *reads))
