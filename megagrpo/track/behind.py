"""Brings a run to a tracker in a thread behind the steps: no step waits for it, and no failure ends the run.

The thread, one of track/tracker_process.py, brings what is in the run's directory and not yet at the tracker. So
nothing waits in memory for a tracker that is slow, what failed is brought again, and `megagrpo track sync` brings the
rest in the same way, later.
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
"""Between two attempts: after the first failure, and at most."""
LOOK_SECONDS = 10.0
"""How often a thread looks for what is new."""


class Remote(Protocol):
    """A tracker's copy of a run. One thread calls the methods, which raise what the tracker's library raises."""

    def bring(self) -> None:
        """Brings what is new in the run's directory. Brings it again, without harm, where that failed before."""

    def rewind(self, step: int) -> None:
        """The steps after `step` come again."""

    def finish(self, status: Status) -> None:
        """Brings what is there at the end, and how the run ended."""


class Behind:
    """A tracker as the run sees it. `say` receives the lines about failures, by any thread."""

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
        """The steps after `step` come again, in files that are new."""
        with self._lock:
            self._rewound = step if self._rewound is None else min(step, self._rewound)
        self._wake.set()

    def end(self, status: Status) -> None:
        """Nothing more will come. Does not wait."""
        self._status = status
        self._wake.set()

    def finish(self, until: float) -> bool:
        """Waits, after `end`, until everything is brought or could not be. until: at most, of time.monotonic(). Whether
        the tracker has everything."""
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
            except Exception as error:  # noqa: BLE001  (files, databases and servers fail in many ways; none ends the run)
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
        """Until there is more to bring; after failures as long as it takes that they do not become many."""
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
    """The first line that says it: SQLAlchemy begins with where it found it."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("(raised as a result")]
    return lines[0] if lines else type(error).__name__
