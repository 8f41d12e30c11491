"""The process that brings a run to MLflow, W&B and TensorBoard while it goes on, with the lowest priority there is.

In the driver, what these libraries do would hold Python's lock, and a core that training ranks of this node want. In a
process of its own they get the time that nobody else wants, and their faults, threads and signals are not the run's.

Messages are lines of JSON. To the process: how the run starts, then where it goes back to, then how it ends. From it:
lines for the terminal. What it brings, it reads in the run's directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil

from megagrpo.errors import first_line
from megagrpo.parent_process import NICENESS, end_with_parent, weigh
from megagrpo.recipe.load import load_any
from megagrpo.track.behind import FINISH_TIMEOUT_SECONDS, Behind, Remote
from megagrpo.track.delivered import Delivered
from megagrpo.track.mlflow import MLflowRemote
from megagrpo.track.sink import RunStart, Status
from megagrpo.track.tensorboard import TensorBoardRemote
from megagrpo.track.wandb import WandBRemote

LEAVE_SECONDS = 10.0
"""For the process to end, once its trackers have ended or were given up."""
REPORT_SECONDS = 30.0
"""For the report of a run that has ended: one of 1,000 steps with 100 samples each takes 12 s."""
STARTS_MAX, AGAIN_SECONDS = 5, 10.0
"""How often it is started, if it dies, and the seconds between."""
ALL_STEPS = sys.maxsize


# --- in the driver ----------------------------------------------------------------------------------------------------


class TrackerProcess:
    """The process as the run sees it. `say` receives its lines, by a thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._messages: list[Mapping[str, Any]] = []  # after the first; also for a process that is started again
        self._ended = threading.Event()
        self._process: subprocess.Popen[str] | None = None

    def start(self, run: RunStart) -> None:
        self._run = run
        # The thread starts it: a process ends with the thread that started it.
        self._thread = threading.Thread(target=self._keep, name="trackers", daemon=True)
        self._thread.start()

    def rewind(self, step: int) -> None:
        """The steps after `step` come again, in files that are new."""
        self._send({"rewind": step})

    def finish(self, status: Status) -> None:
        """Nothing more will come. Waits until trackers have everything, or FINISH_TIMEOUT_SECONDS are over."""
        self._ended.set()
        self._send({"end": status, "seconds": FINISH_TIMEOUT_SECONDS})
        self._thread.join(FINISH_TIMEOUT_SECONDS + LEAVE_SECONDS)
        if self._thread.is_alive():
            self._say(f"trackers: their process does not end; {self._brings_rest}")
            with self._lock:
                if self._process:
                    self._process.kill()
            self._thread.join()

    @property
    def _brings_rest(self) -> str:
        return f"megagrpo track sync {self._run.directory} brings the rest"

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._messages.append(message)
            self._write([message])

    def _write(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """They are few and short: the pipe has room for all, also where the process does not read."""
        try:
            if self._process and self._process.stdin:
                self._process.stdin.write("".join(f"{json.dumps(message)}\n" for message in messages))
                self._process.stdin.flush()
        except OSError:  # it has died: the next one gets them
            pass

    def _keep(self) -> None:
        """Starts it, passes on what it says, and starts it again when it dies."""
        run = self._run
        for left in reversed(range(STARTS_MAX)):
            try:
                code = self._follow(run)
            except OSError as error:
                why = f"does not start: {first_line(error)}"
            else:
                if code == 0 and self._ended.is_set():
                    return
                why = f"has ended with status {code}"
            if self._ended.is_set() or not left:
                self._say(f"trackers: their process {why}; {self._brings_rest}")
                return
            self._say(f"warning: trackers: their process {why}; training goes on, and it is started again")
            self._ended.wait(AGAIN_SECONDS)
            # What trackers have, none of them gets again.
            run = replace(run, resumed_step=ALL_STEPS, unlogged=False, changed=())

    def _follow(self, run: RunStart) -> int:
        """One process, until it ends. Returns its exit status. Raises OSError if it cannot be started."""
        with started_process() as process:
            start = {each.name: getattr(run, each.name) for each in fields(run) if each.name != "recipe"}
            with self._lock:
                self._process = process
                self._write([{**start, "directory": str(run.directory)}, *self._messages])
            for line in process.stdout or ():
                with suppress(ValueError):  # it died in the middle of a line
                    self._say(json.loads(line))
            with self._lock:
                self._process = None
            return process.wait()


def started_process() -> subprocess.Popen[str]:
    """Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-m", "megagrpo.track.tracker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the driver's
    )


# --- in the process ---------------------------------------------------------------------------------------------------


def remotes(run: RunStart, delivered: Delivered) -> dict[str, Callable[[RunStart], Remote]]:
    """The trackers of the run's recipe, by name."""
    track, found = run.recipe.track, dict[str, Callable[[RunStart], Remote]]()
    if mlflow := track.mlflow:
        found["mlflow"] = lambda run: MLflowRemote(run, mlflow, delivered, live=True)
    if wandb := track.wandb:
        found["wandb"] = lambda run: WandBRemote(run, wandb, delivered)
    if track.tensorboard:
        found["tensorboard"] = lambda run: TensorBoardRemote(run, delivered, live=True)
    return found


def bring(
    messages: Iterable[str], say: Callable[[str], object], at_end: Callable[[RunStart, Status], None] | None = None
) -> None:
    """Brings a run to its trackers until a message says how it ended, then what is left. at_end: comes in between."""
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
            until = time.monotonic() + message["seconds"]
            if at_end:
                at_end(run, message["end"])
            for each in behind:
                each.end(message["end"])
            for each in behind:
                each.finish(until)
            return


def at_end_of(run: RunStart, status: Status) -> None:
    """The run waits now: the process gets time as others do, where it may. Makes report.html, one of MLflow's
    artifacts, unless the run was stopped, and may not end late, or that takes too long."""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        weigh(process.pid, 0)
    if run.recipe.track.mlflow and status != "interrupted":
        nothing = subprocess.DEVNULL
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "megagrpo.cli", "report", str(run.directory)],
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                timeout=REPORT_SECONDS,
            )


def main() -> None:
    end_with_parent()
    weigh(os.getpid(), NICENESS)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm sends them to all processes; the driver says what to do
        signal.signal(number, lambda *_: None)
    with os.fdopen(os.dup(1), "w", buffering=1) as said:
        os.dup2(2, 1)  # what libraries print is no message
        # One write for each line: several threads say something.
        bring(sys.stdin, lambda line: said.write(f"{json.dumps(line)}\n"), at_end_of)
    sys.stdout.flush()
    os._exit(0)  # threads of a tracker that never answers do not keep the process


if __name__ == "__main__":
    main()
