"""Where each value of a recipe was written: a line of the file, or an override on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megagrpo.errors import Problem
from megagrpo.recipe.fields import is_field
from megagrpo.recipe.schema import AnyRecipe, Recipe

ITEM = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True)
class Places:
    """Line numbers and overrides by dotted path, such as train.layout.tensor or data.train.0.path."""

    source: str
    lines: Mapping[str, int] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    recipe_class: type[AnyRecipe] = Recipe

    def where(self, path: str) -> str:
        """`FILE:LINE path` of a written value, of the section around it if it was left at its default."""
        for at in _outwards(path):
            if at in self.overrides:
                text = f"override {self.overrides[at]}"
                return text if at == path else f"{text} ({path})"
            if at in self.lines:
                return f"{self.source}:{self.lines[at]} {path}"
        return f"{self.source} {path}"

    def overridden(self, path: str, text: str) -> Places:
        """The same places after `text` has replaced everything at and below `path`."""

        def beside(at: str) -> bool:
            return at != path and not at.startswith(f"{path}.")

        return replace(
            self,
            lines={at: line for at, line in self.lines.items() if beside(at)},
            overrides={at: given for at, given in self.overrides.items() if beside(at)} | {path: text},
        )

    def located(self, problem: Problem) -> Problem:
        """The problem with its place if its `where` is a field of the recipe (items as .0 or [0]), else as it is."""
        path = ITEM.sub(r".\1", problem.where)
        return replace(problem, where=self.where(path)) if is_field(path, self.recipe_class) else problem


def _outwards(path: str) -> Iterator[str]:
    """train.layout.tensor, train.layout, train."""
    while path:
        yield path
        path = path.rpartition(".")[0]
