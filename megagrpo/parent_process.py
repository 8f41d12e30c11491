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


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process the signal when the thread that started it has ended. Linux only. Children of this
    process do not inherit it."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() == 1:  # the parent ended before prctl
        os.kill(os.getpid(), number)


def let_family_idle(pid: int, idle: bool = True) -> None:
    """All threads of a process of this user and of its children, whose sessions are their own, run while a core has
    nothing else to do, and give it up at once (SCHED_IDLE); or as others again: then this process must be root's, else
    they keep what they have. Linux may weigh sessions against each other (autogroup): theirs get the least weight."""
    policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
    with suppress(psutil.Error, OSError):  # that, another kernel, or a process or thread that has ended
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for thread in process.threads():
                os.sched_setscheduler(thread.id, policy, os.sched_param(0))
            Path(f"/proc/{process.pid}/autogroup").write_text("19" if idle else "0")
