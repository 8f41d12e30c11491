"""The process that runs reward functions: one message in per response, one message out.

Started by workers.py. Synchronous functions block it; async ones run side by side in its event loop. It ends by itself
when the other end of its connection is gone.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from multiprocessing.connection import Connection

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.function import RewardCallable, Task, failure_of, outcome_of, timed_out
from megagrpo.reward.loading import FunctionSpec, load

Message = tuple[int, int, Task]
"""(number of the task, index of the function, the task). The answer is (number, Outcome)."""


def main(descriptor: int) -> None:
    """Serve the connection on this file descriptor: first the specs and the time limit, then messages."""
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what a user's function prints must not mix with the program's own output
    connection = Connection(descriptor)
    specs, timeout_seconds = connection.recv()
    functions, problems = _load_all(specs)
    connection.send((problems, tuple(inspect.iscoroutinefunction(function) for function in functions)))
    if not problems:
        asyncio.run(_serve(connection, functions, timeout_seconds))


def _load_all(specs: list[FunctionSpec]) -> tuple[list[RewardCallable], list[Problem]]:
    functions: list[RewardCallable] = []
    problems: list[Problem] = []
    for spec in specs:
        try:
            functions.append(load(spec))
        except RewardError as error:
            problems += error.problems
    return functions, problems


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
            os._exit(0)  # whatever a function is doing: nobody waits for it any more
        loop.call_soon_threadsafe(messages.put_nowait, message)


async def _answer(
    connection: Connection, number: int, function: RewardCallable, task: Task, timeout_seconds: float
) -> None:
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            returned = function(
                data_source=task.data_source,
                response=task.response,
                ground_truth=task.ground_truth,
                extra_info=task.extra_info,
            )
            if inspect.isawaitable(returned):
                returned = await returned
        outcome = outcome_of(returned)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  (a user's function can raise anything; it is counted)
        outcome = timed_out(timeout_seconds) if limit.expired() else failure_of(raised)
    connection.send((number, outcome))
