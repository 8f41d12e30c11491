"""Worker processes for reward functions that may hang, crash, or be async: every response gets an outcome.

A worker runs one synchronous call, or up to `ASYNC_AT_ONCE` async ones, at a time. When it dies or hangs, the responses
that it was working on are known. If it was one, that response is an error. If there were several, each is run again
alone, so that only the one that caused it fails.

A worker answers with a line of JSON of bounded length, checked before it is used: a function can write anything into
its process's sockets. Functions see only the environment variables in ENVIRONMENT and those that the recipe names, and
where bubblewrap works no process but their own.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.executors import CHECK_SECONDS, Calls, Executor, Outcomes, Specs, fail, waited
from megagrpo.reward.functions import Outcome, Signature, Task, checked_outcome, timed_out, with_source
from megagrpo.reward.keeper import ENVIRONMENT, KeptProcess, environment_of, python
from megagrpo.timeline import TIMELINE
from megagrpo.user_functions import IMPORTED

if TYPE_CHECKING:
    from megagrpo.recipe.schema import RewardConfig

ASYNC_AT_ONCE = 64
START_TIMEOUT_SECONDS = 60.0
ASYNC_GRACE_SECONDS = 1.0
"""A worker cancels its own async calls at the time limit; it is killed only if it has not done so this much later."""

ANSWER_BYTES_MAX = 1 << 20
APART_SECONDS = 10.0
OUTPUT_BYTES_MAX = 1 << 20
"""Most bytes that the functions of one worker may print in all; the rest is read and dropped."""


@dataclass(frozen=True)
class Limits:
    """The limits of a worker's functions, and the environment variables that they see."""

    timeout_seconds: float
    memory_bytes: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those in ENVIRONMENT, with the driver's values."""


def limits_of(reward: RewardConfig) -> Limits:
    return Limits(reward.timeout_seconds, int(reward.memory_gib * 2**30), environment_of(reward.environment))


class Loaded(BaseModel):
    """The first message of a worker."""

    problems: list[Problem]
    functions: list[Signature]


class Answer(BaseModel):
    """Any other message of a worker."""

    number: int
    outcomes: list[Outcome]


@dataclass
class Call:
    """A call of a function, and while it is in flight its times on time.monotonic's clock."""

    function: int
    task: Task
    future: Outcomes
    begun: float = 0.0
    deadline: float = 0.0

    def settle(self, outcomes: list[Outcome]) -> None:
        """Gives the outcomes to the future. Raises CancelledError if it is cancelled."""
        if not self.future.set_running_or_notify_cancel():
            raise CancelledError
        self.future.set_result(outcomes)


class Worker:
    """A keeper with its worker and the calls in flight. `ready` once its functions are loaded."""

    def __init__(self, specs: Specs, limits: Limits) -> None:
        apart = processes_apart()
        self.process = KeptProcess(
            [*apart, *python("worker_process", "work")],
            environment_of(ENVIRONMENT) | dict(limits.environment),
            sys.__stderr__,  # prints of functions must not mix with the program's own output
            OUTPUT_BYTES_MAX,
            apart=bool(apart),
        )
        # A worker that does not read must not block the pool for ever: sending gives up at the time limit.
        send_seconds = 1 + int(limits.timeout_seconds)
        self.process.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_seconds, 0))
        self.connection = Connection(self.process.socket.detach())
        self.timeout_seconds = limits.timeout_seconds
        self.ready = False
        self.functions: dict[int, Signature] = {}
        self.in_flight: dict[int, Call] = {}
        """Calls by their numbers in messages."""
        self._numbers = count()
        self.alone = False
        self.broken = False
        self.start_deadline = time.monotonic() + START_TIMEOUT_SECONDS
        self.specs = specs
        self._unread = b""
        self._write((specs, limits.timeout_seconds, limits.memory_bytes))

    @property
    def deadline(self) -> float:
        """Returns the time at which the worker is given up, on time.monotonic's clock."""
        if self.broken:
            return 0.0
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.in_flight.values()), default=float("inf"))

    def receive(self) -> list[bytes]:
        """Returns the messages that have arrived whole. Raises EOFError if it died, ValueError for bad data."""
        data = os.read(self.connection.fileno(), 1 << 16)
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        if max(map(len, [*lines, self._unread])) > ANSWER_BYTES_MAX:
            raise ValueError(f"more than {ANSWER_BYTES_MAX:,} bytes")
        return lines

    def take(self, message: bytes) -> None:
        """Reads a message: the first tells what is loaded, any other settles a call. Raises RewardError if a function
        cannot be loaded, ValueError for bad messages."""
        if not self.ready:
            loaded = Loaded.model_validate_json(message, strict=True)
            if loaded.problems:
                raise RewardError(loaded.problems)
            if len(loaded.functions) != len(self.specs):
                raise ValueError("another number of functions")
            self.functions, self.ready = dict(zip(self.specs, loaded.functions, strict=True)), True
            return
        answer = Answer.model_validate_json(message, strict=True)
        call = self.in_flight.get(answer.number)
        if call is None or len(answer.outcomes) != len(call.task.samples):
            raise ValueError("an answer to no call, or outcomes of another number of responses")
        checked = list(map(checked_outcome, answer.outcomes))
        TIMELINE.record("reward workers", self.specs[call.function].name, call.begun, time.monotonic())
        del self.in_flight[answer.number]
        self.alone = False
        call.settle(checked)

    def send(self, call: Call) -> None:
        function, number = self.functions[call.function], next(self._numbers)
        call.begun = time.monotonic()
        call.deadline = call.begun + self.timeout_seconds + (ASYNC_GRACE_SECONDS if function.is_async else 0.0)
        self.in_flight[number] = call
        self._write((number, call.function, call.task.arguments(function.wanted), len(call.task.samples)))

    def _write(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:  # dead, or not reading
            self.broken = True

    def kill(self) -> str:
        """Ends the process and all that it started. Returns how it ended, in words."""
        how = self.process.end()
        self.connection.close()
        return how


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


class WorkerPool(Executor):
    """`workers` processes, each with all of `specs` loaded. They start when they are first needed and after a failure.

    A thread of its own runs the calls of one `submit` after the other.
    """

    def __init__(self, specs: Specs, workers: int, limits: Limits) -> None:
        self.specs = dict(specs)
        self.size = workers
        self.limits = limits
        self._workers: list[Worker] = []
        self._waiting: deque[Call] = deque()
        self._suspects: deque[Call] = deque()
        """Calls in flight together when their worker was lost: each is made again alone."""
        self._thread = ThreadPoolExecutor(1, "reward workers")

    @classmethod
    def of(cls, specs: Specs, reward: RewardConfig) -> WorkerPool:
        """Makes a pool with the limits of a recipe. Reads the users' files. Raises RewardError if one is missing."""
        return cls({number: with_source(spec) for number, spec in specs.items()}, reward.workers, limits_of(reward))

    def by_group(self, check: Callable[[], None] = lambda: None) -> dict[int, bool]:
        """Waits until a worker has loaded the functions."""
        loaded: Future[dict[int, bool]] = Future()
        self._thread.submit(self._load, loaded)
        return waited(loaded, check)

    def submit(self, calls: Calls) -> list[Outcomes]:
        """Starts the calls. All are over after about len(calls) x timeout_seconds / workers."""
        futures = [Outcomes() for _ in calls]
        self.run(calls, futures)
        return futures

    def run(self, calls: Calls, futures: Sequence[Outcomes]) -> Future[None]:
        """Starts the calls, whose futures these are. Returns a future of the end of all."""
        return self._thread.submit(self._run, calls, futures)

    def close(self) -> None:
        self._thread.submit(self._kill_all).result()

    def workers(self) -> list[Worker]:
        """Starts the missing workers. Returns all workers."""
        while len(self._workers) < self.size:
            self._workers.append(Worker(self.specs, self.limits))
        return self._workers

    def remove(self, worker: Worker) -> str:
        self._workers.remove(worker)
        return worker.kill()

    def _load(self, loaded: Future[dict[int, bool]]) -> None:
        try:
            while not (ready := [worker for worker in self.workers() if worker.ready]):
                if loaded.cancelled():
                    raise CancelledError
                self._wait()
            if loaded.set_running_or_notify_cancel():
                loaded.set_result({number: function.by_group for number, function in ready[0].functions.items()})
        except BaseException as error:  # noqa: BLE001
            self._kill_all()
            fail([loaded], error)

    def _run(self, calls: Calls, futures: Sequence[Outcomes]) -> None:
        for worker in [worker for worker in self._workers if worker.process.keeper.poll() is not None]:
            self.remove(worker)  # it died while idle, so no response is to blame
        try:
            self._waiting.extend(Call(*call, future) for call, future in zip(calls, futures, strict=True))
            while self._waiting or self._suspects or any(worker.in_flight for worker in self._workers):
                for worker in self.workers():
                    self._assign(worker)
                in_flight = (call for worker in self._workers for call in worker.in_flight.values())
                # All are cancelled together, so the first waiting call decides.
                looked_at = (*in_flight, *islice(self._waiting, 1), *islice(self._suspects, 1))
                if any(call.future.cancelled() for call in looked_at):
                    raise CancelledError
                self._wait()
        except BaseException as error:  # noqa: BLE001
            self._kill_all()  # calls may be in flight: no later run may see their answers
            fail(futures, error)

    def _kill_all(self) -> None:
        self._waiting.clear()
        self._suspects.clear()
        for worker in self._workers:
            worker.process.tell_to_end()
        while self._workers:
            self._workers.pop().kill()

    def _wait(self) -> None:
        """Waits for a message, a deadline or CHECK_SECONDS. Reads the messages and ends the late workers."""
        workers = self.workers()
        first_deadline = min(worker.deadline for worker in workers)
        seconds = min(CHECK_SECONDS, max(0.0, first_deadline - time.monotonic()))
        readable = wait([worker.connection for worker in workers], seconds)
        for worker in list(workers):
            if worker.connection in readable:
                self._read(worker)
            elif worker.deadline <= time.monotonic():
                late = f"not ready after {START_TIMEOUT_SECONDS:g} s"
                self._lose(worker, timed_out(self.limits.timeout_seconds), late)

    def _assign(self, worker: Worker) -> None:
        while worker.ready and not (worker.alone or worker.broken) and len(worker.in_flight) < ASYNC_AT_ONCE:
            queue = self._suspects if self._suspects and not worker.in_flight else self._waiting
            if not queue:
                return
            alone = queue is self._suspects or not worker.functions[queue[0].function].is_async
            if alone and worker.in_flight:
                return
            worker.alone = alone
            worker.send(queue.popleft())

    def _read(self, worker: Worker) -> None:
        try:
            for message in worker.receive():
                worker.take(message)
        except (EOFError, OSError):
            self._lose(worker, None, "its process died")
        except ValueError as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            garbage = f"its process sent an invalid answer ({reason})"
            self._lose(worker, Outcome(None, error=garbage), garbage)

    def _lose(self, worker: Worker, outcome: Outcome | None, start_reason: str) -> None:
        """Ends a worker that died or is late and settles its calls in flight. `outcome`: its error, None if it died."""
        calls = list(worker.in_flight.values())
        how = self.remove(worker)
        if not worker.ready:
            names = ", ".join(spec.function for spec in worker.specs.values())
            where = f"the reward functions {names} cannot be loaded"
            raise RewardError(Problem(where, given=f"{start_reason} ({how})", needed=IMPORTED))
        if len(calls) > 1:
            self._suspects.extend(calls)
        elif calls:
            died = Outcome(None, error=f"the reward's process died ({how})")
            calls[0].settle([outcome or died] * len(calls[0].task.samples))
