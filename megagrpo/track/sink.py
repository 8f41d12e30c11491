"""What every tracker is told, and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from megagrpo.recipe.schema import AnyRecipe

Status = Literal["finished", "failed", "interrupted"]
"""How a run ended: by itself, by an error, or by a signal or Ctrl-C."""


@dataclass(frozen=True)
class RunStart:
    """A run that starts, or continues after `resumed_step` (0 for one that starts).

    `unlogged`: stopped before that step was evaluated, it will log it now.
    """

    recipe: AnyRecipe
    directory: Path
    total_steps: int
    resumed_step: int = 0
    run_ids: Mapping[str, str] = field(default_factory=dict)  # what each tracker called this run before
    unlogged: bool = False


class Sink(Protocol):
    """One place where metrics go. Calls come in this order, from one thread."""

    def start(self, run: RunStart) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, status: Status) -> None: ...


class SinkWithRun(Sink, Protocol):
    """A tracker that names runs itself."""

    @property
    def run_id(self) -> str | None:
        """Its name for this one; None if it has not answered."""
