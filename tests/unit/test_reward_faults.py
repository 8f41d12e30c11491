"""Faults of reward functions in real worker processes touch no other sample, and nothing of them stays."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, nullcontext
from pathlib import Path

import psutil
import pytest

from megagrpo.errors import RewardError
from megagrpo.reward import keeper
from megagrpo.reward.scorer import Scorer
from megagrpo.types import Group
from tests.unit.test_reward_scorer import clock as clock
from tests.unit.test_reward_scorer import make_group, reward_of
from tests.unit.test_reward_scorer import make_scorer as make_scorer

FAULTS = """
import asyncio, os, pathlib, subprocess, sys, time

WORKER = int.from_bytes(os.urandom(6))
arrived = []

def hangs():
    pathlib.Path(__file__).with_name("hangs").touch()

def fault(data_source, response, ground_truth, extra_info):
    if response == "loop":
        hangs()
        while True: pass
    if response == "sleep":
        hangs()
        time.sleep(1000)
    if response == "exit": os._exit(3)
    if response == "kill": os.kill(os.getpid(), 9)
    if response == "raise": raise KeyError("x")
    if response == "sys.exit": sys.exit(0)
    if response == "nan": return float("nan")
    if response == "text": return "1.0"
    if response.startswith("/"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", response])
        hangs()
        child.wait()
    heavy = sum(name in sys.modules for name in ("torch", "numpy", "pydantic", "transformers", "ray"))
    return {"score": len(response), "worker": WORKER, "heavy": heavy}

async def fault_async(data_source, response, ground_truth, extra_info):
    if response == "await": await asyncio.sleep(1000)
    if response == "meet":
        arrived.append(response)
        while len(arrived) < 40: await asyncio.sleep(0.01)
    return fault(data_source, response, ground_truth, extra_info)
"""


@pytest.fixture
def faults(tmp_path) -> Path:
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    return path


EXPECTED = {
    "loop": "took longer than 1000 s",
    "sleep": "took longer than 1000 s",
    "exit": "process died (exit status 3)",
    "kill": "process died (killed by SIGKILL)",
    "raise": "KeyError: 'x'",
    "sys.exit": "SystemExit: 0",
    "nan": "returned nan as score, not a finite number",
    "text": "returned '1.0' as score, not a number",
}


@pytest.mark.parametrize("function", ["fault", "fault_async"])
def test_every_fault_masks_its_own_sample_only(make_scorer, function, faults):
    gsm8k = {"function": "gsm8k", "arguments": {"method": "flexible"}}
    scorer = make_scorer(gsm8k, {"function": f"{faults}:{function}"}, workers=1, timeout_seconds=1000.0)
    texts = [text for fault in EXPECTED for text in (fault, "fine")]
    (group,) = scorer.score([make_group(*texts)])
    for text, score in zip(texts, group.scores, strict=True):
        if text == "fine":
            assert (score.value, score.error) == (4.0, "")
        else:
            assert score.value is None
            assert score.parts == {"gsm8k": 0.0}
            assert EXPECTED[text] in score.error
            assert score.error.startswith(function)
    (again,) = scorer.score([make_group("fine", "fine")])
    assert [score.value for score in again.scores] == [4.0, 4.0]


def test_async_calls_run_side_by_side(make_scorer, faults):
    scorer = make_scorer({"function": f"{faults}:fault_async"}, workers=1, timeout_seconds=100.0)
    (group,) = scorer.score([make_group(*["meet"] * 40)])  # each waits for all
    assert [score.value for score in group.scores] == [4.0] * 40


def test_async_calls_are_cancelled_by_the_worker_itself(make_scorer, faults):
    scorer = make_scorer({"function": f"{faults}:fault_async"}, workers=1, timeout_seconds=1.0)
    (group,) = scorer.score([make_group("await", "fine")])
    workers = {score.parts.get("fault_async.worker") for score in group.scores} - {None}
    assert [score.value for score in group.scores] == [None, 4.0]
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].parts["fault_async.worker"] in workers  # it was not replaced


@pytest.mark.parametrize(
    ("function", "fine", "endless"),
    [
        ({"function": "math"}, r"\boxed{7}", r"\boxed{9^{9^{9^{9}}}}"),
        ({"function": "format", "arguments": {"pattern": r"\A(a+)+\Z"}}, "aaa", "a" * 60 + "b"),
    ],
)
def test_a_built_in_function_is_stopped_at_the_time_limit_off_the_main_thread(
    make_scorer, clock, function, fine, endless
):
    scorer = make_scorer(function, workers=1, timeout_seconds=1.0)
    scored: list[Group] = []

    def score() -> None:
        scored.extend(scorer.score([make_group(fine)]))
        clock.flow()
        scored.extend(scorer.score([make_group(endless)]))

    work = threading.Thread(target=score)
    work.start()
    work.join()
    assert [score.value for group in scored for score in group.scores] == [1.0, None]
    assert "took longer than 1 s" in scored[1].scores[0].error


def test_a_worker_that_died_while_idle_blames_no_sample(make_scorer, faults):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=1)
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].parts["fault.heavy"] == 0, "a worker starts without heavy libraries"
    (worker,) = scorer._executors["workers"]._workers
    below(worker.process.pid)[-1].kill()
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)  # the scorer is to find it so
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].value == 4.0


def test_closing_ends_the_processes_and_scoring_starts_them_again(make_scorer, faults):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=2)
    for _ in range(2):
        scorer.score([make_group(*["fine"] * 8)])
        # One worker may have scored all: the other's keeper may not have started it yet.
        while not all(of_each := [below(worker.process.pid) for worker in scorer._executors["workers"]._workers]):
            time.sleep(0.02)
        started = [process for processes in of_each for process in processes]
        scorer.close()
        assert not [process for process in started if process.is_running()]


def test_stopped_processes_are_ended_by_their_keepers_at_once(make_scorer, faults, monkeypatch):
    monkeypatch.setattr(keeper, "END_SECONDS", 600.0)  # no keeper is killed
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=1)
    scorer.score([make_group("fine")])
    (worker,) = scorer._executors["workers"]._workers
    started = below(worker.process.pid)
    os.killpg(worker.process.pid, signal.SIGSTOP)
    scorer.close()
    assert not [process for process in started if process.is_running()]


def test_what_a_function_started_ends_with_it(make_scorer, faults, tmp_path):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=1)
    (group,) = scorer.score([make_group(str(tmp_path / "child"))])
    assert group.scores[0].value is None
    assert all(ends(pid) for pid in pids_with(str(tmp_path / "child")))


def below(pid: int) -> list[psutil.Process]:
    """A keeper's processes, the worker last."""
    return psutil.Process(pid).children(recursive=True)


def pids_with(argument: str) -> list[int]:
    """Processes that were started with this argument."""
    return [process.pid for process in psutil.process_iter(["cmdline"]) if argument in (process.info["cmdline"] or ())]


def ends(pid: int) -> bool:
    """Returns True if a process ends within two minutes; a zombie has ended."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_workers_end_with_a_killed_driver(faults):
    reward = reward_of({"function": f"{faults}:fault"}, workers=1, timeout_seconds=1000.0)
    command, pipe = [sys.executable, "-c", DRIVER, str(faults)], subprocess.PIPE
    driver = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=Path(__file__).parents[2])
    assert driver.stdin is not None
    assert driver.stdout is not None
    with driver.stdin as given:
        pickle.dump((reward, make_group("fine"), make_group("loop")), given)
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    assert ends(pid)


DRIVER = """
import pathlib, pickle, sys, threading, time
import psutil
sys.path.insert(0, ".")
from megagrpo.reward.scorer import Scorer
reward, fine, loop = pickle.load(sys.stdin.buffer)
scorer = Scorer(reward, response_tokens_max=8)
scorer.score([fine])
threading.Thread(target=scorer.score, args=([loop],)).start()
while not pathlib.Path(sys.argv[1]).with_name("hangs").exists():
    time.sleep(0.01)
keeper = psutil.Process(scorer._executors["workers"]._workers[0].process.pid)
print(keeper.children(recursive=True)[-1].pid, flush=True)
"""


@pytest.mark.parametrize(("failed_share_max", "times_said"), [(1.0, 1), (0.5, 0)])
def test_a_first_failure_is_said_unless_it_ends_the_run_which_says_it_then(faults, failed_share_max, times_said):
    said: list[str] = []
    reward = reward_of({"function": f"{faults}:fault"}, failed_share_max=failed_share_max)
    with closing(Scorer(reward, response_tokens_max=8, say=said.append)) as scorer:
        ends = pytest.raises(RewardError, match="KeyError") if failed_share_max < 1 else nullcontext()
        for _ in range(2):
            with ends:
                scorer.score([make_group("raise")])
    assert sum("KeyError" in line for line in said) == times_said
