"""Sends a run to a tracker in a thread behind the steps: no step waits for it, and no failure ends the run.

The thread, one of track/tracker_process.py, sends what the run's directory has and the tracker lacks. So nothing waits
in memory for a slow tracker, failed sends are retried, and `megagrpo track sync` sends the rest later, in the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from megagrpo.track.delivered import without_password
from megagrpo.track.sink import RunStart, Status

FINISH_TIMEOUT_SECONDS = 60.0
AGAIN_SECONDS, AGAIN_SECONDS_MAX = 1.0, 60.0
"""Seconds between two attempts: after the first failure, and at most."""
LOOK_SECONDS = 10.0
"""Seconds between two looks for new lines and files."""


class Remote(Protocol):
    """A tracker's copy of a run. One thread calls the methods, which raise the errors of the tracker's library."""

    def bring(self) -> None:
        """Sends what is new in the run's directory. Retries, without harm, what failed before."""

    def rewind(self, step: int) -> None:
        """Rewinds to `step`: the run repeats the steps after it."""

    def finish(self, status: Status) -> None:
        """Sends the rest at the run's end, and the run's status."""


class Behind:
    """A tracker as the run sees it. `say` receives the lines about failures; any thread calls it."""

    def __init__(self, name: str, connect: Callable[[RunStart], Remote], say: Callable[[str], object]) -> None:
        self._name, self._connect, self._say = name, connect, say
        self._wake = threading.Event()
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._rewound: int | None = None
        self.failures = 0  # in a row

    def start(self, run: RunStart) -> None:
        self._run = run
        # A daemon, so that a server that never answers cannot keep a finished run alive.
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def rewind(self, step: int) -> None:
        """Rewinds to `step`: the run repeats the steps after it, in new files."""
        with self._lock:
            self._rewound = step if self._rewound is None else min(step, self._rewound)
        self._wake.set()

    def end(self, status: Status) -> None:
        """Marks the run as ended with `status`; nothing more follows. Does not wait."""
        self._status = status
        self._wake.set()

    def finish(self, until: float) -> bool:
        """Waits, after `end`, until everything is sent or has failed. until: the deadline, of time.monotonic(). Returns
        whether the tracker has everything."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if (late := self._thread.is_alive()) or self.failures:
            why = "has not taken everything yet" if late else "lacks a part of the run"
            self._say(f"{self._name}: {why}; megagrpo track sync {self._run.directory} brings the rest")
        return not (late or self.failures)

    def _work(self) -> None:
        remote: Remote | None = None
        while True:
            self._wake.clear()
            status = self._status
            try:
                remote = remote or self._connect(self._run)
                self._go_back(remote)
                remote.bring()
                if status:
                    remote.finish(status)
            except Exception as error:  # noqa: BLE001  (files, databases and servers fail; none ends the run)
                self._failed(error)
            else:
                if self.failures:
                    self._say(f"{self._name}: has everything again")
                self.failures = 0
            if status:
                return
            self._wait()

    def _go_back(self, remote: Remote) -> None:
        if (step := self._rewound) is None:
            return
        remote.rewind(step)
        with self._lock:
            if self._rewound == step:  # else the run has gone back further by now
                self._rewound = None

    def _wait(self) -> None:
        """Waits until there is more to send; after failures until the next retry, at growing intervals."""
        if not self.failures:
            self._wake.wait(LOOK_SECONDS)
            return
        until = time.monotonic() + min(AGAIN_SECONDS_MAX, AGAIN_SECONDS * 2 ** min(self.failures - 1, 10))
        while self._status is None and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
            if self._status is None:
                self._wake.clear()

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            self._say(
                f"warning: {self._name}: {without_password(cause(error))}; training goes on, and it is tried again"
            )


def cause(error: Exception) -> str:
    """Returns the first line that names the cause: SQLAlchemy begins with the place of the error."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("(raised as a result")]
    return lines[0] if lines else type(error).__name__
