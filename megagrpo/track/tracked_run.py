"""A run as a tracker has it: the interface of the trackers in track/trackers.py, and their memory, track.json.

track.json in the run's directory has the run's name for trackers, its starts, and the delivery state of each tracker.
The run writes it when it starts, before the follower does. The run's other files hold what a tracker lacks.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megagrpo.errors import Problem
from megagrpo.track.jsonl import read_json
from megagrpo.track.status import Status

if TYPE_CHECKING:
    from megagrpo.recipe.schema import AnyRecipe

FILE = "track.json"
LEFT_MAX = 8
USER = re.compile(r"(?<=://)[^/\s]*@")
"""The user of an address, with the password."""


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
    section: ClassVar[type[Any]] = bool
    """The type of its field in `track:` of a recipe: bool, or a Section, in whose place null switches it off."""
    field: ClassVar[Any]
    """pydantic's Field with the default and the description."""
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


# --- track.json -------------------------------------------------------------------------------------------------------


class Delivered:
    """The file, with a copy in memory. Several threads may call the methods; those that write raise OSError.

    run: the run's unique name, by which a server's copy of the run is found again. begun_seconds: its start, since
    1970. first_start: number of the start with which it began: trackers show its recipe and environment. changes: lines
    about settings that changed, by start, such as `start_2_after_step_40`. whole: every tracker has all of a finished
    run.
    """

    def __init__(
        self, directory: Path, *, anew: bool = False, number: int = 1, run_ids: Mapping[str, str] | None = None
    ) -> None:
        """Reads or creates the file.

        anew: the run starts over, as start `number`, and trackers have nothing. run_ids: ids by tracker, from a
        checkpoint, for a file that is lost.
        """
        self._path = directory / FILE
        self._lock = threading.Lock()
        known = _read(self._path)
        self._content: dict[str, Any] = {} if anew else known
        if not self._content:
            begun = {"id": secrets.token_hex(8), "begun": time.time(), "first_start": number}
            left = [*known.get("left", ()), known["trackers"]] if known.get("trackers") else known.get("left", [])
            trackers = {name: {"run_id": run_id} for name, run_id in (run_ids or {}).items()}
            self.write(**begun, trackers=trackers, left=left[-LEFT_MAX:])
        self.run, self.begun_seconds = str(self._content["id"]), float(self._content["begun"])
        self.first_start, self.whole = int(self._content["first_start"]), bool(self._content.get("whole"))
        self.changes: Mapping[str, list[str]] = self._content.get("changes", {})

    def of(self, place: str) -> dict[str, Any]:
        """Returns the state of a tracker: `step`, the last that it has, and the tracker's own notes."""
        with self._lock:
            return dict(self._content["trackers"].get(place, {}))

    def run_ids(self, tracker: str) -> list[str]:
        """Returns the ids that a tracker, at any server, gave this run."""
        with self._lock:
            trackers = self._content["trackers"].items()
            return [known["run_id"] for name, known in trackers if name.split()[0] == tracker and "run_id" in known]

    def left(self, place: str) -> list[str]:
        """Returns a tracker's ids of the runs that were in this directory before the run started anew."""
        known = [trackers.get(place, {}).get("run_id") for trackers in self._content.get("left", ())]
        return [run_id for run_id in known if run_id]

    def note(self, place: str, **values: Any) -> None:
        """Adds values to the state of a tracker."""
        with self._lock:
            known = self._content["trackers"].get(place, {})
            if any(known.get(name, self) != value for name, value in values.items()):
                self.write(trackers=self._content["trackers"] | {place: known | values})

    def write(self, **values: Any) -> None:
        """Writes the file with these values, then updates the copy in memory: so the next note repeats a failed one."""
        content, part = self._content | values, self._path.with_name(f"{FILE}.part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self._path)
        self._content = content


def run_ids(directory: Path) -> dict[str, str]:
    """Returns the run's id by tracker, such as "mlflow"; the last id, if the tracker has several servers."""
    known = _read(directory / FILE).get("trackers", {})
    return {name.partition(" ")[0]: values["run_id"] for name, values in known.items() if "run_id" in values}


def without_password(text: str) -> str:
    """Returns `text` without the users and passwords of its addresses."""
    return USER.sub("", text)


def _read(path: Path) -> dict[str, Any]:
    read = read_json(path)
    return read if {"id", "begun", "first_start", "trackers"} <= read.keys() else {}
