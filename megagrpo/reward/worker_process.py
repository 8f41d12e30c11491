"""The process of a reward worker, which runs functions. Its keeper (keeper.py) started it.

Where bubblewrap works, it sees no processes but its own, and so no other's environment.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import os
import resource
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.functions import Function, Outcome, failure_of, load, outcomes_of, timed_out
from megagrpo.user_functions import IMPORTED

Message = tuple[int, int, dict[str, Any], int]
"""(number of the call, index of the function, its arguments by name, how many responses it scores). The answer is a
line of JSON: the number and an Outcome for each response."""


def work(descriptor: int) -> None:
    """Serves the socket: first the specs and the limits, then messages. Never returns. Synchronous functions block the
    process; async ones run side by side in its event loop."""
    os.set_inheritable(descriptor, False)
    sys.dont_write_bytecode = True  # beside a user's files, whose functions may import others when they are called
    connection = Connection(descriptor)
    specs, timeout_seconds, memory_bytes = _received(connection)
    Path("/proc/self/oom_score_adj").write_text("1000")  # before engines and ranks
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    functions: dict[int, Function] = {}
    problems: list[Problem] = []
    for number, spec in specs.items():
        try:
            functions[number] = load(spec)
        except RewardError as error:
            problems += error.problems
        except BaseException as raised:  # noqa: BLE001  (a user's file can raise anything, such as KeyboardInterrupt)
            given = f"{spec.function} raised {failure_of(raised).error}"
            problems.append(Problem(f"{spec.where}.function", given, IMPORTED, "correct the file"))
    loaded = [{"is_async": function.is_async, "wanted": function.wanted} for function in functions.values()]
    _send(connection, {"problems": [dataclasses.asdict(problem) for problem in problems], "functions": loaded})
    if not problems:
        asyncio.run(_serve(connection, functions, timeout_seconds))
    os._exit(0)


async def _serve(connection: Connection, functions: dict[int, Function], timeout_seconds: float) -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    threading.Thread(target=_receive, args=(connection, asyncio.get_running_loop(), messages), daemon=True).start()
    worker = os.getpid()
    async with asyncio.TaskGroup() as running:  # the event loop itself holds tasks weakly
        while True:
            message = await messages.get()
            function = functions[message[1]]
            answering = _answer(connection, function, message, timeout_seconds, worker)
            if function.is_async:
                running.create_task(answering)
            else:
                await answering


def _receive(connection: Connection, loop: asyncio.AbstractEventLoop, messages: asyncio.Queue[Message]) -> None:
    while True:
        message = _received(connection)
        loop.call_soon_threadsafe(messages.put_nowait, message)


async def _answer(
    connection: Connection, function: Function, message: Message, timeout_seconds: float, worker: int
) -> None:
    number, _, arguments, responses = message
    outcomes: list[Outcome]
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            returned = function.function(**arguments)
            if inspect.isawaitable(returned):
                returned = await returned
        outcomes = outcomes_of(returned, function.by_group, responses)
    except BaseException as raised:  # noqa: BLE001  (a user's function can raise anything; it is counted)
        outcomes = [timed_out(timeout_seconds) if limit.expired() else failure_of(raised)] * responses
    if os.getpid() != worker:
        os._exit(0)  # a copy that the function forked and let return
    _send(connection, {"number": number, "outcomes": list(map(dataclasses.asdict, outcomes))})


def _send(connection: Connection, message: dict[str, Any]) -> None:
    data = json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"
    try:
        while data:
            data = data[os.write(connection.fileno(), data) :]
    except ConnectionError:
        os._exit(0)  # nobody reads it any more


def _received(connection: Connection) -> Any:
    """Returns the next message. Ends the process if none comes any more, whatever a function is doing: its outcome
    could not be sent."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        os._exit(0)
