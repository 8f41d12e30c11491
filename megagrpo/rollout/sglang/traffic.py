"""Which of an engine's requests may be sent now. Lives on the event loop of its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

from megagrpo.errors import MegagrpoError


class Traffic:
    """At most `at_once` requests are on the way. None is sent while held: a weight update is open."""

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[str] = set()
        self._given_up = 0
        self._holds = 0
        self._failure: MegagrpoError | None = None

    @asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[bool]:
        """Waits for this request's turn, until `deadline` on the loop's clock. False: it was given up, or time is up.

        Raises what `fail` was called with.
        """
        before = self._given_up
        if not await _in_time(self._turns.acquire(), deadline):
            yield False
            return
        try:
            may_run = await _in_time(self._open.wait(), deadline)
            if self._failure is not None:
                raise self._failure
            yield may_run and self._given_up == before
        finally:
            self._turns.release()

    @contextmanager
    def running(self, rid: str) -> Iterator[None]:
        self._running.add(rid)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(rid)
            if not self._running:
                self._idle.set()

    def give_up(self) -> list[str]:
        """Ids of the requests on the way, to be aborted; the others never get a turn."""
        self._given_up += 1
        return list(self._running)

    async def count(self) -> int:
        return len(self._running)

    async def hold(self) -> None:
        self._holds += 1
        self._open.clear()

    async def release(self) -> None:
        self._open.set()

    async def drained(self) -> bool:
        """Once nothing is on the way. False if `hold` was called again meanwhile: then it is not for us to go on."""
        held = self._holds
        await self._idle.wait()
        return held == self._holds

    async def fail(self, error: MegagrpoError) -> None:
        """Everyone who waits for a turn, or will, gets this error."""
        self._failure = error
        self._open.set()


async def _in_time(waiting: Awaitable[object], deadline: float) -> bool:
    """Whether what is waited for came before the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            await waiting
    except TimeoutError:
        return False
    return True
