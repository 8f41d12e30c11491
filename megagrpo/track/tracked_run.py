"""A run as a tracker has it: the interface of the trackers in track/trackers.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megagrpo.errors import Problem
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track.delivered import Delivered
from megagrpo.track.status import Status


@dataclass(frozen=True)
class Line:
    """A step's metrics, NaN where they were not finite. seconds: the time of logging, since 1970."""

    step: int
    seconds: float
    metrics: dict[str, float]


class TrackedRun:
    """A run's copy at a tracker. A subclass is a tracker.

    The follower (track/follower.py) calls the methods in one thread. It catches any error of the tracker's library, and
    calls again, from `open` on.
    """

    title: ClassVar[str]
    package: ClassVar[str | None] = None
    """A package to import that `pip install megagrpo[NAME]` brings; None if megagrpo always has it."""
    takes_repeated: ClassVar[bool] = False
    """True if steps that the run repeats replace earlier values; else the first values stay."""
    takes_report: ClassVar[bool] = False
    """True if the run's end makes report.html for this tracker."""

    def __init__(self, recipe: AnyRecipe, directory: Path, delivered: Delivered, *, live: bool) -> None:
        """Sets the fields. live: the run may still be running; else the rest of an ended one is sent."""
        self.recipe, self.directory, self.delivered, self.live = recipe, directory, delivered, live
        self.place = self.place_of(recipe) or ""

    @classmethod
    def place_of(cls, recipe: AnyRecipe) -> str | None:
        """Returns the copy's name in track.json, with a server's address; None if the recipe has this tracker off."""
        raise NotImplementedError

    @classmethod
    def problems(cls, recipe: AnyRecipe) -> Iterator[Problem]:
        """Yields reasons why the recipe's settings cannot work here."""
        yield from ()

    @classmethod
    def shown_at(cls, recipe: AnyRecipe) -> str | None:
        """Returns an address or a command that shows the run, for the run's last lines."""
        return None

    def open(self) -> int | None:
        """Finds or creates the copy. Returns the last step that it has, -1 for an empty one; None if the tracker does
        not tell: then the step in track.json counts."""
        return None

    def log(self, lines: Sequence[Line]) -> int:
        """Sends steps, in order. Returns the last step that the tracker keeps, even if this process is killed now."""
        raise NotImplementedError

    def update(self, step: int) -> None:
        """Sends further data of the run, such as files, and samples of steps up to `step`."""

    def finish(self, status: Status) -> None:
        """Sends the rest at the run's end, and the run's status."""

    @property
    def lacks(self) -> str:
        """Returns the data that the tracker no longer accepts, or ""."""
        return ""

    def note(self, **values: object) -> None:
        """Adds values to the copy's part of track.json. Raises OSError."""
        self.delivered.note(self.place, **values)
