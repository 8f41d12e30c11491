"""The two processes of a reward worker: a keeper, and the worker that it starts, which runs the functions.

The keeper runs no code of a user. It passes on a bounded amount of what functions print, and when the worker ends or is
to end, it kills everything that the functions started, daemons too, and ends as the worker did. Where bubblewrap works,
the worker sees no processes but its own, and so no other's environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import inspect
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, RewardError
from megagrpo.processes.lifetime import end_with_parent
from megagrpo.reward.functions import Function, Outcome, failure_of, load, outcomes_of, timed_out
from megagrpo.user_functions import IMPORTED

OUTPUT_BYTES_MAX = 1 << 20
"""Most bytes that the functions of one worker may print in all; the rest is read and dropped."""
SWEEP_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

Message = tuple[int, int, dict[str, Any], int]
"""(number of the call, index of the function, its arguments by name, how many responses it scores). The answer is a
line of JSON: the number and an Outcome for each response."""


BOOT = """
import sys, json
sys.path[:] = json.loads(sys.argv[2])
from megagrpo.reward import worker_process
worker_process.{function}(int(sys.argv[1]), *json.loads(sys.argv[3]))
"""


def python(function: str, descriptor: int, *arguments: object) -> list[str]:
    """Returns the command that calls a function of this module in a new process."""
    boot = BOOT.format(function=function)
    return [sys.executable, "-c", boot, str(descriptor), json.dumps(sys.path), json.dumps(arguments)]


def tell_to_end(keeper: subprocess.Popen[bytes]) -> None:
    """Tells a keeper to end its process and all that this started. Resumes a stopped keeper, so that it can."""
    keeper.terminate()
    keeper.send_signal(signal.SIGCONT)


def main(descriptor: int, apart: Sequence[str]) -> None:
    """Serves the socket with this file descriptor until its other end is closed. Never returns.

    apart: the bubblewrap command that the worker runs in; empty where there is none.
    """
    output, printed = _begin_keeping(descriptor)
    sys.dont_write_bytecode = True  # beside a user's files, whose functions may import others when they are called
    if apart:
        command = [*apart, *python("work", descriptor)]
        started = subprocess.Popen(
            command, pass_fds=[descriptor], stdout=printed, stderr=printed, preexec_fn=_heed_sigterm
        )
        worker = started.pid
    elif (worker := os.fork()) == 0:
        end_with_parent()
        _heed_sigterm()
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(output)
        os.close(printed)
        work(descriptor)
    os.close(printed)
    _keep(worker, descriptor, output, 128 if apart else None, OUTPUT_BYTES_MAX)


def keep(descriptor: int, command: Sequence[str], output_bytes_max: int) -> None:
    """Keeps the process of another command, whose last argument is this file descriptor. Never returns."""
    output, printed = _begin_keeping(descriptor)
    started = subprocess.Popen(
        [*command, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
        preexec_fn=_heed_sigterm,
    )
    os.close(printed)
    _keep(started.pid, descriptor, output, None, output_bytes_max)


def _begin_keeping(descriptor: int) -> tuple[int, int]:
    """Makes this process a keeper, which blocks SIGTERM until it can end what it starts. Returns both ends of a pipe
    for the printed output."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.set_inheritable(descriptor, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes the keeper's child
    end_with_parent(signal.SIGCONT)  # one that was stopped goes on, and sees that the driver has ended
    return os.pipe()


def _heed_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


# --- the keeper -------------------------------------------------------------------------------------------------------


def _keep(worker: int, channel: int, output: int, died_from: int | None, output_bytes_max: int) -> None:
    """Keeps the worker until it ends. died_from: what bubblewrap adds to the signal number that its command died of."""
    ended = os.pidfd_open(worker)

    def kill_worker(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself just before
            signal.pidfd_send_signal(ended, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_worker)
    _heed_sigterm()
    os.set_blocking(output, False)
    passing = _pass_on(output, output_bytes_max)
    poll = select.poll()
    poll.register(channel, 0)  # says only that the driver's end is closed
    poll.register(output, select.POLLIN)
    poll.register(ended, select.POLLIN)
    running = True
    while running:
        for descriptor, _ in poll.poll():
            if descriptor == ended:
                running = False
            elif descriptor == channel:
                poll.unregister(channel)
                kill_worker()
            elif not next(passing):
                poll.unregister(output)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if died_from is not None and status > died_from:
        status = died_from - status
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


def _pass_on(output: int, bytes_max: int) -> Iterator[bool]:
    """Passes on the output that is there at each `next`, up to `bytes_max` in all. Yields whether more may come."""
    left, dropped = bytes_max, 0
    while True:
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            data = b""
        if data and left:
            _say(data[:left])
            if len(data) >= left:
                _say(f"\n[functions printed more than {bytes_max:,} bytes: the rest is left out]\n".encode())
        dropped += max(0, len(data) - left)
        left = max(0, left - len(data))
        if not data and dropped:
            _say(f"[{dropped:,} bytes that functions printed were left out]\n".encode())
            dropped = 0
        yield bool(data)


def _say(data: bytes) -> None:
    with contextlib.suppress(OSError):  # its reader is gone
        os.write(2, data)


def _sweep() -> None:
    """Kills all that is left under this process."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for child in _children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                time.sleep(0.002)
            continue
        return


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


# --- the worker -------------------------------------------------------------------------------------------------------


def work(descriptor: int) -> None:
    """Serves the socket: first the specs and the limits, then messages. Never returns. Synchronous functions block the
    process; async ones run side by side in its event loop."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    specs, timeout_seconds, memory_bytes = connection.recv()
    Path("/proc/self/oom_score_adj").write_text("1000")  # before engines and ranks
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    functions: list[Function] = []
    problems: list[Problem] = []
    for spec in specs:
        try:
            functions.append(load(spec))
        except RewardError as error:
            problems += error.problems
        except BaseException as raised:  # noqa: BLE001  (a user's file can raise anything, such as KeyboardInterrupt)
            given = f"{spec.function} raised {failure_of(raised).error}"
            problems.append(Problem(f"{spec.where}.function", given, IMPORTED, "correct the file"))
    loaded = [{"is_async": function.is_async, "wanted": function.wanted} for function in functions]
    _send(connection, {"problems": [dataclasses.asdict(problem) for problem in problems], "functions": loaded})
    if not problems:
        asyncio.run(_serve(connection, functions, timeout_seconds))
    os._exit(0)


async def _serve(connection: Connection, functions: list[Function], timeout_seconds: float) -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    threading.Thread(target=_receive, args=(connection, asyncio.get_running_loop(), messages), daemon=True).start()
    running: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks weakly
    worker = os.getpid()
    while True:
        number, index, arguments, responses = await messages.get()
        answering = _answer(connection, number, functions[index], arguments, responses, timeout_seconds, worker)
        if functions[index].is_async:
            started = asyncio.create_task(answering)
            running.add(started)
            started.add_done_callback(running.discard)
        else:
            await answering


def _receive(connection: Connection, loop: asyncio.AbstractEventLoop, messages: asyncio.Queue[Message]) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # whatever a function is doing: its outcome cannot be sent any more
        loop.call_soon_threadsafe(messages.put_nowait, message)


async def _answer(
    connection: Connection,
    number: int,
    function: Function,
    arguments: dict[str, Any],
    responses: int,
    timeout_seconds: float,
    worker: int,
) -> None:
    outcomes: list[Outcome]
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            returned = function.function(**arguments)
            if inspect.isawaitable(returned):
                returned = await returned
        outcomes = outcomes_of(returned, function.by_group, responses)
    except BaseException as raised:  # noqa: BLE001  (a user's function can raise anything; it is counted)
        outcomes = [timed_out(timeout_seconds) if limit.expired() else failure_of(raised)] * responses
    if os.getpid() != worker:
        os._exit(0)  # a copy that the function forked and let return
    _send(connection, {"number": number, "outcomes": list(map(dataclasses.asdict, outcomes))})


def _send(connection: Connection, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(connection.fileno(), data) :]
