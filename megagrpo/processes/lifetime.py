"""Helper processes: they end with their parent, even while they are stopped, and run on idle cores alone; shells remove
or end what a killed process leaves."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

PARENT_DEATH_SIGNAL = 1  # of prctl(2)
REMOVE = 'exec rm -rf -- "$1"'
END = 'for it; do [ "$(sed "s/.*) //" /proc/${it%:*}/stat | cut -d " " -f 20)" = ${it#*:} ] && kill -9 ${it%:*}; done'


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


def remove_after_me(path: Path) -> BinaryIO:
    """Starts a shell, no child of this process, that removes the path once the pipe that is returned is closed: at the
    latest when this process has ended, however it ends."""
    return _after_me(REMOVE, str(path))


def end_after_me(processes: Iterable[int]) -> BinaryIO:
    """Starts a shell like remove_after_me's that kills the processes, unless their numbers then belong to others."""
    began = []
    for process in processes:
        with suppress(OSError):  # it has ended
            stat = Path(f"/proc/{process}/stat").read_text()
            began.append(f"{process}:{stat.rpartition(') ')[2].split()[19]}")
    return _after_me(END, *began)


def _after_me(command: str, *arguments: str) -> BinaryIO:
    reading, writing = os.pipe()
    shell = f'exec 3<&0; (trap "" INT TERM HUP; read _ <&3; {command}) >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", shell, "sh", *arguments], stdin=reading, start_new_session=True, check=True)
    os.close(reading)
    return os.fdopen(writing, "wb")
