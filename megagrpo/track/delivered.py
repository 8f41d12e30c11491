"""track.json in a run's directory: the run's name for trackers, and the delivery state of each tracker.

The run's other files hold what a slow, full or unreachable tracker lacks; `megagrpo track sync` sends it.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from megagrpo.track.jsonl import read_json

FILE = "track.json"
LEFT_MAX = 8
USER = re.compile(r"(?<=://)[^/\s]*@")
"""The user of an address, with the password."""


class Delivered:
    """The file, with a copy in memory. Several threads may call the methods; those that write raise OSError."""

    def __init__(self, directory: Path, *, anew: bool, number: int = 1) -> None:
        """Reads or creates the file. anew: the run starts over, as start `number`, and trackers have nothing."""
        self._path = directory / FILE
        self._lock = threading.Lock()
        there = _read(self._path)
        self.found = bool(there)
        """True if the file existed, and was whole."""
        self._content: dict[str, Any] = {} if anew else there
        if not self._content:
            begun = {"id": secrets.token_hex(8), "begun": time.time(), "first_start": number}
            left = [*there.get("left", ()), there["trackers"]] if there.get("trackers") else there.get("left", [])
            self._write({**begun, "trackers": {}, "left": left[-LEFT_MAX:]})

    @property
    def run(self) -> str:
        """Returns the run's unique name, by which a server's copy of the run is found again."""
        return str(self._content["id"])

    @property
    def begun_seconds(self) -> float:
        """Returns the start time of the run, in seconds since 1970."""
        return float(self._content["begun"])

    @property
    def first_start(self) -> int:
        """Returns the number of the start with which the run began: trackers show its recipe and environment."""
        return int(self._content["first_start"])

    def of(self, tracker: str) -> dict[str, Any]:
        """Returns the state of a tracker: `step`, the last that it has, and the tracker's own notes."""
        with self._lock:
            return dict(self._content["trackers"].get(tracker, {}))

    @property
    def whole(self) -> bool:
        """Returns whether the run is finished, and every tracker has all of it."""
        return bool(self._content.get("whole"))

    def note_whole(self, whole: bool) -> None:
        """Writes whether the run is whole at every tracker; False once the run continues."""
        with self._lock:
            self._write(self._content | {"whole": whole})

    def left(self, tracker: str) -> list[str]:
        """Returns a tracker's ids of the runs that were in this directory before the run started anew."""
        with self._lock:
            known = [trackers.get(tracker, {}).get("run_id") for trackers in self._content.get("left", ())]
            return [run_id for run_id in known if run_id]

    def note(self, tracker: str, **values: Any) -> None:
        """Adds values to the state of a tracker."""
        with self._lock:
            known = self._content["trackers"].get(tracker, {})
            if any(known.get(name, self) != value for name, value in values.items()):
                trackers = self._content["trackers"] | {tracker: known | values}
                self._write(self._content | {"trackers": trackers})

    def _write(self, content: dict[str, Any]) -> None:
        """Writes the file, then updates the copy in memory: so the next note repeats a failed write."""
        part = self._path.with_name(f"{FILE}.part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self._path)
        self._content = content


def run_ids(directory: Path) -> dict[str, str]:
    """Returns the run's id by tracker, such as "mlflow"; the last id, if the tracker has several servers."""
    known = _read(directory / FILE).get("trackers", {})
    return {name.partition(" ")[0]: values["run_id"] for name, values in known.items() if "run_id" in values}


def place(tracker: str, uri: str) -> str:
    """Returns the name of a server in the file."""
    return f"{tracker} {without_password(uri)}"


def without_password(text: str) -> str:
    """Returns `text` without the users and passwords of its addresses."""
    return USER.sub("", text)


def _read(path: Path) -> dict[str, Any]:
    read = read_json(path)
    return read if {"id", "begun", "first_start", "trackers"} <= read.keys() else {}
