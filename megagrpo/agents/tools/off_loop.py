"""Threads and an event loop for users' code, so that it cannot block the rollouts of an agent process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(function: Callable[[], Result]) -> Result:
    """Calls the function in a thread of its own and returns its result.

    The thread is not waited for if the caller is cancelled: nothing can end it, but it ends with the process. (A pool's
    threads would be waited for at the process's end.)
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, raised: BaseException | None) -> None:
        if future.done():
            return
        if raised is not None:
            future.set_exception(raised)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: Result | None = None
        raised: BaseException | None = None
        try:
            result = function()
        except StopIteration as error:  # a future refuses it
            raised = RuntimeError(f"StopIteration: {error}")
        except SystemExit as error:  # one call ends no agent process
            raised = RuntimeError(f"SystemExit: {error}")
        except BaseException as error:  # noqa: BLE001  (it is the caller's)
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, raised)

    threading.Thread(target=work, name="tool call", daemon=True).start()
    return await future


class OwnLoop:
    """A thread with an event loop for the coroutines of one tool. A coroutine that blocks delays that tool's
    others, and no rollout's turns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs the coroutine and returns its result. Cancels it with the caller."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
