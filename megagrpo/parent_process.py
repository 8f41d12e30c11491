"""What a process that helps another owes to it: its end, also while it is stopped and cannot see that end; and the time
that the other has no use for."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PARENT_DEATH_SIGNAL = 1  # of prctl(2)
NICENESS = 19
"""Beside two processes that fill two cores one of this niceness gets some 2 % of a core."""


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process the signal when the thread that started it has ended. Linux only. Children of this
    process do not inherit it."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() == 1:  # the parent ended before prctl
        os.kill(os.getpid(), number)


def weigh_least(pid: int) -> None:
    """Gives a process of this user, which has a session of its own, the lowest priority. Linux may weigh sessions
    against each other (autogroup); niceness then counts inside of a session only."""
    with suppress(OSError):  # it has ended, or another kernel
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))
