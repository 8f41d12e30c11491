"""A process that ends with the one that started it, also while it is stopped and cannot see that end."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process the signal when the thread that started it has ended. Linux only. Children of this
    process do not inherit it."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() == 1:  # the parent ended before prctl
        os.kill(os.getpid(), number)
