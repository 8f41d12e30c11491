"""Training ranks for tests: real processes over gloo, at the price of a fork.

`run_ranks(2, function, *args)` calls the function, which its module names, on ranks 0 and 1 of a fresh process group of
two and returns their results in rank order. A nursery process imports what ranks need once; each rank is a fork of
it, which starts in milliseconds and ends with the call. Ranks do not serve a second call: nothing of a test stays in
them, and a gloo group that is destroyed leaves a thread that wakes up a hundred times a second.
A rank that raises, dies or passes its deadline ends the call with RankGroupError, which carries the ranks' tracebacks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[1]
TE_STUB = f"{Path(__file__).with_name('te_stub')}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
RANKS_MAX = 8
# Deadlines that are only there to end a test that hangs: a busy machine may take fifty times what an idle one takes.
START_SECONDS = 600.0
CALL_SECONDS = 600.0
TRACE_SECONDS = 60.0
TRACE_END = "in <module>\n"
DIED = "died without a traceback"
# One thread each: the ranks together already use every core. No GPU: the ranks run on CPUs wherever the tests run.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# What the tests' functions need: seconds of a core for a rank that imports it by itself.
IMPORTED = (
    "megagrpo.megatron.process",  # first: imports Megatron, with what it needs on CPUs
    "megagrpo.megatron.rank",
    "megatron.core.models.mimo.optimizer",  # Megatron's optimizers import it when one is made
    *(f"tests.distributed.{file.stem}" for file in sorted(Path(__file__).with_name("distributed").glob("*.py"))),
)


class RankGroupError(RuntimeError):
    """A rank raised, died or did not answer in time. The message has every traceback that there is."""


def run_ranks(
    ranks: int,
    function: Callable[..., T],
    *args: Any,
    timeout: float = CALL_SECONDS,
    joined: bool = True,
    transformer_engine: bool = False,
) -> list[T]:
    """Results of `function` ("module:name") called with `args` on each of `ranks` processes joined by gloo.

    Arguments and results travel by pickle. `timeout` is in seconds, for the whole call. Without `joined` the function
    makes a process group of its own: it is called with its rank and an address where the ranks can meet before `args`.
    With `transformer_engine` the ranks find tests/te_stub in its place; without, they find none.
    """
    if not 1 <= ranks <= RANKS_MAX:
        raise ValueError(f"ranks = {ranks}; this harness has 1 to {RANKS_MAX}")
    if transformer_engine not in _groups:
        _groups[transformer_engine] = RankGroup(transformer_engine)
        atexit.register(_groups[transformer_engine].close)
    return _groups[transformer_engine].run(ranks, function, args, timeout, joined)


# --- the test's side --------------------------------------------------------------------------------------------------


class RankGroup:
    """The nursery, which forks the ranks of every call."""

    def __init__(self, transformer_engine: bool) -> None:
        self._directory = tempfile.mkdtemp(prefix="megagrpo_ranks_")
        self._control, theirs = socket.socketpair()
        self._nursery = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from tests.rank_group import nurse; nurse({theirs.fileno()}, {self._directory!r})",
            ],
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT | ({"PYTHONPATH": TE_STUB} if transformer_engine else {}),
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # the nursery cleans up and ends its process group when this process is gone
        )
        theirs.close()
        self._calls = 0

    def run(
        self, ranks: int, function: Callable[..., T], args: tuple[Any, ...], timeout: float, joined: bool
    ) -> list[T]:
        self._calls += 1
        files = Path(self._directory) / str(self._calls)
        files.mkdir()
        connections = [self._fork(files / f"trace{rank}") for rank in range(ranks)]
        pids: list[int] = []
        try:
            for rank, connection in enumerate(connections):
                if not connection.poll(START_SECONDS):
                    raise RankGroupError(f"rank {rank} did not start in {START_SECONDS:.0f} s")
                pids.append(connection.recv())
            store = f"file://{files / 'store'}"
            for rank, connection in enumerate(connections):
                job = (
                    (function, args, (rank, ranks, store, "cpu", timeout))
                    if joined
                    else (function, (rank, store, *args))
                )
                connection.send_bytes(pickle.dumps(job))
            results, failures = collect(connections, time.monotonic() + timeout)
            for rank in set(range(ranks)) - results.keys() - failures.keys():
                failures[rank] = where_it_hangs(pids[rank], files / f"trace{rank}")
        finally:
            for connection in connections:
                connection.close()
            for pid in pids:
                end_family(pid)
            shutil.rmtree(files)
        if failures:
            raise RankGroupError("\n".join(f"[rank {rank}] {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(ranks)]

    def _fork(self, trace: Path) -> Connection:
        ours, theirs = Pipe()
        socket.send_fds(self._control, [str(trace).encode().ljust(512)], [theirs.fileno()])
        theirs.close()
        return ours

    def close(self) -> None:
        self._control.close()
        try:
            self._nursery.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._nursery.pid, signal.SIGKILL)
            self._nursery.wait()


def collect(connections: list[Connection], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and tracebacks by rank, of those that answer in time."""
    waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                ok, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                ok, value = False, DIED
            (results if ok else failures)[rank] = value
        if failures:
            # The others now wait for the failed rank, or failed before it: they have a moment for tracebacks of theirs.
            moment = 1.0 if DIED in failures.values() else 10.0
            deadline = min(deadline, time.monotonic() + moment)
    return results, failures


def where_it_hangs(pid: int, trace: Path) -> str:
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return DIED
    deadline = time.monotonic() + (0.2 if stopped(pid) else TRACE_SECONDS)
    while not trace.read_text().endswith(TRACE_END) and time.monotonic() < deadline:
        time.sleep(0.02)
    return f"did not finish; it is at\n{trace.read_text()}"


def end_family(pid: int) -> None:
    """Kill a rank and what it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(pid)
        for process in (*rank.children(recursive=True), rank):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def stopped(pid: int) -> bool:
    """Returns True if a process cannot write: it is stopped by SIGSTOP, or has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


_groups: dict[bool, RankGroup] = {}


# --- the processes' side ----------------------------------------------------------------------------------------------


def nurse(control_fd: int, directory: str) -> None:
    """Fork a rank for each message on the control socket. When that closes, remove the files of the ranks, and end all
    ranks and this process."""
    import torch

    for module in IMPORTED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or collections in the ranks would copy the pages that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the ranks
    control = socket.socket(fileno=control_fd)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 512, 1)
        if not message:
            shutil.rmtree(directory, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(message.decode().strip(), Connection(fds[0]))
            os._exit(0)
        os.close(fds[0])


def serve(trace_file: str, connection: Connection) -> None:
    """Run the job that arrives, and wait to be ended."""
    with open(trace_file, "w") as trace:
        faulthandler.register(signal.SIGUSR1, file=trace)
        try:
            connection.send(os.getpid())
            job = pickle.loads(connection.recv_bytes())
            try:
                answer = pickle.dumps((True, call(*job)))
            except BaseException:  # noqa: BLE001  whatever it is, the test must see it
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
            connection.recv_bytes()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return


def call(function: Callable[..., Any], args: tuple[Any, ...], group: tuple[Any, ...] | None = None) -> Any:
    from megagrpo.megatron import process

    if group is not None:
        process.start(*group)
    return function(*args)
