"""Where the two ends of a weight sync find each other: a key-value store hosted by the driver.

It carries announcements, acknowledgements, reports and "abort" as JSON, never weights. Nobody blocks in it: who waits
asks again after a tenth of the time waited so far, so that an abort or the deadline ends every wait, by name.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megagrpo.errors import MegagrpoError, Problem, WeightSyncError

LONGEST_PAUSE_SECONDS = 0.25
"""Between two looks at the store: thousands of waiting ranks ask a few thousand times a second, which it can bear."""


@dataclass(frozen=True)
class Meeting:
    """Where to meet. Travels to every training rank and engine rank."""

    host: str
    port: int
    run: str
    """A random token: part of the name of everything that this run leaves outside its processes."""
    timeout_seconds: float
    """Longest wait of anybody for one sync, counted from when it takes part."""

    def join(self, name: str) -> Member:
        """Connects `name`, such as "train rank 3". Raises WeightSyncError if nobody answers there."""
        return Member(self, name)


@dataclass(frozen=True)
class Sync:
    """One attempt to bring `destinations` (indices of a plan) to `version`.

    `generation` counts how often those who take part have changed, or failed: connections of an older one are void.
    """

    attempt: int
    version: int
    generation: int
    destinations: frozenset[int]


NO_SYNC = Sync(0, -1, 0, frozenset())


class MeetingHost:
    """The driver's end: it owns the store and says which sync is open. Listens on the address of `host` alone.

    `host` is this node as every training rank and engine rank reaches it.
    """

    def __init__(self, host: str, timeout_seconds: float) -> None:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            port = listening.getsockname()[1]
            self._store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        self.meeting = Meeting(host, port, secrets.token_hex(8), timeout_seconds)
        self._sync = NO_SYNC
        self._opened = 0

    def open(self, version: int, destinations: Iterable[int]) -> Sync:
        """Begins an attempt. Whoever still waits in the one before ends with WeightSyncError.

        If the one before failed in a way that nobody in it can have noticed, such as a death, call `abort` first.
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
        """Ends the open attempt for everybody in it, with these reasons."""
        _abort(self._store, self._sync.attempt, problems)


class Member:
    """One connection to the meeting. Each thread that waits needs its own.

    All methods raise WeightSyncError: if the store does not answer, if the attempt was aborted, at the deadline.
    """

    def __init__(self, meeting: Meeting, name: str) -> None:
        self.meeting, self.name = meeting, name
        self._sync = NO_SYNC
        self._deadline = time.monotonic() + meeting.timeout_seconds
        with self._reaching():
            self._store = dist.TCPStore(
                meeting.host,
                meeting.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=meeting.timeout_seconds),
            )

    @property
    def store(self) -> dist.Store:
        """For torch's process groups to meet in."""
        return self._store

    @contextmanager
    def attend(self, version: int) -> Iterator[Sync]:
        """Takes part in the open sync, with a deadline from here. An error of ours in the block aborts it for all."""
        with self._reaching():
            attempt, opened, generation, destinations = json.loads(self._store.get("sync"))
        self._sync = Sync(attempt, opened, generation, frozenset(destinations))
        self._deadline = time.monotonic() + self.meeting.timeout_seconds
        try:
            if opened != version:
                raise WeightSyncError(
                    Problem(f"{self.name}: weight sync to version {version}", f"the open sync is to version {opened}")
                )
            yield self._sync
        except MegagrpoError as error:
            with self._reaching():
                _abort(self._store, attempt, error.problems)
            raise
        finally:
            self._sync = NO_SYNC

    def announce(self) -> None:
        """Says that a sender or a receiver begins its life here, in place of whatever was connected before."""
        self.add("opened")

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter of the meeting and returns it."""
        with self._reaching():
            return self._store.add(key, amount)

    def push(self, to: str, message: Any) -> None:
        """Leaves a message in the queue of `to`, for this attempt only."""
        with self._reaching():
            self._store.queue_push(f"queue/{self._sync.attempt}/{to}", json.dumps(message))

    def pop(self, of: str) -> Any | None:
        """The oldest message in the queue of `of`, or None."""
        with self._reaching():
            try:
                return json.loads(self._store.queue_pop(f"queue/{self._sync.attempt}/{of}", block=False))
            except dist.QueueEmptyError:
                return None

    def say(self, key: str, value: Any) -> None:
        """Writes something for whoever asks for `key`, until it is forgotten."""
        with self._reaching():
            self._store.set(f"said/{key}", json.dumps(value))

    def hear(self, key: str) -> Any | None:
        """What was said under `key`, or None."""
        with self._reaching():
            return json.loads(self._store.get(f"said/{key}")) if self._store.check([f"said/{key}"]) else None

    def forget(self, key: str) -> None:
        with self._reaching():
            self._store.delete_key(f"said/{key}")

    def wait(self, look: Callable[[], Any | None], awaited: Callable[[], Problem]) -> Any:
        """The first thing other than None that `look` returns. `awaited` tells a deadline's error what was awaited."""
        begun = now = time.monotonic()
        while (found := look()) is None:  # at or after `now`: a look that moves the deadline does so in time
            self._check_abort()
            if now >= self._deadline:
                raise WeightSyncError(awaited())
            time.sleep(min(LONGEST_PAUSE_SECONDS, max(1e-4, (now - begun) / 10), max(0.0, self._deadline - now)))
            now = time.monotonic()
        return found

    def start_clock(self) -> None:
        """Counts the deadline from here on, for what is not part of a sync."""
        self._deadline = time.monotonic() + self.meeting.timeout_seconds

    def seconds_left(self) -> float:
        """Until the deadline; not below 0."""
        return max(0.0, self._deadline - time.monotonic())

    def _check_abort(self) -> None:
        if self._sync is NO_SYNC:
            return
        key = f"abort/{self._sync.attempt}"
        with self._reaching():
            if self._store.check([key]):
                problems = [Problem(*problem) for problem in json.loads(self._store.get(key))]
                raise WeightSyncError(problems)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            where = f"{self.name}: the driver's meeting at {self.meeting.host}:{self.meeting.port}"
            raise WeightSyncError(
                Problem(where, str(error).splitlines()[0], "a driver that runs and is reachable from here")
            ) from error


def _abort(store: dist.Store, attempt: int, problems: Iterable[Problem]) -> None:
    """The first reason stays: what others say of the same attempt only follows from it."""
    reasons = json.dumps([[p.where, p.given, p.needed, p.fix] for p in problems])
    store.compare_set(f"abort/{attempt}", "", reasons)
