"""Programs in a sandbox: as scripts with standard input and output, as functions to call, or under tests that are code.

A process serves one program for as long as it lives, and is started again when the program ended it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megagrpo.errors import RewardError
from megagrpo.reward.sandbox.harness import decode, encode
from megagrpo.reward.sandbox.sandbox import (
    START_SECONDS,
    THREADS,
    Isolation,
    Kind,
    Limits,
    Mode,
    Sandbox,
    memory_file,
    read_and_close,
    refusal,
)

REASON_BYTES_MAX = 2000


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one run or call."""

    failure: str = ""
    """The reason for a failure, in one line; empty if the run ended by itself without an error."""
    value: Any = None
    """The printed text, or the returned value: lists and plain data. An object that is no data is a bare object()."""


class Program:
    """A program in a sandbox, which runs until `deadline` at most, on time.monotonic's clock.

    Use it as a context: on leaving, its process is dead. `prepare` are arguments for the sandbox's preloaded module.
    """

    def __init__(self, sandbox: Sandbox, source: str, *, deadline: float, prepare: Sequence[str] = ()) -> None:
        self.sandbox = sandbox
        self.deadline = deadline
        self.source = source
        self.prepare = prepare
        self.runs = 0
        """Number of runs in the current process. A failure may come from what an earlier run left."""
        self._channel: socket.socket | None = None
        sandbox.renew()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills the process, if there is one."""
        if self._channel is not None:
            self._end(0.0)

    def run(self, stdin: str, seconds: float) -> Ran:
        """Runs the program as a script. The value is the printed text."""
        channel = self.ready("scripts")
        files = [memory_file(stdin.encode(errors="replace")), memory_file(b""), memory_file(b"")]
        finished, failure = self._answer(channel, lambda: socket.send_fds(channel, [b"x"], files), seconds)
        os.close(files[0])
        most = self.sandbox.limits.output_bytes
        output, errors = (read_and_close(file, most) for file in files[1:])
        if finished not in (b"", b"0\n", b"1\n"):  # the program wrote to the channel
            self.stop()
        if max(len(output), len(errors)) >= most:  # a file ends at the limit: this one was cut
            return Ran("printed too much")
        if failure == "failed" or finished not in (b"", b"1\n"):
            failure = _last_line(errors)
        return Ran(failure, output.decode(errors="replace"))

    def call(self, name: str, arguments: Sequence[object], seconds: float) -> Ran:
        """Calls a function of the program, or a method of its class `Solution`. The value is the returned value."""
        request = {"do": "call", "object": name, "arguments": encode(list(arguments)), "named": encode({})}
        message, channel = json.dumps(request).encode() + b"\n", self.ready("calls")
        line, failure = self._answer(channel, lambda: channel.sendall(message), seconds)
        if not line:
            return Ran(failure or "ended")
        try:
            answer = json.loads(line)
            if "value" in answer:
                return Ran(value=decode(answer["value"], lambda _: object()))
            return Ran(f"{answer['raised']}: {answer['text']}"[:REASON_BYTES_MAX])
        except (ValueError, TypeError, KeyError, RecursionError):
            self.stop()
            return Ran("sent an invalid answer")

    def _answer(self, channel: socket.socket, send: Callable[[], object], seconds: float) -> tuple[bytes, str]:
        """Returns the process's answer to what `send` sends, a line; or none, and why its process ended."""
        deadline, answer = min(self.deadline, time.monotonic() + seconds), bytearray()
        try:
            channel.settimeout(_left(deadline))
            send()
            while len(answer) < self.sandbox.limits.output_bytes:
                channel.settimeout(_left(deadline))
                data = channel.recv(1 << 16)
                answer += data
                if data.endswith(b"\n"):
                    return bytes(answer), ""
                if not data:
                    return b"", self._end(_left(deadline))
                if time.monotonic() > deadline:  # a program may write without an end to its line
                    raise TimeoutError
        except TimeoutError:
            self.stop()
            return b"", "took too long"
        except OSError:
            return b"", self._end(_left(deadline))
        self.stop()
        return b"", "returned too much"

    def ready(self, mode: Mode) -> socket.socket:
        """Returns the channel to the process, which is started if there is none."""
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self.sandbox.start(mode, {"source": self.source}, [theirs], _cpu_seconds(self.deadline), self.prepare)
            self._channel, self.runs = ours, 0  # only of a job that was started: `finish` closes its file of errors
        self.runs += 1
        return self._channel

    def _end(self, seconds: float) -> str:
        """Waits for the end of the process. Returns why it ended; empty if it ended by itself."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        status, errors = self.sandbox.finish(seconds)
        if status == -signal.SIGXCPU:
            return "took too long"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return _last_line(errors) if status else ""


@dataclass(frozen=True, slots=True)
class CodeTests:
    """Tests that are Python: each passes if it raises nothing."""

    setup: str
    """Code that runs first, once."""
    names: tuple[str, ...]
    """Functions and classes of the program that the tests use."""
    tests: tuple[str, ...]


def verdicts(
    of_program: Sandbox, of_tests: Sandbox, source: str, given: CodeTests, *, seconds: float, deadline: float
) -> Iterator[str]:
    """Yields for each test why it failed, empty if it passed. Program and tests run in a sandbox each.

    Tests run one after another in one process. After a test that took too long, or that ended the program, the rest
    runs in new processes. Each test has `seconds`; at the `deadline`, on time.monotonic's clock, the rest is left out.
    """
    program = Program(of_program, source, deadline=deadline)
    of_tests.renew()
    done = 0
    while done < len(given.tests) and time.monotonic() < deadline:
        job = {"source": given.setup, "names": given.names, "tests": given.tests[done:]}
        ours, theirs = socket.socketpair()
        with ours, program, contextlib.ExitStack() as stack:
            with theirs, program.ready("calls") as asks:
                of_tests.start("tests", job, [theirs, asks], _cpu_seconds(deadline))
            stack.callback(of_tests.finish)
            verdict = b"1"
            while verdict in (b"1", b"0") and done < len(given.tests) and (left := deadline - time.monotonic()) > 0:
                ours.settimeout(min(seconds, left))
                try:
                    verdict = ours.recv(1)
                except TimeoutError:
                    verdict = b"late"
                done += 1
                yield {b"1": "", b"late": "took too long"}.get(verdict, "failed")


def _left(deadline: float) -> float:
    return max(0.0001, deadline - time.monotonic())  # 0 would mean not to wait at all


def _cpu_seconds(deadline: float) -> int:
    return math.ceil(max(0.0, deadline - time.monotonic())) + 1


def _last_line(errors: bytes) -> str:
    lines = errors[-REASON_BYTES_MAX:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "failed"


# --- the kinds of sandbox that work on this machine: each is started, and a program in it tries to get out ---

_PROBE = """
import os, socket, sys, threading
def refused(what):
    try: what()
    except OSError: return True
leaks = [name for name, what in {
    "files": lambda: open(PATH), "network": lambda: socket.socket(), "processes": os.fork,
}.items() if not refused(what)]
wait, started = threading.Event(), 0
threading.stack_size(1 << 16)  # memory must not be what ends it
try:
    for started in range(2 * LIMIT): threading.Thread(target=wait.wait, daemon=True).start()
except RuntimeError: pass
print(started, *leaks, flush=True)
os._exit(0)
"""


def working_kind(isolation: Isolation) -> Kind:
    """Returns the best kind that works on this machine: once started, it must hold a program that tries to get out.

    Raises RewardError if there is none. Never returns `none` in place of another.
    """
    kind, refused = search(isolation)
    if kind is None:
        raise refusal(f"isolation: {isolation}, which does not work here ({'; '.join(refused)})")
    return kind


def checked_kind(isolation: Isolation) -> Kind:
    """Returns working_kind(isolation). Raises ValueError if it does not work."""
    try:
        return working_kind(isolation)
    except RewardError as error:
        raise ValueError("; ".join(f"{problem.given}: {problem.fix}" for problem in error.problems)) from None


@lru_cache
def search(isolation: Isolation) -> tuple[Kind | None, tuple[str, ...]]:
    """Returns the best kind, None if there is none, and the reasons why better ones were refused."""
    if isolation == "none":
        return Kind("none"), ()
    kinds = [
        Kind("bubblewrap", other_user=True, threads=True),
        *(Kind("bubblewrap", user_namespace=True, threads=threads) for threads in (True, False)),
        Kind("seccomp", other_user=True, threads=True),
        Kind("seccomp"),
    ]
    refused: list[str] = []
    for kind in kinds:
        if isolation not in ("auto", kind.isolation) or (kind.other_user and os.geteuid() != 0):
            continue
        try:
            leaks = _leaks(kind)
        except RewardError as error:
            refused += [problem.given for problem in error.problems]
        except OSError as error:
            refused.append(f"{kind}: {error}")
        else:
            if not leaks:
                return kind, tuple(dict.fromkeys(refused))
            refused.append(f"{kind}: does not contain {leaks}")
    return None, tuple(dict.fromkeys(refused))


def _leaks(kind: Kind) -> str:
    """Returns what a program can do in this kind of sandbox and must not, or why it failed; empty if nothing."""
    sandbox = Sandbox(kind, Limits())
    with tempfile.NamedTemporaryFile() as secret, contextlib.closing(sandbox):
        os.chmod(secret.name, 0o644)
        source = f"PATH, LIMIT = {secret.name!r}, {THREADS}\n{_PROBE}"
        with Program(sandbox, source, deadline=time.monotonic() + START_SECONDS) as program:
            ran = program.run("", START_SECONDS)
    if ran.failure:
        return ran.failure
    started, *leaks = ran.value.split() or ["0", "nothing"]
    if kind.threads and not THREADS - 4 <= int(started) <= THREADS:  # fewer: the kernel counts others' too
        leaks.append("the number of threads")
    return ", ".join(leaks)
