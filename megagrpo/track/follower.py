"""The program that sends a run to its trackers: `megagrpo track sync`, and with --follow while the run goes on.

The files in the run's directory are the truth. A tracker gets each line of metrics.jsonl after its offset, the step in
track.json or, where it tells, the tracker's own. The offset is written after the tracker has the line, so an
interrupted delivery resumes there.

The program runs on idle cores, and nothing in the run waits for it. In the driver, the trackers' libraries would hold
Python's lock, and a core that training ranks of this node need. In a process of its own, their faults, threads and
signals stay out of the run.
"""

from __future__ import annotations

import json
import math
import os
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pydantic

from megagrpo.errors import Problem, RecipeError, ReportError, TrackError, first_line
from megagrpo.processes.lifetime import end_with_parent, let_family_idle
from megagrpo.recipe.defaults import checkpoint_directory
from megagrpo.recipe.load import KINDS, load_any
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.recipe.yaml12 import parse
from megagrpo.track.jsonl import read_json
from megagrpo.track.status import (
    FOLLOWER_LOCK,
    LOCK_FILE,
    STATUS_FILE,
    Status,
    has_process,
    newest_checkpoint,
    only_process_of,
    read_status,
)
from megagrpo.track.tracked_run import Delivered, Line, TrackedRun, without_password
from megagrpo.track.trackers import TRACKERS, trackers_of

AGAIN_SECONDS, AGAIN_SECONDS_MAX = 1.0, 60.0
"""Seconds between two attempts: after the first failure, and at most."""
LOOK_SECONDS, LOOK_AT_END_SECONDS = 10.0, 0.2
"""Seconds between two looks for new lines and files, and for the run's end."""
LINES_MAX = 256
"""The maximum number of lines held in memory for a tracker."""
FINISH_SECONDS, REPORT_SECONDS, LEAVE_SECONDS = 60.0, 30.0, 10.0
"""Timeouts at the run's end: of the trackers, of the report before, and of the process's exit after."""
STARTS_MAX, RESTART_SECONDS, LONG_SECONDS = 5, 10.0, 600.0
"""Maximum starts of a process that dies early, seconds between them, seconds of life after which they count anew."""
LAUNCH = f"""
import signal
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
from {end_with_parent.__module__} import end_with_parent
end_with_parent()
import sys
from megagrpo.cli import main
sys.exit(main())
"""
"""A command of megagrpo that ends with its parent alone. Slurm sends these signals to all processes, and the driver
decides what follows: nothing may be imported before."""
Say = Callable[[str], object]
Settings = Mapping[str, dict[str, str]]
"""Settings of trackers, by name and field, that replace those of the recipe."""


class MetricLines:
    """metrics.jsonl, line after line, while the run writes it. A rewind of the run replaces the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def read(self, wanted: Callable[[Line], bool]) -> list[Line]:
        """Reads the next whole lines that are wanted, LINES_MAX at most. Raises OSError."""
        lines = list[Line]()
        while len(lines) < LINES_MAX and (file := self._opened()):
            begin, text = file.tell(), file.readline()
            if text.endswith(b"\n"):
                if (line := _line(text)) and wanted(line):
                    lines.append(line)
            elif not self._path.exists() or os.path.samestat(self._path.stat(), os.fstat(file.fileno())):
                file.seek(begin)  # this line is still being written
                break
            else:
                lines.clear()
                self.rewind()
        return lines

    def rewind(self) -> None:
        """Continues at the beginning of the file."""
        if self._file:
            self._file.close()
        self._file = None

    def _opened(self) -> BinaryIO | None:
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        return self._file


def _line(text: bytes) -> Line | None:
    """Parses a line; returns None for an unreadable one, which the run sets aside when it resumes."""
    try:
        values = json.loads(text)
        step, seconds = int(values.pop("step")), float(values.pop("time"))
        return Line(step, seconds, {str(k): math.nan if v is None else float(v) for k, v in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class Delivery:
    """The delivery of a run to one tracker, from its offset on."""

    def __init__(self, tracked: TrackedRun, started: float) -> None:
        """Reads the offset. started: seconds since 1970 at which the run last started, for records without times."""
        self.tracked, self.name = tracked, tracked.name
        self.failures, self.steps = 0, 0  # failures in a row; steps sent
        known = tracked.delivered.of(tracked.place)
        self._step, self._seconds = int(known.get("step", -1)), float(known.get("seconds", started))
        self._lines = MetricLines(tracked.directory / "metrics.jsonl")
        self._is_open = False

    def send(self) -> None:
        """Sends the data that the tracker lacks. Raises the errors of its library: the next call then tries again."""
        was_open, self._is_open = self._is_open, False
        if not was_open:
            if (step := self.tracked.open()) is not None:
                self._step = step
            self._lines.rewind()
        while lines := self._lines.read(self._is_new):
            seconds = max(self._seconds, lines[-1].seconds)  # clocks of two nodes may differ
            self.tracked.note(step=self.tracked.log(lines), seconds=seconds)
            self._step, self._seconds = lines[-1].step, seconds
            self.steps += len(lines)
        self.tracked.update(self._step)
        self._is_open = True

    def _is_new(self, line: Line) -> bool:
        """Returns whether the tracker lacks a line. A step that the run repeats is logged later than all before it."""
        return line.step > self._step or (self.tracked.takes_repeated and line.seconds > self._seconds)

    def finish(self, status: Status) -> None:
        """Ends the tracker's copy, after `send`."""
        self.tracked.finish(status)
        if self._step >= 0:
            self.tracked.note(step=self._step)

    def follow(self, ended: threading.Event, say: Say) -> None:
        """Sends what is new until the run has ended, then the rest. Retries after failures, at growing intervals."""
        while True:
            is_last = ended.is_set()
            try:
                self.send()
                if is_last:
                    self.finish(_written_status(self.tracked.directory))
            except Exception as error:  # noqa: BLE001  (files, databases and servers fail in many ways)
                self.failures += 1
                if self.failures == 1:
                    why = without_password(cause(error))
                    say(f"warning: {self.name}: {why}; training continues, and the follower retries")
            else:
                if self.failures:
                    say(f"{self.name}: has everything again")
                self.failures = 0
            if is_last:
                return
            again = min(AGAIN_SECONDS_MAX, AGAIN_SECONDS * 2 ** min(self.failures - 1, 10))
            ended.wait(again if self.failures else LOOK_SECONDS)


def cause(error: Exception) -> str:
    """Returns the first line that names the cause: SQLAlchemy begins with the place of the error."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("(raised as a result")]
    return lines[0] if lines else type(error).__name__


def deliveries(directory: Path, recipe: AnyRecipe, *, live: bool) -> list[Delivery]:
    """Returns the deliveries to the recipe's trackers. A lost track.json gets the run's ids from the newest checkpoint.
    Raises OSError."""
    newest, run_ids = newest_checkpoint(checkpoint_directory(recipe)), dict[str, str]()
    if newest and isinstance(ids := read_json(newest / "trainer.json").get("tracker_runs"), dict):
        run_ids = {name: str(run_id) for name, run_id in ids.items()}
    delivered, status = Delivered(directory, run_ids=run_ids), read_status(directory)
    started = status.started if status else time.time()
    trackers = trackers_of(recipe).items()
    return [Delivery(tracker(name, recipe, directory, delivered, live=live), started) for name, tracker in trackers]


# --- while the run goes on --------------------------------------------------------------------------------------------


def main(directory: Path, settings: Settings) -> NoReturn:
    """Follows a run as a process of its own, on idle cores alone until the run ends.

    The output of libraries goes to standard error.
    """
    if _is_running(directory):
        let_family_idle(os.getpid())
    output, sys.stdout = os.dup(1), sys.stderr
    os.dup2(2, 1)

    def say(line: str) -> None:
        with suppress(OSError):  # its reader is gone
            os.write(output, f"{line}\n".encode(errors="replace"))  # one write: several threads print

    def is_closed(seconds: float) -> bool:
        """Waits until the run has closed this process's standard input: it has ended."""
        return bool(select.select([0], [], [], seconds)[0])

    follow(directory, settings, say, is_closed if stat.S_ISFIFO(os.fstat(0).st_mode) else time.sleep)
    os._exit(0)  # threads of a tracker that never answers do not keep the process


def follow(directory: Path, settings: Settings, say: Say, wait: Callable[[float], bool | None] = time.sleep) -> None:
    """Sends a run to its trackers until it ends, then the rest, for FINISH_SECONDS at most. Raises MegagrpoError.

    wait: waits for seconds between two looks at status.json; True tells the run's end too.
    """
    recipe = recipe_of(directory, settings, say)
    with only_process_of(directory, FOLLOWER_LOCK):
        ended, threads = threading.Event(), dict[threading.Thread, Delivery]()
        for delivery in deliveries(directory, recipe, live=True):
            # A daemon, so that a server that never answers cannot keep the process.
            thread = threading.Thread(target=delivery.follow, args=(ended, say), daemon=True)
            threads[thread] = delivery
            thread.start()
        status = _status_at_end(directory, wait)
        readers = [delivery.tracked.title for delivery in threads.values() if delivery.tracked.takes_report]
        if status != "interrupted" and readers:
            write_report(directory, readers, say)  # not after an interruption: such a run may not end late
        ended.set()
        until, whole = time.monotonic() + FINISH_SECONDS, status == "finished"
        for thread, delivery in threads.items():
            thread.join(max(0.0, until - time.monotonic()))
            if (late := thread.is_alive()) or delivery.failures:
                why = "has not taken everything yet" if late else "lacks a part of the run"
                say(f"{delivery.name}: {why}; megagrpo track sync {directory} brings the rest")
                whole = False
        with suppress(OSError):  # a full disk
            Delivered(directory).write(whole=whole)


def _status_at_end(directory: Path, wait: Callable[[float], bool | None]) -> Status:
    """Waits for the run's end. Returns the status that the run wrote, or "interrupted" for a run that was killed, or
    that could not write it."""
    look_at_lock = time.monotonic() + LOOK_SECONDS
    while _is_running(directory) and not wait(LOOK_AT_END_SECONDS):
        if time.monotonic() > look_at_lock:
            if (directory / LOCK_FILE).exists() and not has_process(directory):
                break
            look_at_lock = time.monotonic() + LOOK_SECONDS
    return _written_status(directory)


def _is_running(directory: Path) -> bool:
    return bool(read_json(directory / STATUS_FILE).get("state", "running") == "running")


def _written_status(directory: Path) -> Status:
    """Reads the run's end in trackers' words; a process that could not report its end was interrupted."""
    status = read_status(directory)
    return status.state if status and status.state in ("finished", "failed") else "interrupted"


def write_report(directory: Path, readers: Sequence[str], say: Say) -> None:
    """Writes report.html for these trackers; gives up after REPORT_SECONDS."""
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-P", "-c", LAUNCH, "report", str(directory)]
    try:
        subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, timeout=REPORT_SECONDS)
        return
    except subprocess.TimeoutExpired:
        why = f"not written within {REPORT_SECONDS:g} s"
    except OSError as error:
        why = error.strerror or first_line(error)
    say(f"no report for {', '.join(readers)}: {why}; megagrpo report {directory} makes it")


# --- its process, as the run sees it ----------------------------------------------------------------------------------


class FollowerProcess:
    """`megagrpo track sync --follow`, restarted when it dies. `say` receives its lines; a thread calls it."""

    def __init__(self, directory: Path, say: Say) -> None:
        self._directory, self._say = directory, say
        self._ended, self._given_up = threading.Event(), False
        self._process: subprocess.Popen[str] | None = None
        # The thread starts it: a process ends with the thread that started it.
        self._thread = threading.Thread(target=self._keep, name="trackers", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until trackers have everything, for a minute and the report's timeout at most. Called once status.json
        has the run's end. If a full disk has kept it out, the process learns it from its closed standard input."""
        self._ended.set()
        if process := self._process:  # the run waits now: it gets time as others do, where it may
            let_family_idle(process.pid, False)
            if process.stdin:
                process.stdin.close()
        self._thread.join(FINISH_SECONDS + REPORT_SECONDS + LEAVE_SECONDS)
        if self._thread.is_alive():
            self._say(f"trackers: their process does not end; {self._brings_rest}")
            self._given_up = True
            if process := self._process:
                process.kill()
            self._thread.join(LEAVE_SECONDS)  # it may hang in a file system that is gone

    @property
    def _brings_rest(self) -> str:
        return f"megagrpo track sync {self._directory} brings the rest"

    def _keep(self) -> None:
        """Starts the process, passes on its lines, and restarts it when it dies."""
        left = STARTS_MAX
        while not self._given_up:
            begun = time.monotonic()
            try:
                code = self._run()
            except OSError as error:
                why = f"does not start: {first_line(error)}"
            else:
                if self._given_up or (code == 0 and self._ended.is_set()):
                    return
                why = f"has ended with status {code}"
            left = STARTS_MAX if time.monotonic() - begun > LONG_SECONDS else left - 1
            if not left:
                self._say(f"trackers: their process {why}; {self._brings_rest}")
                return
            self._say(f"warning: trackers: their process {why}; it is started again")
            self._ended.wait(RESTART_SECONDS)

    def _run(self) -> int:
        """Runs the process until it ends. Returns its exit status. Raises OSError."""
        with started_process(self._directory) as process:
            self._process = process
            if self._ended.is_set() and process.stdin:
                process.stdin.close()
            for line in process.stdout or ():
                if line.endswith("\n"):  # else it died in the middle of it
                    self._say(line.removesuffix("\n"))
            self._process = None
            return process.wait()


def started_process(directory: Path) -> subprocess.Popen[str]:
    """Starts the process. Raises OSError."""
    return subprocess.Popen(
        # -P: files of the current directory are no modules
        [sys.executable, "-P", "-c", LAUNCH, "track", "sync", "--follow", str(directory)],
        stdin=subprocess.PIPE,  # closed at the run's end
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C is the driver's
    )


# --- after the run ----------------------------------------------------------------------------------------------------


def sync(directory: Path, settings: Settings, say: Say) -> int:
    """Sends each tracker of the run's recipe what it lacks; leaves what it has unchanged. Returns their number.

    `say` gets a line for each tracker. Raises ReportError if no run is in `directory`, RecipeError if it is still
    running, and TrackError if a tracker cannot be reached.
    """
    recipe, metrics = recipe_of(directory, settings, say), directory / "metrics.jsonl"
    if not MetricLines(metrics).read(lambda line: True) and metrics.exists() and b"\n" in metrics.read_bytes():
        raise ReportError(Problem(str(metrics), "no line that can be read", "JSON objects with step and time"))
    problems = []
    with only_process_of(directory), only_process_of(directory, FOLLOWER_LOCK):
        for delivery in (all_deliveries := deliveries(directory, recipe, live=False)):
            name = delivery.tracked.place.replace(" ", ", ", 1)
            try:
                delivery.send()
                delivery.finish(_written_status(directory))
            except Exception as error:  # noqa: BLE001  (files, databases and servers fail in many ways)
                fix = "start the tracker, or make room there, then repeat the command: it sends the missing data"
                problems.append(Problem(name, without_password(cause(error)), "a tracker that takes the run", fix))
            else:
                has = f"it lacks {lacks}" if (lacks := delivery.tracked.lacks) else "it has everything"
                say(f"{name}: {delivery.steps} steps brought; {has}")
    if problems:
        raise TrackError(problems)
    return len(all_deliveries)


def recipe_of(directory: Path, settings: Settings, say: Say) -> AnyRecipe:
    """Loads the recipe of the run in `directory`, wherever that is now. Raises ReportError or RecipeError."""
    saved = directory / "recipe.yaml"
    if not saved.is_file():
        needed = "the directory of a run: track.directory and name of its recipe, such as runs/NAME"
        raise ReportError(Problem(str(directory), "no recipe.yaml", needed))
    recipe = _of_any_version(saved, say)
    changes: dict[str, Any] = {"directory": str(directory.absolute().parent)}
    for name, values in settings.items():
        changes[name] = (getattr(recipe.track, name) or TRACKERS[name].section()).model_copy(update=values)
    return recipe.model_copy(update={"track": recipe.track.model_copy(update=changes)})


def _of_any_version(saved: Path, say: Say) -> AnyRecipe:
    """Loads the recipe. Leaves out and reports fields that this version of megagrpo lacks; params keep them.

    Raises RecipeError if the rest is no recipe.
    """
    try:
        return load_any(saved, []).recipe
    except RecipeError:
        tree = parse(saved.read_text(encoding="utf-8", errors="replace"), lambda line: f"{saved}:{line}").tree
        kind = KINDS.get(str(tree.get("kind", "grpo"))) if isinstance(tree, dict) else None
        with suppress(pydantic.ValidationError):
            if kind and (left_out := _remove_unknown(tree, kind)):
                recipe = kind.model_validate(tree)
                say(f"{saved}: of another version of megagrpo; this one does not know {', '.join(left_out)}")
                return recipe
        raise


def _remove_unknown(tree: dict[str, Any], kind: type[AnyRecipe]) -> list[str]:
    """Removes the fields that the schema lacks from a recipe's tree; returns their paths."""
    removed = list[str]()
    try:
        kind.model_validate(tree)
    except pydantic.ValidationError as error:
        for *outer, last in [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]:
            section: Any = tree
            for key in outer:
                # The location of a section of several kinds also names the kind, which is no key.
                if key in section if isinstance(section, dict) else isinstance(section, list):
                    section = section[key]
            if isinstance(section, dict) and section.pop(last, removed) is not removed:
                removed.append(".".join(map(str, (*outer, last))))
    return removed
