"""Linux calls for helper processes: to end a helper with its parent, even while the helper is stopped, and to run it
only on idle cores."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to send this process the signal when the thread that started it has ended. Linux only. Children
    of this process do not inherit it."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() == 1:  # the parent ended before prctl
        os.kill(os.getpid(), number)


def let_family_idle(pid: int, idle: bool = True) -> None:
    """Lets a process of this user and its children, whose sessions are their own, run only while a core is idle. Their
    threads yield it at once (SCHED_IDLE). idle=False restores SCHED_OTHER: this process must be root's, else they
    keep SCHED_IDLE. Linux may weigh sessions against each other (autogroup): theirs get the least weight."""
    policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
    with suppress(psutil.Error, OSError):  # that, another kernel, or a process or thread that has ended
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for thread in process.threads():
                os.sched_setscheduler(thread.id, policy, os.sched_param(0))
            Path(f"/proc/{process.pid}/autogroup").write_text("19" if idle else "0")
