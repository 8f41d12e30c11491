"""Worker processes for reward functions that may hang, crash, or be async: every response gets an outcome.

A worker runs one synchronous call, or up to `ASYNC_AT_ONCE` async ones, at a time. When it dies or hangs, the responses
that it was working on are known. If it was one, that response is an error. If there were several, each is run again
alone, so that only the one that caused it fails.

A worker answers with a line of JSON of bounded length, checked before it is used: a function can write anything into
its process's sockets. Functions see only the environment variables in ENVIRONMENT and those that the recipe names, and
where bubblewrap works no process but their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from megagrpo.errors import Problem, RewardError
from megagrpo.progress import progress
from megagrpo.reward import worker_process
from megagrpo.reward.functions import FunctionSpec, Outcome, Task, checked_outcome, timed_out
from megagrpo.timeline import TIMELINE
from megagrpo.user_functions import IMPORTED

ASYNC_AT_ONCE = 64
CHECK_SECONDS = 0.2
START_TIMEOUT_SECONDS = 60.0
ASYNC_GRACE_SECONDS = 1.0
"""A worker cancels its own async calls at the time limit; it is killed only if it has not done so this much later."""

ANSWER_BYTES_MAX = 1 << 20
APART_SECONDS = 10.0
END_SECONDS = 10.0
"""Time for a worker to end with all that its functions started, before it is killed without them."""
ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The limits of a worker's functions, and the environment variables that they see."""

    timeout_seconds: float
    memory_bytes: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those in ENVIRONMENT, with the driver's values."""


@dataclass(frozen=True)
class LoadedFunction:
    """The properties of a loaded function, as its worker reports them."""

    is_async: bool
    wanted: tuple[str, ...]

    @property
    def by_group(self) -> bool:
        """Returns whether one call scores all responses of a group."""
        return "responses" in self.wanted


@dataclass(frozen=True)
class Call:
    """A call in flight: the index of its function, its number of responses, and its times on time.monotonic's clock."""

    function: int
    responses: int
    begun: float
    deadline: float


class Worker:
    """A keeper with its worker and the calls in flight. `ready` once its functions are loaded."""

    def __init__(self, specs: Sequence[FunctionSpec], limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A plain subprocess: multiprocessing would fork a threaded driver or import its main module again.
            self.process = subprocess.Popen(
                worker_process.python("main", theirs.fileno(), processes_apart()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,  # what a function prints must not mix with the program's own output
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | dict(limits.environment),
                start_new_session=True,
            )
        # A worker that does not read must not block the pool for ever: sending gives up at the time limit.
        send_seconds = 1 + int(limits.timeout_seconds)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_seconds, 0))
        self.connection = Connection(ours.detach())
        self.timeout_seconds = limits.timeout_seconds
        self.ready = False
        self.functions: tuple[LoadedFunction, ...] = ()
        self.in_flight: dict[int, Call] = {}  # by number
        self.alone = False
        self.broken = False
        self.start_deadline = time.monotonic() + START_TIMEOUT_SECONDS
        self.specs = tuple(specs)
        self._unread = b""
        self._write((list(specs), limits.timeout_seconds, limits.memory_bytes))

    @property
    def deadline(self) -> float:
        """Returns the time at which the worker is given up, on time.monotonic's clock."""
        if self.broken:
            return 0.0
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.in_flight.values()), default=float("inf"))

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived whole. Raises EOFError if it died, ValueError for bad data."""
        data = os.read(self.connection.fileno(), 1 << 16)
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        if max(map(len, [*lines, self._unread])) > ANSWER_BYTES_MAX:
            raise ValueError(f"more than {ANSWER_BYTES_MAX:,} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError:
            raise ValueError("lists in lists without end") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("JSON, but no object")
        return messages

    def greet(self, message: dict[str, Any]) -> None:
        """Reads the first message. Raises RewardError if a function cannot be loaded, ValueError for bad messages."""
        try:
            problems = [
                Problem(**{str(key): str(value) for key, value in given.items()}) for given in message["problems"]
            ]
            functions = tuple(
                LoadedFunction(bool(given["is_async"]), tuple(map(str, given["wanted"])))
                for given in message["functions"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if problems:
            raise RewardError(problems)
        if len(functions) != len(self.specs):
            raise ValueError("another number of functions")
        self.functions, self.ready = functions, True

    def take(self, message: dict[str, Any]) -> tuple[int, list[Outcome]]:
        """Returns the number of the call that a message answers, and its outcomes. Raises ValueError otherwise."""
        number, outcomes = message.get("number"), message.get("outcomes")
        if type(number) is not int or number not in self.in_flight:
            raise ValueError("an answer to no call")
        if not isinstance(outcomes, list) or not all(isinstance(outcome, dict) for outcome in outcomes):
            raise ValueError("an answer without outcomes")
        call = self.in_flight[number]
        if len(outcomes) != call.responses:
            raise ValueError("outcomes of another number of responses")
        checked = list(map(checked_outcome, outcomes))
        TIMELINE.record("reward workers", self.specs[call.function].name, call.begun, time.monotonic())
        del self.in_flight[number]
        self.alone = False
        return number, checked

    def start_failure(self, reason: str) -> RewardError:
        where = f"the reward functions {', '.join(spec.function for spec in self.specs)} cannot be loaded"
        return RewardError(Problem(where, given=reason, needed=IMPORTED))

    def send(self, number: int, function: int, task: Task) -> None:
        loaded, responses = self.functions[function], len(task.samples)
        grace = ASYNC_GRACE_SECONDS if loaded.is_async else 0.0
        now = time.monotonic()
        self.in_flight[number] = Call(function, responses, now, now + self.timeout_seconds + grace)
        self._write((number, function, task.arguments(loaded.wanted), responses))

    def _write(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:  # dead, or not reading
            self.broken = True

    def kill(self) -> int:
        """Ends the process and all that it started. Returns its exit status."""
        worker_process.tell_to_end(self.process)
        try:
            status = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            status = self.process.wait()
        self.connection.close()
        return status


@lru_cache
def processes_apart() -> tuple[str, ...]:
    """Returns the bubblewrap command that gives a worker its own processes and /proc, empty where it does not work."""
    options = ("--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent", "--")
    command = (shutil.which("bwrap") or "", *options)
    try:
        works = subprocess.run([*command, "true"], capture_output=True, timeout=APART_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return command if works else ()


class RewardPool(Protocol):
    """The processes that score: a WorkerPool, or one on each node."""

    def start(self, check: Callable[[], None] = lambda: None) -> tuple[LoadedFunction, ...]: ...
    def run(
        self, calls: Sequence[tuple[int, Task]], check: Callable[[], None] = lambda: None
    ) -> list[list[Outcome]]: ...
    def close(self) -> None: ...


class WorkerPool:
    """`workers` processes, each with all of `specs` loaded. They start at the first `run` and after a failure."""

    def __init__(self, specs: Sequence[FunctionSpec], workers: int, limits: Limits) -> None:
        self.specs = tuple(specs)
        self.size = workers
        self.limits = limits
        self._workers: list[Worker] = []
        self._lock = threading.Lock()

    def run(self, calls: Sequence[tuple[int, Task]], check: Callable[[], None] = lambda: None) -> list[list[Outcome]]:
        """Returns the outcomes of each call (index of the function, task), in order: one per response of the call.

        `check` is called a few times a second; an exception from it ends the run.
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

    def start(self, check: Callable[[], None] = lambda: None) -> tuple[LoadedFunction, ...]:
        """Waits until a worker has loaded the functions. Returns their properties. Raises RewardError if one cannot be
        loaded."""
        if not self.specs:
            return ()
        with self._lock:
            starting = _Run(self, [], check)
            try:
                while not (ready := [worker for worker in self.workers() if worker.ready]):
                    check()
                    starting.wait()
            except BaseException:
                self._kill_all()
                raise
            return ready[0].functions

    def close(self) -> None:
        with self._lock:
            self._kill_all()

    def workers(self) -> list[Worker]:
        """Starts the missing workers. Returns all workers."""
        while len(self._workers) < self.size:
            self._workers.append(Worker(self.specs, self.limits))
        return self._workers

    def remove(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.kill()

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker_process.tell_to_end(worker.process)
        while self._workers:
            self._workers.pop().kill()


class _Run:
    """The state of one WorkerPool.run."""

    def __init__(self, pool: WorkerPool, calls: Sequence[tuple[int, Task]], check: Callable[[], None]) -> None:
        self.pool = pool
        self.calls = calls
        self.check = check
        self.waiting = deque(range(len(calls)))
        self.suspects: deque[int] = deque()  # in flight together when their worker was lost: each to be run alone
        self.done: dict[int, list[Outcome]] = {}

    def outcomes(self) -> list[list[Outcome]]:
        with progress("scoring", len(self.calls), "calls") as work:
            while len(self.done) < len(self.calls):
                for worker in self.pool.workers():
                    self._assign(worker)
                self.check()
                self.wait()
                work.done = len(self.done)
        return [self.done[number] for number in range(len(self.calls))]

    def wait(self) -> None:
        """Waits for a message, a deadline or CHECK_SECONDS. Reads the messages and ends the late workers."""
        workers = self.pool.workers()
        first_deadline = min(worker.deadline for worker in workers)
        seconds = min(CHECK_SECONDS, max(0.0, first_deadline - time.monotonic()))
        readable = wait([worker.connection for worker in workers], seconds)
        for worker in list(workers):
            if worker.connection in readable:
                self._read(worker)
            elif worker.deadline <= time.monotonic():
                self._lose(worker, timed_out(self.pool.limits.timeout_seconds), _not_ready())

    def _assign(self, worker: Worker) -> None:
        if not worker.ready or worker.alone or worker.broken:
            return
        if self.suspects and not worker.in_flight:
            worker.alone = True
            number = self.suspects.popleft()
            worker.send(number, *self.calls[number])
            return
        while self.waiting and len(worker.in_flight) < ASYNC_AT_ONCE and not worker.broken:
            is_async = worker.functions[self.calls[self.waiting[0]][0]].is_async
            if worker.in_flight and not is_async:
                return
            number = self.waiting.popleft()
            worker.send(number, *self.calls[number])
            if not is_async:
                worker.alone = True
                return

    def _read(self, worker: Worker) -> None:
        try:
            for message in worker.receive():
                if worker.ready:
                    number, outcomes = worker.take(message)
                    self.done[number] = outcomes
                else:
                    worker.greet(message)
        except (EOFError, OSError):
            self._lose(worker, None, "its process died")
        except ValueError as error:
            garbage = f"its process sent what is no answer ({error})"
            self._lose(worker, Outcome(None, error=garbage), garbage)

    def _lose(self, worker: Worker, outcome: Outcome | None, start_reason: str) -> None:
        """Ends a worker that died or is late and settles its calls in flight. `outcome`: its error, None if it died."""
        numbers, ready = list(worker.in_flight), worker.ready
        status = self.pool.remove(worker)
        if not ready:
            raise worker.start_failure(f"{start_reason} ({_exit_words(status)})")
        if len(numbers) > 1:
            self.suspects.extend(numbers)
        elif numbers:
            died = Outcome(None, error=f"the reward's process died ({_exit_words(status)})")
            self.done[numbers[0]] = [outcome or died] * len(self.calls[numbers[0]][1].samples)


def load_problems(specs: Sequence[FunctionSpec], limits: Limits) -> list[Problem]:
    """Returns the problems found by loading these functions in a process, which is ended afterwards."""
    pool = WorkerPool(specs, workers=1, limits=limits)
    try:
        pool.start()
    except RewardError as error:
        return list(error.problems)
    finally:
        pool.close()
    return []


def _not_ready() -> str:
    return f"not ready after {START_TIMEOUT_SECONDS:g} s"


def _exit_words(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
