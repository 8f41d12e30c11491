"""Worker processes for reward functions that may hang, crash, or be async: every response gets an outcome.

A worker runs one synchronous call, or up to `ASYNC_AT_ONCE` async ones, at a time. When it dies or hangs, the responses
that it was working on are known. If it was one, that response is an error. If there were several, each is run again
alone, so that only the one that caused it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.functions import (
    FunctionSpec,
    Outcome,
    RewardCallable,
    Task,
    call,
    failure_of,
    load,
    outcome_of,
    timed_out,
)

ASYNC_AT_ONCE = 64
CHECK_SECONDS = 0.2
START_TIMEOUT_SECONDS = 60.0
ASYNC_GRACE_SECONDS = 1.0
"""A worker cancels its own async calls at the time limit; it is killed only if it has not done so this much later."""

_BOOT = """
import sys, json
sys.path[:] = json.loads(sys.argv[2])
from megagrpo.reward.workers import worker_main
worker_main(int(sys.argv[1]))
"""


class Worker:
    """One process and what it is working on. `ready` once its functions are loaded."""

    def __init__(self, specs: Sequence[FunctionSpec], timeout_seconds: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A plain subprocess: multiprocessing would fork a threaded driver or import its main module again.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it starts is killed with it
            )
        # A worker that does not read must not block the pool for ever: sending gives up at the time limit.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1 + int(timeout_seconds), 0))
        self.connection = Connection(ours.detach())
        self.timeout_seconds = timeout_seconds
        self.ready = False
        self.is_async: tuple[bool, ...] = ()
        self.in_flight: dict[int, float] = {}  # number of the task: its deadline
        self.alone = False
        self.broken = False
        self.start_deadline = time.monotonic() + START_TIMEOUT_SECONDS
        self.specs = tuple(specs)
        self._write((list(specs), timeout_seconds))

    @property
    def deadline(self) -> float:
        """When to give it up, on time.monotonic's clock."""
        if self.broken:
            return 0.0
        if not self.ready:
            return self.start_deadline
        return min(self.in_flight.values(), default=float("inf"))

    def greet(self, message: tuple[list[Problem], tuple[bool, ...]]) -> None:
        """Takes the first message. Raises RewardError if a function cannot be loaded."""
        problems, self.is_async = message
        if problems:
            raise RewardError(problems)
        self.ready = True

    def start_failure(self, reason: str) -> RewardError:
        where = f"the reward functions {', '.join(spec.function for spec in self.specs)} cannot be loaded"
        return RewardError(Problem(where, given=reason, needed="a file that can be imported"))

    def send(self, number: int, function: int, task: Task) -> None:
        grace = ASYNC_GRACE_SECONDS if self.is_async[function] else 0.0
        self.in_flight[number] = time.monotonic() + self.timeout_seconds + grace
        self._write((number, function, task))

    def _write(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:  # dead, or not reading
            self.broken = True

    def kill(self) -> int:
        """Ends the process and all that it started; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class WorkerPool:
    """`workers` processes, each with all of `specs` loaded. They start at the first `run` and after a failure."""

    def __init__(self, specs: Sequence[FunctionSpec], *, workers: int, timeout_seconds: float) -> None:
        self.specs = tuple(specs)
        self.size = workers
        self.timeout_seconds = timeout_seconds
        self._workers: list[Worker] = []
        self._lock = threading.Lock()

    def run(self, calls: Sequence[tuple[int, Task]], check: Callable[[], None] = lambda: None) -> list[Outcome]:
        """The outcome of each call (index of the function, task), in order.

        `check` is called a few times a second; what it raises ends the run.
        Takes at most about len(calls) x timeout_seconds / workers. Raises RewardError if a function cannot be loaded.
        """
        with self._lock:
            for worker in [w for w in self._workers if w.process.poll() is not None]:
                self.remove(worker)  # it died while idle, so no response is to blame
            try:
                return _Run(self, calls, check).outcomes()
            except BaseException:
                self._kill_all()  # tasks of this run may be in flight: no later run may see their answers
                raise

    def close(self) -> None:
        with self._lock:
            self._kill_all()

    def workers(self) -> list[Worker]:
        """All of them, with those that are missing started."""
        while len(self._workers) < self.size:
            self._workers.append(Worker(self.specs, self.timeout_seconds))
        return self._workers

    def remove(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.kill()

    def _kill_all(self) -> None:
        while self._workers:
            self._workers.pop().kill()


class _Run:
    """One call of WorkerPool.run."""

    def __init__(self, pool: WorkerPool, calls: Sequence[tuple[int, Task]], check: Callable[[], None]) -> None:
        self.pool = pool
        self.calls = calls
        self.check = check
        self.waiting = deque(range(len(calls)))
        self.suspects: deque[int] = deque()  # in flight together when their worker was lost: each to be run alone
        self.done: dict[int, Outcome] = {}

    def outcomes(self) -> list[Outcome]:
        while len(self.done) < len(self.calls):
            workers = self.pool.workers()
            for worker in workers:
                self._assign(worker)
            self.check()
            first_deadline = min(worker.deadline for worker in workers)
            seconds = min(CHECK_SECONDS, max(0.0, first_deadline - time.monotonic()))
            readable = wait([worker.connection for worker in workers], seconds)
            for worker in list(workers):
                if worker.connection in readable:
                    self._read(worker)
                elif worker.deadline <= time.monotonic():
                    self._lose(worker, timed_out(self.pool.timeout_seconds), _not_ready())
        return [self.done[number] for number in range(len(self.calls))]

    def _assign(self, worker: Worker) -> None:
        if not worker.ready or worker.alone or worker.broken:
            return
        if self.suspects and not worker.in_flight:
            worker.alone = True
            number = self.suspects.popleft()
            worker.send(number, *self.calls[number])
            return
        while self.waiting and len(worker.in_flight) < ASYNC_AT_ONCE and not worker.broken:
            is_async = worker.is_async[self.calls[self.waiting[0]][0]]
            if worker.in_flight and not is_async:
                return
            number = self.waiting.popleft()
            worker.send(number, *self.calls[number])
            if not is_async:
                worker.alone = True
                return

    def _read(self, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._lose(worker, None, "its process died")
            return
        if not worker.ready:
            worker.greet(message)
            return
        number, outcome = message
        del worker.in_flight[number]
        worker.alone = False
        self.done[number] = outcome

    def _lose(self, worker: Worker, outcome: Outcome | None, start_reason: str) -> None:
        """Ends a worker that died or is late, and settles what it was working on. `outcome` of a late task."""
        numbers, ready = list(worker.in_flight), worker.ready
        status = self.pool.remove(worker)
        if not ready:
            raise worker.start_failure(f"{start_reason} ({_exit_words(status)})")
        if len(numbers) > 1:
            self.suspects.extend(numbers)
        elif numbers:
            died = Outcome(None, error=f"the reward's process died ({_exit_words(status)})")
            self.done[numbers[0]] = outcome or died


def load_problems(specs: Sequence[FunctionSpec]) -> list[Problem]:
    """What is wrong with these functions, found by loading them in a process that is ended afterwards."""
    worker = Worker(specs, timeout_seconds=0.0)
    try:
        if not worker.connection.poll(START_TIMEOUT_SECONDS):
            return list(worker.start_failure(_not_ready()).problems)
        worker.greet(worker.connection.recv())
    except RewardError as error:
        return list(error.problems)
    except (EOFError, OSError):
        return list(worker.start_failure(f"its process died ({_exit_words(worker.kill())})").problems)
    finally:
        worker.kill()
    return []


def _not_ready() -> str:
    return f"not ready after {START_TIMEOUT_SECONDS:g} s"


def _exit_words(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


# --- inside a worker's process ----------------------------------------------------------------------------------------

Message = tuple[int, int, Task]
"""(number of the task, index of the function, the task). The answer is (number, Outcome)."""


def worker_main(descriptor: int) -> None:
    """Serves the connection on this file descriptor: first the specs and the time limit, then messages.

    Synchronous functions block the process; async ones run side by side in its event loop. The process ends when the
    other end of the connection is closed.
    """
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what a user's function prints must not mix with the program's own output
    connection = Connection(descriptor)
    specs, timeout_seconds = connection.recv()
    functions: list[RewardCallable] = []
    problems: list[Problem] = []
    for spec in specs:
        try:
            functions.append(load(spec))
        except RewardError as error:
            problems += error.problems
    connection.send((problems, tuple(inspect.iscoroutinefunction(function) for function in functions)))
    if not problems:
        asyncio.run(_serve(connection, functions, timeout_seconds))


async def _serve(connection: Connection, functions: list[RewardCallable], timeout_seconds: float) -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    threading.Thread(target=_receive, args=(connection, asyncio.get_running_loop(), messages), daemon=True).start()
    running: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks weakly
    while True:
        number, index, task = await messages.get()
        answering = _answer(connection, number, functions[index], task, timeout_seconds)
        if inspect.iscoroutinefunction(functions[index]):
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
    connection: Connection, number: int, function: RewardCallable, task: Task, timeout_seconds: float
) -> None:
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            returned = call(function, task)
            if inspect.isawaitable(returned):
                returned = await returned
        outcome = outcome_of(returned)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  (a user's function can raise anything; it is counted)
        outcome = timed_out(timeout_seconds) if limit.expired() else failure_of(raised)
    connection.send((number, outcome))
