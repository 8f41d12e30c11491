"""Diagnosis of training ranks that died or do not answer, from their processes and logs, on their nodes."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from megagrpo.cluster.waiting import on_node
from megagrpo.errors import Problem

LOOK_SECONDS = 30.0
"""Timeout of a task on the node of a rank."""
STACK_SECONDS = 2.0
"""Time for a process to write its stacks."""
LINES = 10
LINE_BYTES = 1000
NAMED = 3
"""Most ranks that an error names."""
STACK_SIGNAL = signal.SIGUSR2
WAITING = ("/torch/distributed/", "/megatron/core/pipeline_parallel/")
"""Source files in the stack of a rank that waits for others."""
TASK = "/megagrpo/cluster/actors.py"
"""Source file in the stack of a rank that works for the driver."""
WRITES = re.compile(r" in (write_snapshot|finish_snapshot|write_copied_export)$", re.MULTILINE)
"""Functions in the stack of a thread that writes files beside that work."""


@dataclass(frozen=True)
class ProcessAt:
    """The process of a rank: its id, creation time, node and log."""

    pid: int
    born: float
    node: str  # Ray's id
    log: Path

    def signal(self, number: int) -> None:
        """Sends a signal to the process; to be called on its node."""
        if process := self.process:
            with suppress(psutil.Error):
                process.send_signal(number)

    @property
    def process(self) -> psutil.Process | None:
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return process if process.create_time() == self.born else None
        return None


@dataclass(frozen=True)
class RankState:
    """The state of a process."""

    text: str
    blame: int  # the ranks with the largest value hold up the others; 0: it waits itself
    lines: Sequence[str] = ()


def begin_log(log: Path) -> ProcessAt:
    """Redirects this process's output to the log, and at STACK_SIGNAL its stacks. Returns its ProcessAt."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    born = psutil.Process().create_time()
    return ProcessAt(os.getpid(), born, ray.get_runtime_context().get_node_id(), log)


def blamed_ranks(ranks: Mapping[str, ProcessAt], nodes: Mapping[str, str]) -> list[Problem]:
    """Returns a problem for each rank that the others wait for, at most NAMED, if the reason is known: it has died, is
    stopped, or is busy elsewhere. nodes: names by Ray's id."""
    states = _on_nodes(look, ranks)
    most = max((state.blame for state in states.values()), default=0)
    blamed = [name for name in ranks if most and name in states and states[name].blame == most]
    return [
        Problem(
            where=f"{name}, process {ranks[name].pid} on node {nodes.get(ranks[name].node, ranks[name].node)}",
            given="\n".join([states[name].text, *states[name].lines]),
            fix=f"its output is in {ranks[name].log}",
        )
        for name in blamed[:NAMED]
    ]


def end_all(ranks: Mapping[str, ProcessAt]) -> None:
    """Kills the ranks' processes on their nodes: a stopped process does not end when Ray asks it to."""
    _on_nodes(end, ranks)


def _on_nodes(task: Any, ranks: Mapping[str, ProcessAt]) -> dict[str, Any]:
    """Runs the task on the ranks' nodes. Returns its results by rank, without those of nodes that do not answer."""
    by_node: dict[str, list[str]] = {}
    for name, process in ranks.items():
        by_node.setdefault(process.node, []).append(name)
    tasks = {on_node(task, node).remote([ranks[name] for name in names]): names for node, names in by_node.items()}
    answered, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=LOOK_SECONDS) if tasks else ([], [])
    results: dict[str, Any] = {}
    for answer in answered:
        with suppress(ray.exceptions.RayError):  # the caller has an error to raise, with or without this
            results |= zip(tasks[answer], ray.get(answer), strict=True)
    return results


@ray.remote(num_cpus=0, max_retries=0)
def end(processes: Sequence[ProcessAt]) -> list[bool]:
    for process in processes:
        process.signal(signal.SIGKILL)
    return [True] * len(processes)


@ray.remote(num_cpus=0, max_retries=0)
def look(processes: Sequence[ProcessAt]) -> list[RankState]:
    """Returns the states of these processes of this node."""
    written = [process.log.stat().st_size for process in processes]
    for process in processes:
        process.signal(STACK_SIGNAL)
    time.sleep(STACK_SECONDS)
    return [state_of(process, size) for process, size in zip(processes, written, strict=True)]


def state_of(at: ProcessAt, size: int) -> RankState:
    """Returns the state of a process that was signalled to write its stacks when its log had `size` bytes."""
    status = psutil.STATUS_DEAD
    if process := at.process:
        with suppress(psutil.Error):
            status = process.status()
    with at.log.open("rb") as log:
        log.seek(max(0, size - LINES * LINE_BYTES))
        lines = log.read(min(size, LINES * LINE_BYTES)).decode(errors="replace").splitlines()[-LINES:]
        stacks = log.read().decode(errors="replace")
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return RankState("it has died; its last output:" if lines else "it has died without a word", 3, lines)
    if not stacks:
        return RankState(f"it does not react: its state is {status}", 2)
    threads = (thread for thread in stacks.split("\n\n") if TASK in thread)
    working = next((thread for thread in threads if not WRITES.search(thread)), "")  # no rank waits for files
    if not working or any(file in working for file in WAITING):
        return RankState("", 0)
    frames = [line.strip() for line in working.splitlines() if line.startswith("  File")]
    return RankState("the others wait for it; it is at", 1, frames[:LINES])
