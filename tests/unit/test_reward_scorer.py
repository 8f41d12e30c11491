"""The scorer with real worker processes: weights, faults, and that a fault touches no other sample.

Time passes for the scorer only when a test lets it: a busy machine takes no response for one that hangs.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megagrpo.errors import RewardError
from megagrpo.recipe import schema
from megagrpo.reward import workers
from megagrpo.reward.scorer import Scorer
from megagrpo.types import FinishReason, Group, Prompt, Sample

FAULTS = """
import asyncio, os, pathlib, subprocess, sys, time

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
        child = subprocess.Popen(["sleep", "1000"])
        open(response, "w").write(str(child.pid))
        hangs()
        child.wait()
    return {"score": len(response), "pid": os.getpid()}

async def fault_async(data_source, response, ground_truth, extra_info):
    if response == "await": await asyncio.sleep(1000)
    if response == "meet":
        arrived.append(response)
        while len(arrived) < 40: await asyncio.sleep(0.01)
    return fault(data_source, response, ground_truth, extra_info)
"""


class Clock:
    """The scorer's. It stands still, but jumps past any deadline when a function says that it hangs, or flows."""

    def __init__(self, hangs: Path) -> None:
        self.hangs = hangs
        self.now = 0.0
        self.flows_since = float("inf")

    def monotonic(self) -> float:
        if self.hangs.exists():
            self.hangs.unlink()
            self.now += 1e6
        return self.now + max(0.0, time.monotonic() - self.flows_since)

    def flow(self) -> None:
        self.flows_since = time.monotonic()


@pytest.fixture(autouse=True)
def clock(tmp_path, monkeypatch) -> Clock:
    made = Clock(tmp_path / "hangs")
    monkeypatch.setattr(workers, "time", made)
    return made


@pytest.fixture
def faults(tmp_path) -> Path:
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    return path


def make_group(*texts: str, ground_truth: str = "7", finish: FinishReason = "stop") -> Group:
    none = np.zeros(0)
    prompt = Prompt("a:0", (1,), "sums", ground_truth, extra_info={"index": 4})
    return Group(prompt, tuple(Sample("a:0", i, none, none, none, finish, text) for i, text in enumerate(texts)))


def make_scorer(*functions: dict, **options) -> Scorer:
    return Scorer(schema.RewardConfig.model_validate({"functions": list(functions), **options}), response_tokens_max=8)


def test_scores_are_weighted_sums_with_their_parts(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(data_source, response, ground_truth, extra_info, bonus):\n"
        "    return {'score': extra_info['index'] + bonus, 'right': data_source == 'sums' and ground_truth == '7'}\n"
    )
    scorer = make_scorer(
        {"function": "gsm8k"},
        {"function": f"{tmp_path / 'mine.py'}:mine", "weight": 0.5, "arguments": {"bonus": 1}},
        {"function": "format", "weight": -1.0, "arguments": {"pattern": "7$"}},
        {"function": "format", "weight": 0.0, "arguments": {"pattern": "^#"}},
    )
    first, second = scorer.score([make_group("#### 7", "#### 8"), make_group("7")])
    scorer.close()
    assert [score.value for score in first.scores] == [1 + 2.5 - 1, 2.5]
    assert first.scores[0].parts == {"gsm8k": 1.0, "mine": 5.0, "mine.right": 1.0, "format": 1.0, "format_2": 1.0}
    assert (second.scores[0].value, second.prompt, len(second.samples)) == (1.5, make_group("7").prompt, 1)


def test_gsm8k_starts_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("starts a process"))
    scorer = make_scorer({"function": "gsm8k"}, workers=0)
    (group,) = scorer.score([make_group("step by step\n#### 7", "#### 8")])
    assert [score.value for score in group.scores] == [1.0, 0.0]


def test_a_bad_ground_truth_and_an_aborted_response_are_masked():
    scorer = make_scorer({"function": "gsm8k"})
    bad, aborted = scorer.score([make_group("#### 7", ground_truth="many"), make_group("#### 7", finish="abort")])
    assert (bad.scores[0].value, aborted.scores[0].value) == (None, None)
    assert "ground truth 'many'" in bad.scores[0].error
    assert aborted.scores[0].error == "the engine gave up on the response"


def test_training_sees_shaped_scores_and_an_evaluation_the_plain_sums():
    scorer = make_scorer({"function": "gsm8k"}, non_stop_score=-1.0)
    groups = [make_group("#### 7", "#### 8", finish="length"), make_group("#### 7", finish="abort")]
    (shaped, aborted), (plain, _) = scorer.score(groups), scorer.score_unshaped(groups)
    assert [score.value for score in shaped.scores] == [-1.0, -1.0]
    assert [score.value for score in plain.scores] == [1.0, 0.0]
    assert [score.solved for score in shaped.scores] == [score.solved for score in plain.scores] == [True, False]
    assert (aborted.scores[0].value, aborted.scores[0].masked, aborted.scores[0].solved) == (None, "", False)


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
def test_every_fault_masks_its_own_sample_only(function, faults):
    scorer = make_scorer({"function": f"{faults}:{function}"}, workers=1, timeout_seconds=1000.0)
    texts = [text for fault in EXPECTED for text in (fault, "fine")]
    (group,) = scorer.score([make_group(*texts)])
    for text, score in zip(texts, group.scores, strict=True):
        if text == "fine":
            assert (score.value, score.error) == (4.0, "")
        else:
            assert score.value is None
            assert score.parts == {}
            assert EXPECTED[text] in score.error
            assert score.error.startswith(function)
    (again,) = scorer.score([make_group("fine", "fine")])
    assert [score.value for score in again.scores] == [4.0, 4.0]
    scorer.close()


def test_one_failing_function_masks_the_sum_but_keeps_the_other_parts(faults):
    scorer = make_scorer({"function": "gsm8k"}, {"function": f"{faults}:fault"})
    (group,) = scorer.score([make_group("raise")])
    scorer.close()
    assert (group.scores[0].value, group.scores[0].parts) == (None, {"gsm8k": 0.0})


def test_async_calls_run_side_by_side(faults):
    scorer = make_scorer({"function": f"{faults}:fault_async"}, workers=1, timeout_seconds=100.0)
    (group,) = scorer.score([make_group(*["meet"] * 40)])  # each waits for all
    assert [score.value for score in group.scores] == [4.0] * 40
    scorer.close()


def test_async_calls_are_cancelled_by_the_worker_itself(faults):
    scorer = make_scorer({"function": f"{faults}:fault_async"}, workers=1, timeout_seconds=1.0)
    (group,) = scorer.score([make_group("await", "fine")])
    pids = {score.parts.get("fault_async.pid") for score in group.scores} - {None}
    assert [score.value for score in group.scores] == [None, 4.0]
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].parts["fault_async.pid"] in pids  # it was not replaced
    scorer.close()


def test_math_is_stopped_at_the_time_limit_off_the_main_thread(clock):
    scorer = make_scorer({"function": "math"}, workers=1, timeout_seconds=1.0)
    scored: list[Group] = []

    def score() -> None:
        scored.extend(scorer.score([make_group(r"\boxed{7}", "$14/2$")]))
        clock.flow()
        scored.extend(scorer.score([make_group(r"\boxed{9^{9^{9^{9}}}}")]))

    work = threading.Thread(target=score)
    work.start()
    work.join()
    scorer.close()
    assert [score.value for group in scored for score in group.scores] == [1.0, 1.0, None]
    assert scored[1].scores[0].error == "math: took longer than 1 s"


def test_a_pattern_that_backtracks_for_ever_is_stopped(clock):
    function = {"function": "format", "arguments": {"pattern": r"\A(a+)+\Z"}}
    scorer = make_scorer(function, workers=1, timeout_seconds=1.0)
    (fine,) = scorer.score([make_group("aaa", "b")])
    clock.flow()
    (endless,) = scorer.score([make_group("a" * 60 + "b")])
    scorer.close()
    assert [score.value for group in (fine, endless) for score in group.scores] == [1.0, 0.0, None]


def test_a_worker_that_died_while_idle_blames_no_sample(faults):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=1)
    (group,) = scorer.score([make_group("fine")])
    pid = int(group.scores[0].parts["fault.pid"])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # all of its threads have ended; the scorer is to find it so
    (group,) = scorer.score([make_group("fine")])
    scorer.close()
    assert group.scores[0].value == 4.0


def test_closing_ends_the_processes_and_scoring_starts_them_again(faults):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=2)
    for _ in range(2):
        (group,) = scorer.score([make_group(*["fine"] * 8)])
        scorer.close()
        for pid in {int(score.parts["fault.pid"]) for score in group.scores}:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_what_a_function_started_ends_with_it(faults, tmp_path):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=1)
    (group,) = scorer.score([make_group(str(tmp_path / "pid"))])
    scorer.close()
    assert group.scores[0].value is None
    assert ends(int((tmp_path / "pid").read_text()))


def ends(pid: int) -> bool:
    """Whether a process is no more, or only waits for its parent. It has two minutes."""
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
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(faults)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    assert ends(pid)


DRIVER = """
import pathlib, sys, threading, time
sys.path.insert(0, ".")
from tests.unit.test_reward_scorer import make_group, make_scorer
scorer = make_scorer({"function": sys.argv[1] + ":fault"}, workers=1, timeout_seconds=1000.0)
(group,) = scorer.score([make_group("fine")])
threading.Thread(target=scorer.score, args=([make_group("loop")],)).start()
while not pathlib.Path(sys.argv[1]).with_name("hangs").exists():
    time.sleep(0.01)
print(int(group.scores[0].parts["fault.pid"]), flush=True)
"""


def test_a_file_that_cannot_be_imported_is_a_reward_error_and_leaves_no_process(tmp_path):
    (tmp_path / "mine.py").write_text("import nowhere_at_all")
    scorer = make_scorer({"function": f"{tmp_path / 'mine.py'}:mine"})
    with pytest.raises(RewardError, match="nowhere_at_all"):
        scorer.score([make_group("fine")])
    assert scorer._pool._workers == []


def test_workers_do_not_import_heavy_libraries(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def mine(data_source, response, ground_truth, extra_info):\n"
        "    return sum(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'transformers', 'ray'))\n"
    )
    scorer = make_scorer({"function": f"{tmp_path / 'mine.py'}:mine"})
    (group,) = scorer.score([make_group("fine")])
    scorer.close()
    assert group.scores[0].value == 0.0


def test_the_example_of_the_docs_runs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example: rewards/brevity.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    (tmp_path / "brevity.py").write_text(example.group(1))
    scorer = make_scorer({"function": f"{tmp_path / 'brevity.py'}:brevity", "arguments": {"target": 10}})
    (group,) = scorer.score([make_group("x" * 5, "x" * 15, "x" * 50)])
    scorer.close()
    assert [score.value for score in group.scores] == [1.0, 0.5, 0.0]
    assert group.scores[1].parts == {"brevity": 0.5, "brevity.length": 15.0}
