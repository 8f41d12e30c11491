"""A run as a tracker has it: the interface of the trackers in track/trackers.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megagrpo.errors import Problem
from megagrpo.track.delivered import Delivered, without_password
from megagrpo.track.status import Status

if TYPE_CHECKING:
    from megagrpo.recipe.schema import AnyRecipe


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
    field: ClassVar[tuple[Any, Any]]
    """Its field in `track:` of a recipe, as create_model takes it: a Section or bool, and a Field with default and
    description. A false value switches the tracker off."""
    package: ClassVar[str | None] = None
    """A package to import that `pip install megagrpo[NAME]` brings; None if megagrpo always has it."""
    takes_repeated: ClassVar[bool] = False
    """True if steps that the run repeats replace earlier values; else the first values stay."""
    takes_report: ClassVar[bool] = False
    """True if the run's end makes report.html for this tracker."""

    def __init__(self, name: str, recipe: AnyRecipe, directory: Path, delivered: Delivered, *, live: bool) -> None:
        """Sets the fields. name: the tracker's in TRACKERS. live: the run may still be running; else the rest of an
        ended one is sent."""
        self.name, self.recipe, self.directory, self.delivered, self.live = name, recipe, directory, delivered, live
        self.settings: Any = getattr(recipe.track, name)
        server = self.server(self.settings, recipe)
        self.place = name if server is None else f"{name} {without_password(server)}"
        """The copy's name in track.json."""

    @classmethod
    def server(cls, settings: Any, recipe: AnyRecipe) -> str | None:
        """Returns the address of its server; None if it has one place for each run. settings: the field's value."""
        return None

    @classmethod
    def problems(cls, settings: Any, recipe: AnyRecipe) -> Iterator[Problem]:
        """Yields reasons why the settings cannot work here."""
        yield from ()

    @classmethod
    def shown_at(cls, settings: Any, recipe: AnyRecipe) -> str | None:
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
