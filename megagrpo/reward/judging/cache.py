"""A cache of judges' answers in a file of the run's directory: no request is sent and paid for twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, RewardError

FILE = "judge_cache.sqlite"
WAIT_SECONDS = 30.0
"""Timeout while another process writes."""
WRITE_SECONDS = 1.0
"""Time between two writes: each waits for the disk."""


class AnswerCache:
    """Answers by the hash of their request. Several processes may open one cache. An answer is stored whole or not at
    all; those of the last second are stored once `write` is called. For one thread. Raises RewardError if the file
    cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._new: dict[bytes, str] = {}
        self._written = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        with self._reported():
            self._file = sqlite3.connect(self._path, timeout=WAIT_SECONDS, isolation_level=None)
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")

    def get(self, key: bytes) -> str | None:
        if key in self._new:
            return self._new[key]
        with self._reported():
            row = self._file.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def put(self, key: bytes, text: str) -> None:
        self._new[key] = text
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
            where, needed = f"{self._path}: the answers of judges", "a file to write"
            raise RewardError(Problem(where, str(error), needed, fix)) from error


def key_of(identity: str, body: dict[str, Any]) -> bytes:
    """Returns the key of a request. identity: the endpoint, or the model's directory. body: all that is sent to it."""
    return hashlib.sha256(json.dumps([identity, body], sort_keys=True).encode()).digest()
