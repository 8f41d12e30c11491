"""An agent process: concurrent rollouts of one agent function, in an interpreter of any environment.

`python runner.py DESCRIPTOR` serves the socket with this file descriptor. Standard library only, Python 3.10 or newer.
It reads and writes lines of JSON:

    in   {"start": {"path": [...] or null, "file": ..., "source": ..., "function": ..., "arguments": {...}}}
         {"begin": KEY, "task": {...}, "endpoint": {"base_url": ..., "api_key": ..., "model": ...}}
         {"cancel": KEY}
    out  {"loaded": true}, if the file has `async def prepare(**arguments)`, which then begins
         {"ready": true}, or {"failed": ERROR, "trace": ...}: the function cannot be loaded, or it cannot be prepared
         {"event": KEY, "kind": ..., ...}
         {"end": KEY, "reward": {...} or null, "turn_rewards": ..., "error": ..., "trace": ...}, once each

The function's standard output goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

THREADS = 4096
"""Most rollouts of a function that is not async at once, each in a thread of its own."""
ERROR_CHARACTERS_MAX, TRACE_CHARACTERS_MAX = 300, 4000
TEXT_CHARACTERS_MAX = 20_000
"""Longest text of an event."""
EVENT_BYTES_MAX, END_BYTES_MAX = 1 << 18, 1 << 22
"""Longest messages: the host takes an agent process that sends much more for a broken one."""
SHORT_BYTES, SHORT_VALUES = 1000, 30
"""Most bytes of a value, and most values, that are kept of an event that is longer: its first short values."""
METRICS_MAX = 100


@dataclasses.dataclass(frozen=True)
class Limits:
    turns_max: int
    tokens_max: int  # of a conversation, all that stands between its turns included
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class Task:
    """One rollout of a prompt. A group is all samples of the same `id` in a step."""

    id: str
    sample: int
    seed: int  # in [0, 2**63), the same whenever this rollout is made
    messages: list[dict[str, Any]]
    ground_truth: str
    data_source: str
    ability: str
    extra_info: dict[str, Any]
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The policy's address for any OpenAI-compatible client. The key is this rollout's own."""

    base_url: str
    api_key: str
    model: str
    _tell: Callable[[dict[str, Any]], None]

    def event(self, kind: str, **values: Any) -> None:
        """Writes JSON values into the rollout's trace. "tool": name, seconds, error="", arguments, result."""
        self._tell({"kind": str(kind), **{name: shortened(value) for name, value in values.items()}})


class Runner:
    def __init__(self, channel: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._channel, self._loop = channel, loop
        self._sending = threading.Lock()
        self._function: Callable[..., Any] = print
        self._arguments: dict[str, Any] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._starting: asyncio.Task[None] | None = None
        self._pid = os.getpid()

    def serve(self) -> None:
        """Reads messages until the other end is closed. Runs in a thread, in case a function blocks the event loop."""
        with self._channel.makefile("rb") as lines:
            for line in lines:
                self._loop.call_soon_threadsafe(self._take, json.loads(line))
        os._exit(0)

    def _take(self, message: dict[str, Any]) -> None:
        if "begin" in message:
            key = message["begin"]
            task = self._running[key] = self._loop.create_task(self._rollout(message))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        elif "cancel" in message:
            if (running := self._running.pop(message["cancel"], None)) is not None:
                self._end(message["cancel"], error="it was cancelled")
                running.cancel()
        elif "start" in message:
            self._starting = self._loop.create_task(self._start(message["start"]))

    async def _start(self, given: dict[str, Any]) -> None:
        try:
            module = load(given["file"], given["source"], given["path"])
            self._function, self._arguments = getattr(module, given["function"]), given["arguments"]
            if not callable(self._function):
                raise TypeError(f"{given['function']} of {given['file']} is no function")
            inspect.signature(self._function).bind(None, None, **self._arguments)
            if inspect.iscoroutinefunction(prepare := getattr(module, "prepare", None)):
                inspect.signature(prepare).bind(**self._arguments)
                self._send({"loaded": True})
                await prepare(**self._arguments)
        except BaseException as raised:  # noqa: BLE001  (anything can happen in a user's file)
            self._send({"failed": error_of(raised), "trace": trace_of(raised)})
            os._exit(1)
        self._send({"ready": True})

    async def _rollout(self, message: dict[str, Any]) -> None:
        key, given = message["begin"], message["task"]
        task = Task(**{**given, "limits": Limits(**given["limits"])})
        endpoint = Endpoint(**message["endpoint"], _tell=lambda values: self._send({**values, "event": key}))
        returned: Any = None
        error = trace = ""
        try:
            if inspect.iscoroutinefunction(self._function):
                returned = await self._function(task, endpoint, **self._arguments)
            else:
                returned = await asyncio.to_thread(self._function, task, endpoint, **self._arguments)
                if inspect.isawaitable(returned):
                    returned = await returned
            reward, turn_rewards = reward_of(returned)
        except BaseException as raised:  # noqa: BLE001  (a user's function can raise anything: it costs this rollout)
            reward, turn_rewards, error, trace = None, None, error_of(raised), trace_of(raised)
            print(f"rollout {task.sample} of {task.id} failed: {trace}", file=sys.stderr, flush=True)
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that the function forked and let return
        if self._running.get(key) is asyncio.current_task():  # else it was cancelled, and its end is reported
            self._end(key, reward, turn_rewards, error, trace)

    def _end(self, key: str, reward: Any = None, turn_rewards: Any = None, error: str = "", trace: str = "") -> None:
        self._send({"end": key, "reward": reward, "turn_rewards": turn_rewards, "error": error, "trace": trace})

    def _send(self, message: dict[str, Any]) -> None:
        data = event_line(message) if "event" in message else json.dumps(message, default=str).encode()
        if "end" in message and len(data) > END_BYTES_MAX:
            self._end(message["end"], error=f"returned {len(data):,} bytes")
            return
        data += b"\n"
        with self._sending, contextlib.suppress(OSError):  # its reader is gone: `serve` ends this process
            self._channel.sendall(data)


def load(file: str, source: str, path: Sequence[str] | None) -> ModuleType:
    """Loads the module of the file with this text. Raises what the file raises."""
    own_directory = str(Path(__file__).resolve().parent)
    if path is not None:
        sys.path[:] = path
    # This file's directory has modules of common names, and so have those under it.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != own_directory]
    if not file.startswith(own_directory + os.sep):
        sys.path.insert(0, str(Path(file).parent))  # a user's file may import its neighbours
    sys.dont_write_bytecode = True  # nothing is written beside a user's files, whoever imports them
    name = f"megagrpo_agent:{file}"
    loader = SourceFileLoader(name, file)
    spec = ModuleSpec(name, loader, origin=file)
    spec.has_location = True  # gives the module its __file__
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(loader.source_to_code(source.encode(), file), vars(module))
    return module


def reward_of(returned: Any) -> tuple[dict[str, Any] | None, Any]:
    """Returns the reward ("score" and metrics) and the turns' rewards of a function's result. The result is a number, a
    mapping or dataclass with `score` and other numbers, or None. Raises TypeError or ValueError for anything else."""
    if returned is None:
        return None, None
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        returned = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    if not isinstance(returned, Mapping):
        return {"score": number_of(returned, "the reward")}, None
    values = dict(returned)
    turns = values.pop("turn_rewards", None)
    values |= values.pop("metrics", None) or {}
    if isinstance(turns, Mapping):
        turns = {str(turn): number_of(value, f"turn_rewards[{turn!r}]") for turn, value in turns.items()}
    elif turns is not None:
        turns = [number_of(value, "turn_rewards") for value in turns]
    if values.get("score") is None:
        if any(value is not None for value in values.values()):
            raise ValueError(f"returned a mapping without 'score': keys {', '.join(map(str, values)) or '(none)'}")
        return None, turns
    if len(values) > METRICS_MAX:
        raise ValueError(f"returned {len(values):,} numbers, not at most {METRICS_MAX}")
    return {str(name): number_of(value, str(name)) for name, value in values.items() if value is not None}, turns


def number_of(value: Any, name: str) -> float:
    # __float__ admits numpy and torch scalars, Decimal and Fraction, and keeps out text.
    if not hasattr(value, "__float__"):
        raise TypeError(f"returned {value!r:.80} as {name}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number} as {name}, not a finite number")
    return number


def error_of(raised: BaseException) -> str:
    try:
        text = f"{type(raised).__name__}: {raised}"
    except Exception:  # noqa: BLE001  (an exception of a user's may fail to say what it is)
        text = type(raised).__name__
    return (text.removesuffix(": ").splitlines() or [""])[0][:ERROR_CHARACTERS_MAX]


def trace_of(raised: BaseException) -> str:
    return "".join(traceback.format_exception(type(raised), raised, raised.__traceback__))[-TRACE_CHARACTERS_MAX:]


def event_line(event: dict[str, Any]) -> bytes:
    try:
        written = {name: json.dumps(value, default=str).encode() for name, value in event.items()}
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"event": event["event"], "kind": "unreadable event", "error": str(error)}).encode()
    if (size := sum(map(len, written.values()))) > EVENT_BYTES_MAX:
        short = [name for name, value in written.items() if len(name) + len(value) <= SHORT_BYTES][:SHORT_VALUES]
        kept = {name: event[name] for name in (*short, "kind", "event")}
        event = kept | {"kind": event["kind"][:SHORT_BYTES], "left_out": f"{size:,} bytes"}
    return json.dumps(event, default=str).encode()


def shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        return f"{value[:TEXT_CHARACTERS_MAX]}… ({len(value) - TEXT_CHARACTERS_MAX:,} characters more)"
    return value


async def main(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # by lines: text in a buffer would be lost when this process is killed
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # before engines and ranks
    with contextlib.suppress(OSError, ValueError):  # a rollout has sockets of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, "rollout"))
    runner = Runner(socket.socket(fileno=descriptor), loop)
    threading.Thread(target=runner.serve, name="reads messages", daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
