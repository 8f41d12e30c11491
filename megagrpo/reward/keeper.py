"""Keepers: each is a process that starts one other process, and ends it with everything that it started.

A keeper runs no code of a user. It passes on a bounded amount of what its process prints. When that process ends or is
to end, or this process ends, the keeper kills all that was started under it, daemons too, and ends as the process did.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

import psutil

from megagrpo.processes.lifetime import end_with_parent

END_SECONDS = 10.0
"""Time for a process to end with all that it started, before its keeper is killed."""
SWEEP_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
)  # fmt: skip
"""Variables that every kept process may see."""
BOOT = """
import json, sys
sys.path[:], arguments = json.loads(sys.argv[1])
from megagrpo.reward import {module}
{module}.{function}(int(sys.argv[2]), *arguments)
"""


def python(module: str, function: str, *arguments: object) -> list[str]:
    """Returns the command that calls a function of reward/ with a file descriptor, the command's next argument."""
    boot = BOOT.format(module=module, function=function)
    return [sys.executable, "-c", boot, json.dumps([sys.path, arguments])]


def environment_of(names: Iterable[str]) -> dict[str, str]:
    """Returns the variables of these names that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


class KeptProcess:
    """A process and its keeper. `socket` is connected to the descriptor that the command gets as its last argument."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | IO[str] | None,
        output_bytes_max: int,
        *,
        apart: bool = False,
    ) -> None:
        """Starts both. output: a file for what the process prints, up to output_bytes_max; the rest is dropped. apart:
        the command begins with bubblewrap."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            # A plain subprocess: multiprocessing would fork a threaded driver or import its main module again.
            self.keeper = subprocess.Popen(
                [*python("keeper", "keep", command, output_bytes_max, apart), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        self.pid = self.keeper.pid

    def tell_to_end(self) -> None:
        """Tells the keeper to end its process and all that this started. Resumes a stopped keeper, so that it can."""
        self.keeper.terminate()
        self.keeper.send_signal(signal.SIGCONT)

    def end(self) -> str:
        """Ends the process and all that it started. Returns how it ended, in words."""
        self.tell_to_end()
        try:
            status = self.keeper.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            status = self.keeper.wait()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


# --- in the keeper ----------------------------------------------------------------------------------------------------


def keep(descriptor: int, command: Sequence[str], output_bytes_max: int, apart: bool = False) -> None:
    """Starts the command, whose last argument becomes this file descriptor, and keeps its process. Never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it can end its children
    os.set_inheritable(descriptor, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned processes become the keeper's children
    end_with_parent(signal.SIGCONT)  # SIGCONT wakes a stopped keeper, which then sees that the driver has ended
    output, printed = os.pipe()
    started = subprocess.Popen(
        [*command, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
        preexec_fn=_begin_kept,
    )
    os.close(printed)
    os.set_blocking(output, False)
    passing = _pass_on(output, output_bytes_max)
    _wait_for_end(started.pid, descriptor, output, passing)
    status = os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])
    if apart and status > 128:  # bubblewrap adds it to the number of the signal that its command died of
        status = 128 - status
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _sweep()
    while next(passing):
        pass
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _begin_kept() -> None:
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _wait_for_end(pid: int, channel: int, output: int, passing: Iterator[bool]) -> None:
    """Passes on the output until the process ends. Kills it on SIGTERM, and when the channel's other end is closed."""
    ended = os.pidfd_open(pid)

    def kill(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself just before
            signal.pidfd_send_signal(ended, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    poll = select.poll()
    poll.register(channel, 0)  # reports only that the driver's end is closed
    poll.register(output, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == ended:
                return
            if descriptor == channel:
                poll.unregister(channel)
                kill()
            elif not next(passing):
                poll.unregister(output)


def _pass_on(output: int, bytes_max: int) -> Iterator[bool]:
    """Passes on the available output at each `next`, up to `bytes_max` in all. Yields whether more may come."""
    left, dropped = bytes_max, 0
    while True:
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            data = b""
        if data and left:
            _say(data[:left])
            if len(data) >= left:
                _say(f"\n[printed more than {bytes_max:,} bytes: the rest is left out]\n".encode())
        dropped += max(0, len(data) - left)
        left = max(0, left - len(data))
        if not data and dropped:
            _say(f"[{dropped:,} bytes were left out]\n".encode())
            dropped = 0
        yield bool(data)


def _say(data: bytes) -> None:
    with contextlib.suppress(OSError):  # its reader is gone
        os.write(2, data)


def _sweep() -> None:
    """Kills all that is left under this process."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
        except ChildProcessError:
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.002)
