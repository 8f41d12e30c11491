"""Reward functions that misbehave in real worker processes cost their own sample, and leave nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megagrpo.errors import RewardError
from megagrpo.reward import keeper, workers
from megagrpo.reward.functions import FunctionSpec, Task
from megagrpo.reward.scorer import Scorer, reward_problems
from tests.unit.test_reward_faults import ends, pids_with
from tests.unit.test_reward_scorer import make_group, reward_of

MISBEHAVES = r"""
import json, os, pathlib, pickle, socket, subprocess, sys

def answer(number, **wrong):
    outcome = {"score": 1.0, "metrics": {}, "notes": {}, "error": "", "trace": "", **wrong}
    return json.dumps({"number": number, "outcomes": [outcome]}).encode() + b"\n"

PAYLOADS = {  # NUMBER is that of the call
    "garbage": b"\x80\x04garbage\n",
    "pickle": pickle.dumps((0, "outcome")) + b"\n",
    "number": answer(12345, score=1.0),
    "text": answer("NUMBER", score="1.0"),
    "nan": answer("NUMBER", score=float("nan")),
    "error": answer("NUMBER", error="and a score"),
    "notes": answer("NUMBER", notes={"answer": 7}),
    "several": b'{"number": "NUMBER", "outcomes": [{}, {}]}\n',
    "none": b'{"number": "NUMBER", "outcomes": 3}\n',
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

def cmdline(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""

def misbehaves(data_source, response, ground_truth, extra_info):
    if response in PAYLOADS:
        number = 2 * list(PAYLOADS).index(response)  # the good responses are between
        into_the_channel(PAYLOADS[response].replace(b'"NUMBER"', b"%d" % number))
    if response == "interrupt": raise KeyboardInterrupt
    if response == "fork": os.fork()
    if response == "no text": raise ValueError("\ud800")
    if response == "metrics": return {"score": 1.0, **{f"m{n}": n for n in range(100_000)}}
    if response == "memory": return len(bytearray(1 << 34))
    if response == "remove":
        os.rename(__file__, __file__ + ".gone")
        os._exit(1)
    if response == "flood":
        for _ in range(64): print("x" * (1 << 20), flush=True)
    if response == "parent": os.kill(os.getppid(), 9)
    if response.startswith("/"):
        forever = [sys.executable, "-c", "import time; time.sleep(1000)", response]
        subprocess.Popen(forever, env={}, start_new_session=True)
        while forever[-1].encode() not in b"".join(map(cmdline, pathlib.Path("/proc").glob("[0-9]*"))): pass
        if response.endswith("daemon"): return 1.0
        os._exit(0)
    return {"score": 4.0, "secret": "SECRET" in os.environ, "given": "GIVEN" in os.environ,
            "seen": response.encode() in b"".join(map(cmdline, pathlib.Path("/proc").glob("[0-9]*"))),
            "first": int(pathlib.Path("/proc/self/oom_score_adj").read_text())}
"""


@pytest.fixture(params=[pytest.param("apart", marks=pytest.mark.needs("bubblewrap")), "beside"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns True if workers have processes of their own; False as on a machine without bubblewrap."""
    if request.param == "beside":
        monkeypatch.setattr(workers, "processes_apart", lambda: ())
    return request.param


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


@pytest.mark.usefixtures("apart")
def test_what_a_function_does_to_its_process_costs_one_sample(make_scorer: Callable[..., Scorer]) -> None:
    payloads = re.findall(r'^    "(\w+)": ', MISBEHAVES, re.MULTILINE)
    bad = [*payloads, "interrupt", "metrics", "memory"]
    (group,) = make_scorer().score([make_group(*[text for name in bad for text in (name, "fine")])])
    values = [score.value for score in group.scores]
    assert values[1::2] == [4.0] * len(bad)
    for name, score in zip(bad, group.scores[::2], strict=True):
        assert (score.value, bool(score.error)) == (None, True), name


def test_an_error_that_is_no_text_is_the_responses_own_and_its_worker_stays(make_scorer: Callable[..., Scorer]) -> None:
    scorer = make_scorer()
    scorer.score([make_group("fine")])
    (worker,) = scorer._executors["workers"]._workers
    (group,) = scorer.score([make_group("no text", "fine")])
    assert "ValueError" in group.scores[0].error
    assert group.scores[1].value == 4.0
    assert scorer._executors["workers"]._workers == [worker]


def test_a_worker_sees_no_other_process_where_bubblewrap_works(make_scorer: Callable[..., Scorer]) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen([sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE):
        (group,) = make_scorer().score([make_group(mark)])
    assert group.scores[0].parts["misbehaves.seen"] == (not workers.processes_apart())


@pytest.mark.needs("bubblewrap")
def test_a_function_that_kills_its_parent_costs_nothing_where_bubblewrap_works(
    make_scorer: Callable[..., Scorer],
) -> None:
    (group,) = make_scorer().score([make_group("parent", "fine")])
    assert [score.value for score in group.scores] == [4.0, 4.0]


def test_a_function_that_kills_its_keeper_costs_at_most_a_sample(
    make_scorer: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "processes_apart", lambda: ())
    scorer = make_scorer()
    scorer.score([make_group("fine")])
    (worker,) = scorer._executors["workers"]._workers
    (group,) = scorer.score([make_group("parent", "fine")])
    assert sum(score.value is None for score in group.scores) <= 1
    assert ends(worker.process.pid)
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].value == 4.0


@pytest.mark.usefixtures("apart")
def test_a_function_that_forks_answers_once(make_scorer: Callable[..., Scorer]) -> None:
    (group,) = make_scorer().score([make_group("fork", "fine", "fork", "fine")])
    assert [score.value for score in group.scores] == [4.0] * 4


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("name", ["daemon", "dead"])
def test_a_daemon_ends_with_its_worker(make_scorer: Callable[..., Scorer], tmp_path: Path, name: str) -> None:
    scorer = make_scorer()
    scorer.score([make_group(str(tmp_path / name))])
    orphans = pids_with(str(tmp_path / name))
    assert len(orphans) == 1 or name == "dead"  # it ends with its worker
    scorer.close()
    assert all(map(ends, orphans))


def test_a_file_is_read_once(make_scorer: Callable[..., Scorer]) -> None:
    (group,) = make_scorer().score([make_group("fine", "remove", "fine")])
    assert [score.value for score in group.scores] == [4.0, None, 4.0]


def test_what_functions_print_is_bounded(make_scorer: Callable[..., Scorer], capfd: pytest.CaptureFixture[str]) -> None:
    scorer = make_scorer()
    (group,) = scorer.score([make_group("flood", "fine")])
    scorer.close()
    printed = capfd.readouterr().err
    assert [score.value for score in group.scores] == [4.0, 4.0]
    assert workers.OUTPUT_BYTES_MAX < len(printed) < 1.1 * workers.OUTPUT_BYTES_MAX
    left_out = sum(int(number.replace(",", "")) for number in re.findall(r"\[([\d,]+) bytes", printed))
    assert left_out == 64 * ((1 << 20) + 1) - workers.OUTPUT_BYTES_MAX


def test_a_keeper_that_is_told_to_end_more_than_once_says_nothing() -> None:
    waits = [sys.executable, "-S", "-c", "print('up', flush=True); import time; time.sleep(60)"]
    for _ in range(20):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [*keeper.python("keeper", "keep", waits, 1000), str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
            assert process.stderr
            assert process.stderr.readline() == "up\n"
            while process.poll() is None:
                process.terminate()
                time.sleep(5e-5)
            assert (process.stderr.read(), process.returncode) == ("", -signal.SIGKILL)
            process.stderr.close()


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


@pytest.mark.usefixtures("apart")
def test_no_process_of_a_closed_scorer_is_left(make_scorer: Callable[..., Scorer]) -> None:
    scorer = make_scorer(workers=2)
    scorer.score([make_group(*["fine"] * 4)])
    pids = [worker.process.pid for worker in scorer._executors["workers"]._workers]
    began = time.monotonic()
    scorer.close()
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids), time.monotonic() - began


def test_a_cancelled_batch_ends_while_workers_start(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(45)\ndef slow(response): return 1.0\n")
    spec, group = FunctionSpec("slow", f"{tmp_path / 'slow.py'}:slow", 1.0, {}, "test"), make_group("fine")
    pool = workers.WorkerPool({0: spec}, workers=1, limits=workers.Limits(300.0, 1 << 32))
    (future,) = pool.submit([(0, Task(group.prompt, group.samples))])
    future.cancel()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 30


DRIVER = """
import sys, time
from megagrpo.reward.functions import FunctionSpec
from megagrpo.reward.workers import Limits, WorkerPool

pool = WorkerPool({0: FunctionSpec("mine", sys.argv[1], 1.0, {}, "test")}, workers=1, limits=Limits(300.0, 1 << 32))
pool.by_group()
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


@pytest.mark.parametrize("sent", [[], [({}, 300.0, 1 << 32)]])
def test_a_worker_whose_driver_was_killed_while_it_began_ends_without_a_word(sent: list[object]) -> None:
    ours, its = socket.socketpair()
    connection = Connection(ours.detach())
    for message in sent:
        connection.send(message)
    connection.close()
    program = f"from megagrpo.reward.worker_process import work; work({its.fileno()})"
    ended = subprocess.run([sys.executable, "-c", program], pass_fds=[its.fileno()], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
