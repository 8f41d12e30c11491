"""What a process that helps another owes to it: its end, also while it is stopped and cannot see that end; and the time
that the other has no use for."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

PARENT_DEATH_SIGNAL = 1  # of prctl(2)
NICENESS = 19
"""Beside two processes that fill two cores one of this niceness gets some 2 % of a core."""


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process the signal when the thread that started it has ended. Linux only. Children of this
    process do not inherit it."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() == 1:  # the parent ended before prctl
        os.kill(os.getpid(), number)


def weigh_family(pid: int, niceness: int) -> None:
    """Gives all threads of a process of this user and of its children, whose sessions are their own, a niceness from 0
    to NICENESS. Linux may weigh sessions against each other (autogroup); niceness then counts inside of a session only.
    For less than they have, this process must be root's: else they keep what they have."""
    with suppress(psutil.Error, OSError):  # that, another kernel, or a process or thread that has ended
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for thread in process.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, niceness)
            Path(f"/proc/{process.pid}/autogroup").write_text(str(niceness))
