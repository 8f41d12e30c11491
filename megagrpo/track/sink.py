"""The interface of trackers: a run's start, its metrics, its status at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from megagrpo.recipe.schema import AnyRecipe

PLAN_FILE = "plan.json"
"""The output of `megagrpo plan --json` for the recipe of the run's last start."""
Status = Literal["finished", "failed", "interrupted"]
"""The end of a run: complete, by an error, or by a signal or Ctrl-C."""


@dataclass(frozen=True)
class RunStart:
    """A run that starts (resumed_step 0), or continues after `resumed_step`.

    unlogged: the run was stopped before that step was evaluated, and logs it now. number: of this start, from 1.
    changed: lines about settings that differ from those until then.
    """

    recipe: AnyRecipe
    directory: Path
    total_steps: int
    resumed_step: int = 0
    run_ids: Mapping[str, str] = field(default_factory=dict)  # by tracker, the id that it gave this run before
    unlogged: bool = False
    number: int = 1
    changed: Sequence[str] = ()

    @property
    def label(self) -> str:
        """Returns the name of `changed` in trackers."""
        return f"start_{self.number}_after_step_{self.resumed_step}"


class Sink(Protocol):
    """One place that metrics go to. One thread calls the methods, in this order."""

    def start(self, run: RunStart) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, status: Status) -> None: ...
