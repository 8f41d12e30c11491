"""A signal only leaves a note, which ends what may be given up and nothing else; a second SIGTERM ends the process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megagrpo.cluster.stopping import StopRequested, until_stopped
from megagrpo.errors import EXIT_NODE_LOST, EXIT_STOPPED, NodeLostError, Problem, RunStopped

TWO_SIGNALS = """
import os, signal, sys, time
from megagrpo.cluster.stopping import until_stopped
with until_stopped(lambda: None) as stopping:
    for number in map(int, sys.argv[1:]):
        os.kill(os.getpid(), number)
    if sys.argv[1] != sys.argv[2]:
        print(stopping.signal.name)
    else:
        time.sleep(60)
"""


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_stop_ends_only_what_may_be_given_up(number: signal.Signals) -> None:
    with until_stopped(lambda: None) as stopping:
        with stopping.giving_up():
            stopping.check()
        os.kill(os.getpid(), number)
        assert stopping.requested
        stopping.check()
        with pytest.raises(StopRequested), stopping.giving_up():
            pytest.fail("entered though the run is to stop")
    with until_stopped(lambda: None) as stopping, stopping.giving_up():
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested):
            stopping.check()


def test_the_handlers_before_it_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with until_stopped(lambda: None):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


STUCK = """
import ctypes, os, signal, threading, time
from megagrpo.cluster.stopping import until_stopped
def send():
    for _ in range(2):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGHUP)
with until_stopped(lambda: None):
    threading.Thread(target=send, daemon=True).start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call never comes back, whatever signals arrive
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def outcome(*numbers: int) -> tuple[int, str]:
    """Exit status of a process that is sent these signals, and the one that it took for its reason to stop."""
    arguments = [sys.executable, "-c", TWO_SIGNALS, *map(str, numbers)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()


def test_a_second_sigterm_ends_the_process_at_once_and_one_after_sigusr1_does_not() -> None:
    assert outcome(signal.SIGTERM, signal.SIGTERM)[0] == 128 + signal.SIGTERM
    assert outcome(signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1) == (0, "SIGTERM")


@pytest.mark.usefixtures("hangups")
def test_a_second_signal_ends_a_process_whose_main_thread_never_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], timeout=60)
    assert done.returncode == 128 + signal.SIGHUP


def test_a_run_told_to_stop_ends_with_the_checkpoint_that_it_has_by_then() -> None:
    saved: list[Path] = []

    def run(newest: Callable[[], Path | None]) -> None:
        with until_stopped(newest) as stopping:
            os.kill(os.getpid(), signal.SIGUSR1)
            saved.append(Path("/runs/a/checkpoints/step_000003"))
            stopping.stop_here()

    with pytest.raises(RunStopped, match=r"SIGUSR1(.|\n)*step_000003") as raised:
        run(lambda: saved[-1])
    assert raised.value.exit_code == EXIT_STOPPED == 75
    with pytest.raises(RunStopped, match="nothing to save"):
        run(lambda: None)


def test_a_lost_node_has_a_code_of_its_own_also_after_a_journey_between_processes() -> None:
    for error in (NodeLostError(Problem("node n1")), RunStopped(Problem("stopped"))):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert NodeLostError.exit_code == EXIT_NODE_LOST == 4
