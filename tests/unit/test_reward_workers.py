"""Reward functions that misbehave in real worker processes cost their own sample, and leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megagrpo.errors import RewardError
from megagrpo.reward import worker_process
from megagrpo.reward.scorer import Scorer, reward_problems
from tests.unit.test_reward_scorer import ends, make_group, reward_of

MISBEHAVES = r"""
import os, pathlib, pickle, socket, subprocess, sys

PAYLOADS = {
    "garbage": b"\x80\x04garbage\n",
    "pickle": pickle.dumps((0, "outcome")) + b"\n",
    "number": b'{"number": 12345, "score": 1.0, "metrics": {}, "error": "", "trace": ""}\n',
    "text": b'{"number": "0", "score": "1.0", "metrics": {}, "error": "", "trace": ""}\n',
    "nan": b"{\"number\": 0, \"score\": NaN, \"metrics\": {}, \"error\": \"\", \"trace\": \"\"}\n",
    "list": b"[1]\n",
    "deep": b"[" * 100_000 + b"\n",
    "huge": b"9" * (3 << 20),
    "half": b'{"number": 0, "sc',
}

def into_the_channel(data):
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}") is False:
            continue
        try:
            channel = socket.socket(fileno=os.dup(int(name)))
            channel.getpeername()
            channel.sendall(data)
        except OSError:
            pass

def misbehaves(data_source, response, ground_truth, extra_info):
    if response in PAYLOADS:
        into_the_channel(PAYLOADS[response])
    if response == "interrupt": raise KeyboardInterrupt
    if response == "fork": os.fork()
    if response == "metrics": return {"score": 1.0, **{f"m{n}": n for n in range(100_000)}}
    if response == "memory": return len(bytearray(1 << 34))
    if response == "remove":
        os.rename(__file__, __file__ + ".gone")
        os._exit(1)
    if response == "flood":
        for _ in range(64): print("x" * (1 << 20), flush=True)
    if response == "parent": os.kill(os.getppid(), 9)
    if response.startswith("/"):
        orphan = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
        pathlib.Path(response).write_text(str(orphan.pid))
        if response.endswith("daemon"): return 1.0
        os._exit(0)
    return {"score": 4.0, "secret": "SECRET" in os.environ, "given": "GIVEN" in os.environ,
            "first": int(pathlib.Path("/proc/self/oom_score_adj").read_text())}
"""


@pytest.fixture
def make_scorer(tmp_path: Path) -> Iterator[Callable[..., Scorer]]:
    (tmp_path / "mine.py").write_text(MISBEHAVES)
    with ExitStack() as stack:

        def make(**options: object) -> Scorer:
            function = {"function": f"{tmp_path / 'mine.py'}:misbehaves"}
            options = {"workers": 1, "timeout_seconds": 300.0, "memory_gib": 4, **options}
            scorer = Scorer(reward_of(function, **options), response_tokens_max=8, say=print)
            stack.callback(scorer.close)
            return scorer

        yield make


def test_what_a_function_does_to_its_process_costs_one_sample(make_scorer: Callable[..., Scorer]) -> None:
    payloads = re.findall(r'^    "(\w+)": b', MISBEHAVES, re.MULTILINE)
    bad = [*payloads, "pickle", "interrupt", "metrics", "memory"]
    (group,) = make_scorer().score([make_group(*[text for name in bad for text in (name, "fine")])])
    values = [score.value for score in group.scores]
    assert values[1::2] == [4.0] * len(bad)
    for name, score in zip(bad, group.scores[::2], strict=True):
        assert (score.value, bool(score.error)) == (None, True), name


def test_a_function_that_kills_its_keeper_costs_at_most_a_sample(make_scorer: Callable[..., Scorer]) -> None:
    scorer = make_scorer()
    scorer.score([make_group("fine")])
    (worker,) = scorer._pool._workers
    (group,) = scorer.score([make_group("parent", "fine")])
    assert sum(score.value is None for score in group.scores) <= 1
    assert ends(worker.process.pid)
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].value == 4.0


def test_a_function_that_forks_answers_once(make_scorer: Callable[..., Scorer]) -> None:
    (group,) = make_scorer().score([make_group("fork", "fine", "fork", "fine")])
    assert [score.value for score in group.scores] == [4.0] * 4


@pytest.mark.parametrize("name", ["daemon", "dead"])
def test_a_daemon_ends_with_its_worker(make_scorer: Callable[..., Scorer], tmp_path: Path, name: str) -> None:
    scorer = make_scorer()
    scorer.score([make_group(str(tmp_path / name))])
    orphan = int((tmp_path / name).read_text())
    scorer.close()
    assert ends(orphan)


def test_a_file_is_read_once(make_scorer: Callable[..., Scorer]) -> None:
    (group,) = make_scorer().score([make_group("fine", "remove", "fine")])
    assert [score.value for score in group.scores] == [4.0, None, 4.0]


def test_what_functions_print_is_bounded(make_scorer: Callable[..., Scorer], capfd: pytest.CaptureFixture[str]) -> None:
    scorer = make_scorer()
    (group,) = scorer.score([make_group("flood", "fine")])
    scorer.close()
    printed = capfd.readouterr().err
    assert [score.value for score in group.scores] == [4.0, 4.0]
    assert worker_process.OUTPUT_BYTES_MAX < len(printed) < 1.1 * worker_process.OUTPUT_BYTES_MAX
    left_out = sum(int(number.replace(",", "")) for number in re.findall(r"\[([\d,]+) bytes", printed))
    assert left_out == 64 * ((1 << 20) + 1) - worker_process.OUTPUT_BYTES_MAX


def test_functions_see_the_variables_they_are_given_and_go_first_when_memory_ends(
    make_scorer: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("GIVEN", "y")
    (group,) = make_scorer(environment=["GIVEN"]).score([make_group("fine")])
    parts = group.scores[0].parts
    assert (parts["misbehaves.secret"], parts["misbehaves.given"], parts["misbehaves.first"]) == (0, 1, 1000)


def test_a_function_that_fails_on_most_responses_ends_the_run_with_its_traceback(
    make_scorer: Callable[..., Scorer], capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = make_scorer(failed_share_max=0.5)
    scorer.score([make_group("interrupt", "fine")])
    assert capsys.readouterr().out.count("KeyboardInterrupt") == 2  # the line and what it raises
    with pytest.raises(RewardError) as caught:
        scorer.score([make_group("interrupt", "interrupt", "fine")])
    assert "mine.py" in str(caught.value)
    assert caught.value.exit_code != 0


def test_an_import_that_raises_anything_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise KeyboardInterrupt")
    (problem,) = reward_problems(reward_of({"function": f"{tmp_path / 'bad.py'}:f"}))
    assert "KeyboardInterrupt" in problem.given
    assert problem.needed
    assert problem.fix
    assert "SIGKILL" not in problem.given


def test_no_process_of_a_closed_scorer_is_left(make_scorer: Callable[..., Scorer]) -> None:
    scorer = make_scorer(workers=2)
    scorer.score([make_group(*["fine"] * 4)])
    pids = [worker.process.pid for worker in scorer._pool._workers]
    began = time.monotonic()
    scorer.close()
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids), time.monotonic() - began


DRIVER = """
import sys, time
from megagrpo.reward.functions import FunctionSpec
from megagrpo.reward.workers import Limits, WorkerPool

pool = WorkerPool([FunctionSpec("mine", sys.argv[1], 1.0, {}, "test")], workers=1, limits=Limits(300.0, 1 << 32))
pool.start()
print(pool.workers()[0].process.pid, flush=True)
time.sleep(1000)
"""


def test_a_keeper_that_was_stopped_ends_when_the_driver_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MISBEHAVES)
    command = [sys.executable, "-c", DRIVER, f"{file}:misbehaves"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout
        keeper = int(driver.stdout.readline())
        os.kill(keeper, signal.SIGSTOP)
        driver.kill()
    assert ends(keeper)
