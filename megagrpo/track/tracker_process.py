"""The process that sends a run to MLflow, W&B and TensorBoard while it trains, with the lowest priority there is.

In the driver, these libraries would hold Python's lock, and a core that training ranks of this node need. In a process
of its own they get idle time only, and their faults, threads and signals stay out of the run.

Messages are lines of JSON. To the process: the run's start, then its rewinds, then its end. From it: lines for the
terminal. The process reads the data for trackers from the run's directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from megagrpo.errors import first_line
from megagrpo.processes.lifetime import end_with_parent, let_family_idle
from megagrpo.recipe.load import load_any
from megagrpo.track.behind import FINISH_TIMEOUT_SECONDS, Behind, Remote
from megagrpo.track.delivered import Delivered
from megagrpo.track.mlflow import MLflowRemote
from megagrpo.track.sink import RunStart, Status
from megagrpo.track.tensorboard import TensorBoardRemote
from megagrpo.track.wandb import WandBRemote

LEAVE_SECONDS = 10.0
"""Timeout of the process's exit, once its trackers have ended or were given up."""
REPORT_SECONDS = 30.0
"""Timeout of the report of a run that has ended: one of 1,000 steps with 100 samples each takes 12 s."""
STARTS_MAX, AGAIN_SECONDS, LONG_SECONDS = 5, 10.0, 600.0
"""Maximum starts of a process that dies early, seconds between them, seconds of life after which they count anew."""
Say = Callable[[str], object]
LAUNCH = """
import signal
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
from megagrpo.track.tracker_process import main
main()
"""
"""Slurm sends these signals to all processes, and the driver says what to do: nothing may be imported before."""
REPORT = """
import sys
from megagrpo.processes.lifetime import end_with_parent
end_with_parent()
from megagrpo.cli import main
sys.exit(main(["report", sys.argv[1]]))
"""


# --- in the driver ----------------------------------------------------------------------------------------------------


class TrackerProcess:
    """The process as the run sees it. `say` receives its lines; a thread calls it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._end: Mapping[str, Any] | None = None  # the last message
        self._ended, self._given_up = threading.Event(), False
        self._process: subprocess.Popen[str] | None = None

    def start(self, run: RunStart) -> None:
        self._run = run
        # The thread starts it: a process ends with the thread that started it.
        self._thread = threading.Thread(target=self._keep, name="trackers", daemon=True)
        self._thread.start()

    def rewind(self, step: int) -> None:
        """Sends a rewind to `step`: the run repeats the steps after it, in new files."""
        with self._lock:
            self._write({"rewind": step})

    def finish(self, status: Status) -> None:
        """Sends the run's end. Waits until trackers have everything, at most a minute and the report's timeout."""
        self._ended.set()
        with self._lock:
            self._end = {"end": status, "seconds": FINISH_TIMEOUT_SECONDS}
            if self._process:  # the run waits now: it gets time as others do, where it may
                let_family_idle(self._process.pid, False)
            self._write(self._end)
        self._thread.join(FINISH_TIMEOUT_SECONDS + REPORT_SECONDS + LEAVE_SECONDS)
        if self._thread.is_alive():
            self._say(f"trackers: their process does not end; {self._brings_rest}")
            with self._lock:
                self._given_up = True
                if self._process:
                    self._process.kill()
            self._thread.join(LEAVE_SECONDS)  # it may hang in a file system that is gone

    @property
    def _brings_rest(self) -> str:
        return f"megagrpo track sync {self._run.directory} brings the rest"

    def _write(self, message: Mapping[str, Any]) -> None:
        """Writes a message. Messages are few and short: the pipe has room for all, even if the process reads none."""
        if self._process and self._process.stdin:
            with suppress(OSError):  # it has died: the next one starts where this one did
                self._process.stdin.write(f"{json.dumps(message)}\n")
                self._process.stdin.flush()

    def _keep(self) -> None:
        """Starts the process, passes on its lines, and restarts it when it dies."""
        left = STARTS_MAX
        while True:
            begun = time.monotonic()
            try:
                process = started_process()
            except OSError as error:
                why = f"does not start: {first_line(error)}"
            else:
                code = self._follow(process)
                if self._given_up or (code == 0 and self._ended.is_set()):
                    return
                why = f"has ended with status {code}"
            left = STARTS_MAX if time.monotonic() - begun > LONG_SECONDS else left - 1
            if not left:
                self._say(f"trackers: their process {why}; {self._brings_rest}")
                return
            self._say(f"warning: trackers: their process {why}; it is started again")
            self._ended.wait(AGAIN_SECONDS)

    def _follow(self, process: subprocess.Popen[str]) -> int:
        """Follows one process until it ends. Returns its exit status. A new process sends only what trackers lack;
        TensorBoard gets the steps since the run's start again, which hide those before: some may have been repeated."""
        run = self._run
        start = {each.name: getattr(run, each.name) for each in fields(run) if each.name != "recipe"}
        with process:
            with self._lock:
                self._process = process
                for message in ({**start, "directory": str(run.directory)}, self._end):
                    if message:
                        self._write(message)
            for line in process.stdout or ():
                with suppress(ValueError):  # it died in the middle of a line
                    self._say(json.loads(line))
            with self._lock:
                self._process = None
            if process.stdin:
                with suppress(OSError):  # what it has not read
                    process.stdin.close()
            return process.wait()


def started_process() -> subprocess.Popen[str]:
    """Starts the process. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", LAUNCH],  # -P: files of the current directory are no modules
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the driver's
    )


# --- in the process ---------------------------------------------------------------------------------------------------


def remotes(run: RunStart, delivered: Delivered) -> dict[str, Callable[[RunStart], Remote]]:
    """Returns the trackers of the run's recipe, by name."""
    track, found = run.recipe.track, dict[str, Callable[[RunStart], Remote]]()
    if mlflow := track.mlflow:
        found["mlflow"] = lambda run: MLflowRemote(run, mlflow, delivered, live=True)
    if wandb := track.wandb:
        found["wandb"] = lambda run: WandBRemote(run, wandb, delivered)
    if track.tensorboard:
        found["tensorboard"] = lambda run: TensorBoardRemote(run, delivered, live=True)
    return found


def bring(messages: Iterable[str], say: Say, make_report: Callable[[RunStart, Say], None] | None = None) -> None:
    """Sends a run to its trackers until a message reports its end, then the rest, with the report."""
    read = map(json.loads, messages)
    start = next(read)
    directory = Path(start.pop("directory"))
    run = RunStart(load_any(directory / "recipe.yaml").recipe, directory, **start)
    delivered = Delivered(directory, anew=False)
    behind = [Behind(name, connect, say) for name, connect in remotes(run, delivered).items()]
    for each in behind:
        each.start(run)
    for message in read:
        if "rewind" in message:
            for each in behind:
                each.rewind(message["rewind"])
        else:
            if make_report and message["end"] != "interrupted":  # such a run may not end late
                make_report(run, say)
            until = time.monotonic() + message["seconds"]
            for each in behind:
                each.end(message["end"])
            whole = [each.finish(until) for each in behind]
            with suppress(OSError):  # a full disk
                delivered.note_whole(all(whole) and message["end"] == "finished")
            return


def report(run: RunStart, say: Say) -> None:
    """Writes report.html, one of MLflow's artifacts; gives up after REPORT_SECONDS."""
    if run.recipe.track.mlflow is None:
        return
    nothing = subprocess.DEVNULL
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", REPORT, str(run.directory)],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            timeout=REPORT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"no report for MLflow: {first_line(error)}; megagrpo report {run.directory} makes it")


def main() -> None:
    end_with_parent()
    let_family_idle(os.getpid())
    with os.fdopen(os.dup(1), "w", buffering=1) as said:
        os.dup2(2, 1)  # what libraries print is no message
        # One write for each line: several threads say something.
        bring(sys.stdin, lambda line: said.write(f"{json.dumps(line)}\n"), report)
    sys.stdout.flush()
    os._exit(0)  # threads of a tracker that never answers do not keep the process
