"""The rendezvous: a key-value store, hosted by the driver, in which the ends of a weight sync find each other.

It carries announcements, acknowledgements, answers and aborts as JSON, never weights. No call blocks in the store: a
waiting process asks again after a tenth of the time that it has waited, so that an abort or the deadline ends every
wait, with the name of what was missing. The length and types of a value are checked before its use.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, TypeVar

import pydantic
import torch.distributed as dist

from megagrpo.errors import MegagrpoError, Problem, WeightSyncError, brief, first_line
from megagrpo.processes.store import StoreAddress, StoreHost

LONGEST_PAUSE_SECONDS = 0.25
"""The longest pause between two looks at the store, which bears thousands of looks a second by thousands of ranks."""
BYTES_MAX = 2**26
"""The longest value is a rank's digests by tensor: about 80 bytes for each of 50,000 experts' matrices."""
PROBLEMS = list[tuple[str, str, str, str]]
"""The four parts of each problem, as a value holds them."""
_adapter = lru_cache(pydantic.TypeAdapter)
T = TypeVar("T")


@dataclass(frozen=True)
class Rendezvous:
    """The address of the store. Sent to every training rank and engine rank."""

    store: StoreAddress
    run: str
    """A random token: part of the name of everything that this run leaves outside its processes."""
    timeout_seconds: float
    """The longest wait of a process in one sync, measured from when it begins to take part."""

    def join(self, name: str) -> Member:
        """Connects the process called `name`, such as "train rank 3". Raises WeightSyncError if no store answers."""
        return Member(self, name)


@dataclass(frozen=True)
class Sync:
    """One attempt to bring `destinations` (indices of a plan) to `version`.

    `generation` changes when the destinations change, when an end is opened anew, and after a failed attempt:
    connections of an older generation are void.
    """

    attempt: int
    version: int
    generation: int
    destinations: frozenset[int]


NO_SYNC = Sync(0, -1, 0, frozenset())


class RendezvousHost:
    """The driver's end: it owns the store and says which sync is open.

    `host` is the address of this node by which every training rank and engine rank reaches it.
    """

    def __init__(self, host: str, timeout_seconds: float) -> None:
        self._host = StoreHost(host)
        self._store = self._host.store
        self.rendezvous = Rendezvous(self._host.address, secrets.token_hex(8), timeout_seconds)
        self._sync = NO_SYNC
        self._opened = 0

    def open(self, version: int, destinations: Iterable[int]) -> Sync:
        """Begins an attempt. Processes that still wait in the attempt before end with WeightSyncError.

        If the attempt before failed in a way that no process in it can have noticed, such as a death, call `abort`
        first.
        """
        before, wanted, opened = self._sync, frozenset(destinations), self._store.add("opened", 0)
        failed = self._store.check([f"abort/{before.attempt}"])
        if before.attempt and not failed:
            self.abort([Problem(f"weight sync to version {before.version}", "given up: another one has begun")])
        changed = failed or opened != self._opened or wanted != before.destinations
        self._sync = Sync(before.attempt + 1, version, before.generation + changed, wanted)
        self._opened = opened
        self._store.set("sync", json.dumps([*astuple(self._sync)[:3], sorted(wanted)]))
        return self._sync

    def abort(self, problems: Iterable[Problem]) -> None:
        """Ends the open attempt for all processes in it, with these reasons."""
        _abort(self._store, self._sync.attempt, problems)


class Member:
    """One process's connection to the rendezvous. Each thread that waits needs its own.

    All methods raise WeightSyncError: if the store does not answer, if the attempt was aborted, at the deadline.
    """

    def __init__(self, rendezvous: Rendezvous, name: str) -> None:
        self.rendezvous, self.name = rendezvous, name
        self._sync = NO_SYNC
        self._deadline = time.monotonic() + rendezvous.timeout_seconds
        with self._reaching():
            self.store = rendezvous.store.connect(rendezvous.timeout_seconds)

    @contextmanager
    def attend(self, version: int) -> Iterator[Sync]:
        """Takes part in the open sync, with a deadline from here. A MegagrpoError in the block aborts it for all."""
        with self._reaching():
            value = self.store.get("sync")
        attempt, opened, generation, destinations = self._checked("sync", value, tuple[int, int, int, frozenset[int]])
        self._sync = Sync(attempt, opened, generation, destinations)
        self._deadline = time.monotonic() + self.rendezvous.timeout_seconds
        try:
            if opened != version:
                raise WeightSyncError(
                    Problem(f"{self.name}: weight sync to version {version}", f"the open sync is to version {opened}")
                )
            yield self._sync
        except MegagrpoError as error:
            with self._reaching():
                _abort(self.store, attempt, error.problems)
            raise
        finally:
            self._sync = NO_SYNC

    def announce(self) -> None:
        """Announces that a sender or a receiver was opened here, in place of any that was connected before."""
        self.add("opened")

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter of the rendezvous and returns it."""
        with self._reaching():
            return self.store.add(key, amount)

    def push(self, to: str, message: Any) -> None:
        """Puts a message into the queue called `to`, for this attempt only."""
        with self._reaching():
            self.store.queue_push(f"queue/{self._sync.attempt}/{to}", json.dumps(message))

    def pop(self, queue: str, kind: Any) -> Any | None:
        """Returns the oldest message in a queue, of the type `kind`; or None."""
        key = f"queue/{self._sync.attempt}/{queue}"
        with self._reaching():
            try:
                message = self.store.queue_pop(key, block=False)
            except dist.QueueEmptyError:
                return None
        return self._checked(key, message, kind)

    def write(self, key: str, value: Any) -> None:
        """Writes a value that any member can read, until it is deleted."""
        with self._reaching():
            self.store.set(f"value/{key}", json.dumps(value))

    def read(self, key: str, kind: Any) -> Any | None:
        """Returns the value written under `key`, of the type `kind`; or None."""
        with self._reaching():
            value = self.store.get(f"value/{key}") if self.store.check([f"value/{key}"]) else None
        return None if value is None else self._checked(f"value/{key}", value, kind)

    def decide(self, key: str, value: str) -> str:
        """Writes a value unless another member did. Returns the first member's value, which all members read."""
        with self._reaching():
            first = self.store.compare_set(f"value/{key}", "", json.dumps(value))
        return str(self._checked(f"value/{key}", first, str))

    def delete(self, key: str) -> None:
        with self._reaching():
            self.store.delete_key(f"value/{key}")

    def wait(self, look: Callable[[], Any | None], missing: Callable[[], Problem]) -> Any:
        """Calls `look` until it returns something other than None. At the deadline it raises `missing()`."""
        begun = now = time.monotonic()
        while (result := look()) is None:  # at or after `now`: a look that moves the deadline does so in time
            self.check_abort()
            if now >= self._deadline:
                raise WeightSyncError(missing())
            time.sleep(min(LONGEST_PAUSE_SECONDS, max(1e-4, (now - begun) / 10), max(0.0, self._deadline - now)))
            now = time.monotonic()
        return result

    def next_message(self, queue: str, kind: Any, missing: Callable[[], Problem]) -> Any:
        """Returns the next message in `queue`, of the type `kind`, from a sender that may wait for other processes.

        The receiver waits twice the time-out, measured from the sender's last message: if one of those processes is
        missing, only the sender knows which, and must report it first.
        """
        extended = False

        def look() -> Any:
            nonlocal extended
            message = self.pop(queue, kind)
            if message is None and not extended and not self.seconds_left():
                extended = True
                self.start_clock()
            return message

        message = self.wait(look, missing)
        self.start_clock()
        return message

    def late(self, where: str, missing: str) -> Problem:
        """Returns the problem of a process that was awaited until the deadline."""
        fix = "look for what stopped that process; weights.timeout_seconds is the longest wait"
        return Problem(where, f"{missing} within {self.rendezvous.timeout_seconds:g} s", fix=fix)

    def start_clock(self) -> None:
        """Restarts the deadline from now."""
        self._deadline = time.monotonic() + self.rendezvous.timeout_seconds

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline; not below 0."""
        return max(0.0, self._deadline - time.monotonic())

    def check_abort(self) -> None:
        """Raises WeightSyncError with the reasons if the attempt was aborted."""
        if self._sync is NO_SYNC:
            return
        key = f"abort/{self._sync.attempt}"
        with self._reaching():
            reasons = self.store.get(key) if self.store.check([key]) else None
        if reasons is not None:
            raise WeightSyncError([Problem(*parts) for parts in self._checked(key, reasons, PROBLEMS)])

    def _checked(self, key: str, value: bytes, kind: Any) -> Any:
        """Returns the value found under `key`, checked for its length and the type `kind`. Raises WeightSyncError."""
        try:
            if len(value) <= BYTES_MAX:
                return _adapter(kind).validate_json(value, strict=True)
            given = f"{len(value):,} bytes"
        except ValueError:
            given = brief(value[:100])
        fix = "look what else writes there: only this run should reach that port (docs/security.md)"
        raise WeightSyncError(
            Problem(f"{self._where()}: {key}", given, f"JSON of {kind}, at most {BYTES_MAX:,} bytes", fix)
        )

    def _where(self) -> str:
        return f"{self.name}: the driver's rendezvous at {self.rendezvous.store.host}:{self.rendezvous.store.port}"

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, OSError) as error:
            given, needed = first_line(error), "a driver that runs and is reachable from here"
            raise WeightSyncError(Problem(self._where(), given, needed)) from error


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Calls a function in a thread, because torch waits for its peers, aborted or not."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  (it is the caller's)
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def _abort(store: dist.Store, attempt: int, problems: Iterable[Problem]) -> None:
    """Writes the reasons unless an earlier call did: later errors of the same attempt only follow from the first."""
    reasons = json.dumps([astuple(problem) for problem in problems])
    store.compare_set(f"abort/{attempt}", "", reasons)
