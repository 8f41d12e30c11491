"""Requests to a model that judges or teaches: their retries, a step's budget, and answers that are kept in a file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megagrpo.errors import Problem, RewardError

RETRIED = (0, 408, 409, 425, 429, 500, 502, 503, 504, 529)
"""HTTP statuses after which a later request may succeed; 0 for no reply."""
BACKOFF_SECONDS_MAX = 60.0
Question = TypeVar("Question")
Value = TypeVar("Value")


class UnansweredError(ValueError):
    """The error of a missing answer: the response is masked, and counted as an error."""


class OverBudgetError(UnansweredError):
    """The error of a step whose budget is spent: the response is masked, and counted by itself."""


@dataclass(frozen=True)
class Reply:
    """The reply of an endpoint: `answer` is its JSON if the status is 200. Status 0: why there is none, as `text`."""

    status: int
    answer: Any = None
    text: str = ""
    """The beginning of any other answer."""
    retry_after: float | None = None

    @property
    def failure(self) -> str:
        """Returns why there is no answer."""
        return f"HTTP {self.status}: {self.text}" if self.status else self.text


@dataclass(frozen=True)
class Terms:
    """The terms of requests to a model. budget: most seconds of waiting in a step, and of other totals of `spent`."""

    at_once: int
    retries: int
    backoff_seconds: float
    timeout_seconds: float
    budget: Mapping[str, float | None]


class Asked(Generic[Question, Value]):
    """A model that is asked. For one event loop. failed: the beginning of the error of a question without an answer."""

    def __init__(self, terms: Terms, failed: str, cache: AnswerCache | None) -> None:
        self._terms, self._failed, self._cache = terms, failed, cache
        self._slots = asyncio.Semaphore(terms.at_once)
        self._in_flight: dict[bytes, asyncio.Task[Value]] = {}
        """Questions in flight, by key."""
        self._not_before = 0.0
        """The time at which the server accepts requests again, on time.monotonic's clock."""
        self._active, self._since = 0, 0.0
        """Number of awaited questions, and start of the current wait."""
        self.spent: defaultdict[str, float] = defaultdict(float)

    async def _send(self, question: Question, timeout_seconds: float) -> Reply:
        """Sends a question. Raises OSError if there is no reply, TimeoutError if it is late."""
        raise NotImplementedError

    def _read(self, question: Question, reply: Reply) -> Value:
        """Reads a reply of status 200, and counts it in `spent`. Raises ValueError if it must be repeated."""
        raise NotImplementedError

    def _packed(self, value: Value) -> str | bytes:
        """Returns an answer as the cache keeps it."""
        raise NotImplementedError

    def _unpacked(self, question: Question, kept: Any) -> Value:
        """Reads an answer from the cache. Raises ValueError if it is none."""
        raise NotImplementedError

    def new_step(self) -> dict[str, float]:
        """Returns the totals that the step has spent. Begins a new budget."""
        spent = {**self.spent, "seconds": self._spent("seconds")}
        self.spent.clear()
        self._since = time.monotonic()
        return spent

    async def answered(self, question: Question, key: bytes | None) -> tuple[Value, bool]:
        """Returns the answer to a question, and whether it was known. key: the same for equal questions, which are one
        request at one time and are looked up in the cache; None: never known.

        Raises OverBudgetError if the budget is spent, UnansweredError if no readable answer came.
        """
        if key is None:
            return await self._answer(question), False
        if (request := self._in_flight.get(key)) is not None:
            value = await request
            self.spent["cached"] += 1
            return value, True
        if self._cache is not None and (kept := self._cache.get(key)) is not None:
            with suppress(ValueError):  # another rule for verdicts wrote it
                value = self._unpacked(question, kept)
                self.spent["cached"] += 1
                return value, True
        self._in_flight[key] = asyncio.create_task(self._answer(question))
        try:
            value = await self._in_flight[key]
        finally:
            del self._in_flight[key]
        if self._cache is not None:
            self._cache.put(key, self._packed(value))
        return value, False

    async def _answer(self, question: Question) -> Value:
        self._since, self._active = self._since if self._active else time.monotonic(), self._active + 1
        try:
            return await self._repeated(question)
        finally:
            self.spent["seconds"], self._active = self._spent("seconds"), self._active - 1
            self._since = time.monotonic()

    async def _repeated(self, question: Question) -> Value:
        failure, attempt = "", 0
        for attempt in range(self._terms.retries + 1):
            if attempt:
                self.spent["retries"] += 1
                longest = min(BACKOFF_SECONDS_MAX, self._terms.backoff_seconds * 2 ** (attempt - 1))
                await asyncio.sleep(min(random.uniform(0.5, 1.0) * longest, self._seconds_left()))
            async with self._slots:
                await asyncio.sleep(min(max(0.0, self._not_before - time.monotonic()), self._seconds_left()))
                self._require_budget()
                reply = await self.reply(question)
            if reply.status == 200:
                try:
                    return self._read(question, reply)
                except ValueError as error:
                    failure = str(error)
                    continue
            failure = reply.failure
            if reply.status not in RETRIED:
                break
            self._not_before = max(self._not_before, time.monotonic() + (reply.retry_after or 0.0))
        self.spent["failed"] += 1
        times = f" ({attempt + 1} times)" if attempt else ""
        raise UnansweredError(f"{self._failed}{times}: {failure}")

    async def reply(self, question: Question) -> Reply:
        """Sends a question once. Returns the reply. Raises OverBudgetError when the time is spent."""
        self.spent["requests"] += 1
        limit, left = self._terms.timeout_seconds, max(1e-3, self._seconds_left())
        try:
            return await asyncio.wait_for(self._send(question, min(limit, left)), left)
        except TimeoutError:
            if left <= limit:
                raise self._over("seconds") from None
            return Reply(0, text=f"no answer in {limit:g} s")
        except OSError as error:
            return Reply(0, text=f"{type(error).__name__}: {error}")

    def _require_budget(self) -> None:
        for limit, most in self._terms.budget.items():
            spent = self._spent(limit)
            if most is not None and spent >= most:
                raise self._over(limit)

    def _spent(self, limit: str) -> float:
        """Returns how much of a limit of the budget the step has spent."""
        waiting = time.monotonic() - self._since if limit == "seconds" and self._active else 0.0
        return self.spent[limit] + waiting

    def _over(self, limit: str) -> OverBudgetError:
        return OverBudgetError(f"over the step's budget of {self._terms.budget[limit]:g} for {limit}")

    def _seconds_left(self) -> float:
        limit = self._terms.budget["seconds"]
        return float("inf") if limit is None else limit - self._spent("seconds")


# --- answers that are kept --------------------------------------------------------------------------------------------

WAIT_SECONDS = 30.0
"""Timeout while another process writes."""
WRITE_SECONDS = 1.0
"""Time between two writes: each waits for the disk."""


class AnswerCache:
    """Answers by the hash of their request, in a file. Several processes may open one. An answer is stored whole or not
    at all; those of the last second are stored once `write` is called. For one thread at a time. Raises RewardError if
    the file cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new: dict[bytes, str | bytes] = {}
        self._written = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._reported():
            self._file = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")

    def get(self, key: bytes) -> str | bytes | None:
        if key in self._new:
            return self._new[key]
        with self._reported():
            row = self._file.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def put(self, key: bytes, answer: str | bytes) -> None:
        self._new[key] = answer
        if time.monotonic() > self._written + WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes all new answers to the file."""
        if not self._new:
            return
        with self._reported(), self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", self._new.items())
        self._new.clear()
        self._written = time.monotonic()

    def close(self) -> None:
        try:
            self.write()
        finally:
            self._file.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            fix = "make room, or delete the file: its answers are asked for again; cache: false does without"
            raise RewardError(Problem(f"{self._path}: kept answers", str(error), "a file to write", fix)) from error


def key_of(identity: str, body: Any) -> bytes:
    """Returns the key of a request. identity: the endpoint, or the model's directory. body: all that is sent to it."""
    return hashlib.sha256(json.dumps([identity, body], sort_keys=True).encode()).digest()
