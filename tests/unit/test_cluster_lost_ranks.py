"""Reports about a training rank that others wait for: from its process and its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from megagrpo.cluster.lost_ranks import STACK_SIGNAL, ProcessAt, RankState, state_of
from tests.loop import small_run

# Ranks as actors have them, which take for ever: in torch.distributed, or elsewhere. Their processes are copies of one,
# which imports once, says their numbers, and waits for their end.
RANKS = """
import faulthandler, os, sys, time, types
from megagrpo.cluster.actors import RankActor
waiting = "def load(directory):\\n    print('begun', file=sys.stderr, flush=True)\\n    time.sleep(600)"

def work(file, log):
    os.dup2(os.open(log, os.O_WRONLY), 2)
    faulthandler.register(int(sys.argv[1]), file=2, all_threads=True)
    rank = types.ModuleType("rank")
    rank.sys, rank.time = sys, time
    exec(compile(waiting, file, "exec"), rank.__dict__)
    process = RankActor.__ray_metadata__.modified_class()
    process.rank = rank
    process.call("load", None)

for file, log in zip(sys.argv[2::2], sys.argv[3::2]):
    if (number := os.fork()) == 0:
        work(file, log)
    print(number, flush=True)
sys.stdin.read()
for _ in sys.argv[2::2]:
    os.wait()
"""


@contextmanager
def ranks_in(directory: Path, *files: str) -> Iterator[list[ProcessAt]]:
    """Ranks each of which is in one of these files, with logs in `directory`."""
    logs = [directory / f"rank_{number}.log" for number in range(len(files))]
    for log in logs:
        log.touch()
    named = [str(word) for pair in zip(files, logs, strict=True) for word in pair]
    command = [sys.executable, "-c", RANKS, str(int(STACK_SIGNAL)), *named]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        numbers = [int(process.stdout.readline()) for _ in files]
        try:
            for log in logs:
                small_run.wait_until(lambda log=log: "begun" in log.read_text(), "a rank at work")
            yield [
                ProcessAt(number, psutil.Process(number).create_time(), "node", log)
                for number, log in zip(numbers, logs, strict=True)
            ]
        finally:
            for number in numbers:
                os.kill(number, signal.SIGKILL)
            process.communicate()


def found(at: ProcessAt, until: str | None = None) -> RankState:
    """until: where its stacks end."""
    size = at.log.stat().st_size
    at.signal(STACK_SIGNAL)
    if until:
        small_run.wait_until(lambda: at.log.read_text().endswith(until), "stacks")
    return state_of(at, size)


def test_a_dead_rank_is_blamed_before_a_stopped_one_and_one_elsewhere_before_those_that_wait(tmp_path: Path) -> None:
    with ranks_in(tmp_path, "/own/loss.py", "/torch/distributed/distributed_c10d.py") as (own, at):
        elsewhere = found(own, "<module>\n")
        assert elsewhere.lines[0] == 'File "/own/loss.py", line 3 in load'
        waits = found(at, "<module>\n")
        at.signal(signal.SIGSTOP)
        small_run.wait_until(lambda: at.process.status() == psutil.STATUS_STOPPED, "a stop")
        stopped = found(at)
        at.signal(signal.SIGKILL)
        small_run.wait_until(lambda: at.process.status() == psutil.STATUS_ZOMBIE, "an end")
        dead = found(at)
    assert dead.blame > stopped.blame > elsewhere.blame > waits.blame == 0
    assert "stopped" in stopped.text
    assert dead.lines[-1].endswith("<module>")


def test_another_process_with_the_number_of_a_dead_rank_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        at = ProcessAt(other.pid, psutil.Process(other.pid).create_time() - 1, "node", tmp_path / "log")
        at.signal(signal.SIGKILL)
        time.sleep(0.2)
        assert other.poll() is None
        assert state_of(at, 0).text == "it has died without a word"
        os.kill(other.pid, signal.SIGKILL)
