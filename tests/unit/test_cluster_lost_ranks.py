"""What is said of a training rank that others wait for: from its process and its log."""

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

from megagrpo.cluster.lost_ranks import STACK_SIGNAL, Found, ProcessAt, found_at
from tests.loop import small_run

# A rank's process as an actor has it, whose rank takes for ever: in torch.distributed, or elsewhere.
RANK = """
import faulthandler, sys, time, types
from megagrpo.cluster.actors import RankProcess
faulthandler.register(int(sys.argv[1]), file=2, all_threads=True)
waiting = "def load(directory):\\n    print('begun', file=sys.stderr, flush=True)\\n    time.sleep(600)"
rank = types.ModuleType("rank")
rank.sys, rank.time = sys, time
exec(compile(waiting, sys.argv[2], "exec"), rank.__dict__)
process = RankProcess()
process.rank = rank
process.load(None)
"""


@contextmanager
def rank_in(file: str, log: Path) -> Iterator[ProcessAt]:
    """A rank that is in this file, with this log."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", RANK, str(int(STACK_SIGNAL)), file], stderr=output)
    try:
        small_run.wait_until(lambda: "begun" in log.read_text(), "a rank at work")
        yield ProcessAt(process.pid, psutil.Process(process.pid).create_time(), "node", log)
    finally:
        process.kill()
        process.wait()


def found(at: ProcessAt, until: str | None = None) -> Found:
    """until: where its stacks end."""
    size = at.log.stat().st_size
    at.signal(STACK_SIGNAL)
    if until:
        small_run.wait_until(lambda: at.log.read_text().endswith(until), "stacks")
    return found_at(at, size)


def test_a_dead_rank_is_blamed_before_a_stopped_one_and_one_elsewhere_before_those_that_wait(tmp_path: Path) -> None:
    with rank_in("/own/loss.py", tmp_path / "own") as at:
        elsewhere = found(at, "<module>\n")
    assert elsewhere.lines[0] == 'File "/own/loss.py", line 3 in load'
    with rank_in("/torch/distributed/distributed_c10d.py", tmp_path / "collective") as at:
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
        assert found_at(at, 0).text == "it has died without a word"
        os.kill(other.pid, signal.SIGKILL)
