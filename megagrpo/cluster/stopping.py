"""Requests to stop a run, from a scheduler whose time limit is near or by hand, and the points where it stops."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megagrpo.errors import Problem, RunStopped

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
AT_ONCE = (signal.SIGTERM, signal.SIGHUP)
"""A second one of these, after a first, ends the process. SIGHUP comes when a terminal is closed."""


class StopRequested(BaseException):
    """A request to give up the current work: the run was told to stop. Like KeyboardInterrupt, it is no failure."""


class Stopping:
    """A record of a stop signal, kept until the run can stop without losing or half doing anything.

    Inside `until_stopped`, on the main thread, it handles SIGNALS: the handler only notes the signal, and the run looks
    at the note at safe points. A second one of AT_ONCE ends the process at once.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._may_give_up = False

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Wraps work that leaves nothing lasting: a stop, requested in it or before it, gives the work up."""
        self.stop_here()
        self._may_give_up = True
        try:
            yield
        finally:
            self._may_give_up = False

    @contextmanager
    def while_ray_starts(self) -> Iterator[None]:
        """Wraps ray.init, which installs a handler that exits at SIGTERM. Installs our handlers again afterwards.

        Ray's processes inherit that SIGHUP is ignored: a closed terminal must leave them to the run.
        """
        hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            yield
        except SystemExit:
            raise StopRequested from None
        finally:
            signal.signal(signal.SIGHUP, hangup)
        self.handle_signals()

    def stop_here(self) -> None:
        """Raises StopRequested if the run was told to stop."""
        if self.requested:
            raise StopRequested

    def check(self) -> None:
        """Calls stop_here, if inside `giving_up` and in the main thread. Every wait calls this a few times a second."""
        if self._may_give_up and threading.current_thread() is threading.main_thread():
            self.stop_here()

    def handle_signals(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal not in AT_ONCE:
            self.signal = signal.Signals(number)


def end_at_second(numbers: socket.socket) -> None:
    """Ends the process at the second signal of AT_ONCE, also while the main thread is inside Ray and handles none."""
    seen = 0
    while received := numbers.recv(1):
        seen += received[0] in AT_ONCE
        if seen > 1:
            os._exit(128 + received[0])


@contextmanager
def until_stopped(newest: Callable[[], Path | None]) -> Iterator[Stopping]:
    """Handles stop signals during a run. Raises RunStopped if one came; `newest` then finds the newest checkpoint."""
    stopping, before = Stopping(), {number: signal.getsignal(number) for number in SIGNALS}
    numbers, noted = socket.socketpair()
    noted.setblocking(False)
    woken_before = signal.set_wakeup_fd(noted.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=end_at_second, args=(numbers,), name="second signal", daemon=True).start()
    stopping.handle_signals()
    try:
        yield stopping
    except StopRequested:
        given, checkpoint = "no step was finished: there is nothing to save", newest()
        if checkpoint:
            given = f"everything up to the newest checkpoint is saved: {checkpoint}"
        fix = "start the same command again: it continues with the same numbers"
        where = f"stopped by {(stopping.signal or signal.SIGTERM).name}"
        raise RunStopped(Problem(where, given, fix=fix)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken_before)
        noted.close()
