"""What is unwise in a recipe for its machines: every finding with where, given, needed and fix.

The rules of recipe/ refuse what is wrong anywhere, impossible.py what cannot run on the machines; these are matters of
judgment.
"""

from __future__ import annotations

from collections.abc import Iterator

from megagrpo.errors import Problem
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.checks.planned import Planned
from megagrpo.plan.checks.unwise_layout import LAYOUT_RULES
from megagrpo.plan.checks.unwise_settings import SETTING_RULES
from megagrpo.plan.estimate import Estimate
from megagrpo.plan.machines import Machines
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.families.architecture import Architecture


def advice(
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines | None,
    estimate: Estimate | None,
    assumptions: Assumptions,
) -> Iterator[Problem]:
    """What works and is probably not what its author wants."""
    planned = Planned(recipe, architecture, machines, estimate, assumptions)
    for rule in (*LAYOUT_RULES, *SETTING_RULES):
        yield from rule(planned)
