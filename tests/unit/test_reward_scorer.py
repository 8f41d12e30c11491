"""The scorer: weighted sums, gates, penalties and masks, and real worker processes whose faults touch no other sample.

Time passes for the scorer only when a test lets it, so that slow responses on a busy machine do not count as late.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.errors import RewardError
from megagrpo.recipe import schema
from megagrpo.reward import workers
from megagrpo.reward.functions import Outcome, function_specs
from megagrpo.reward.scorer import (
    REACHED_LIMIT,
    Scorer,
    gated_functions,
    overlong_penalty,
    shaped_score,
    solved_from,
    weighted_score,
)
from megagrpo.trainer.step_metrics import rollout_metrics
from megagrpo.types import FinishReason, Group, Prompt, Sample, Score

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
    heavy = sum(name in sys.modules for name in ("torch", "numpy", "pydantic", "transformers", "ray"))
    return {"score": len(response), "pid": os.getpid(), "heavy": heavy}

async def fault_async(data_source, response, ground_truth, extra_info):
    if response == "await": await asyncio.sleep(1000)
    if response == "meet":
        arrived.append(response)
        while len(arrived) < 40: await asyncio.sleep(0.01)
    return fault(data_source, response, ground_truth, extra_info)
"""


class Clock:
    """The scorer's clock. It stands still, jumps past any deadline when a function reports that it hangs, or flows."""

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
    prompt = Prompt("a:0", (1,), "sums", ground_truth, extra_info={"index": 4})
    return Group(prompt, tuple(replace(sample_of(0, finish), index=i, text=text) for i, text in enumerate(texts)))


def reward_of(*functions: dict, **options) -> schema.RewardConfig:
    given = {"functions": list(functions) or [{"function": "gsm8k"}], "failed_share_max": 1.0, **options}
    return schema.RewardConfig.model_validate(given)


def scorer_of(*functions: dict, **options) -> Scorer:
    return Scorer(reward_of(*functions, **options), response_tokens_max=8)


@pytest.fixture
def make_scorer() -> Iterator[Callable[..., Scorer]]:
    with ExitStack() as stack:

        def make(*functions: dict, **options) -> Scorer:
            scorer = scorer_of(*functions, **options)
            stack.callback(scorer.close)
            return scorer

        yield make


def test_scores_are_weighted_sums_with_their_parts(make_scorer, tmp_path):
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
    assert [score.value for score in first.scores] == [1 + 2.5 - 1, 2.5]
    assert first.scores[0].parts == {"gsm8k": 1.0, "mine": 5.0, "mine.right": 1.0, "format": 1.0, "format_2": 1.0}
    assert (second.scores[0].value, second.prompt, len(second.samples)) == (1.5, make_group("7").prompt, 1)


def test_gsm8k_starts_no_process(make_scorer, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("starts a process"))
    scorer = make_scorer({"function": "gsm8k"}, workers=0)
    (group,) = scorer.score([make_group("step by step\n#### 7", "#### 8")])
    assert [score.value for score in group.scores] == [1.0, 0.0]


def test_a_bad_ground_truth_and_an_aborted_response_are_masked(make_scorer):
    scorer = make_scorer()
    bad, aborted = scorer.score([make_group("#### 7", ground_truth="many"), make_group("#### 7", finish="abort")])
    assert (bad.scores[0].value, aborted.scores[0].value) == (None, None)
    assert "ground truth 'many'" in bad.scores[0].error
    assert aborted.scores[0].error == "the engine gave up on the response"


def test_training_sees_shaped_scores_and_an_evaluation_the_plain_sums(make_scorer):
    scorer = make_scorer(non_stop_score=-1.0)
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
    pids = {score.parts.get("fault_async.pid") for score in group.scores} - {None}
    assert [score.value for score in group.scores] == [None, 4.0]
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].parts["fault_async.pid"] in pids  # it was not replaced


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
    os.kill(int(group.scores[0].parts["fault.pid"]), signal.SIGKILL)
    (worker,) = scorer._pool._workers
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)  # the scorer is to find it so
    (group,) = scorer.score([make_group("fine")])
    assert group.scores[0].value == 4.0


def test_closing_ends_the_processes_and_scoring_starts_them_again(make_scorer, faults):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=2)
    for _ in range(2):
        (group,) = scorer.score([make_group(*["fine"] * 8)])
        scorer.close()
        for pid in {int(score.parts["fault.pid"]) for score in group.scores}:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_what_a_function_started_ends_with_it(make_scorer, faults, tmp_path):
    scorer = make_scorer({"function": f"{faults}:fault"}, workers=1)
    (group,) = scorer.score([make_group(str(tmp_path / "pid"))])
    assert group.scores[0].value is None
    assert ends(int((tmp_path / "pid").read_text()))


def ends(pid: int) -> bool:
    """Whether a process ends within two minutes; a zombie has ended."""
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
from tests.unit.test_reward_scorer import make_group, scorer_of
scorer = scorer_of({"function": sys.argv[1] + ":fault"}, workers=1, timeout_seconds=1000.0)
(group,) = scorer.score([make_group("fine")])
threading.Thread(target=scorer.score, args=([make_group("loop")],)).start()
while not pathlib.Path(sys.argv[1]).with_name("hangs").exists():
    time.sleep(0.01)
print(int(group.scores[0].parts["fault.pid"]), flush=True)
"""


def test_a_file_that_cannot_be_imported_is_a_reward_error_and_leaves_no_process(make_scorer, tmp_path):
    (tmp_path / "mine.py").write_text("import nowhere_at_all")
    scorer = make_scorer({"function": f"{tmp_path / 'mine.py'}:mine"})
    with pytest.raises(RewardError, match="nowhere_at_all"):
        scorer.score([make_group("fine")])
    assert scorer._pool._workers == []


def test_the_example_of_the_docs_runs(make_scorer, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example: rewards/brevity.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    (tmp_path / "brevity.py").write_text(example.group(1))
    scorer = make_scorer({"function": f"{tmp_path / 'brevity.py'}:brevity", "arguments": {"target": 10}})
    (group,) = scorer.score([make_group("x" * 5, "x" * 15, "x" * 50)])
    assert [score.value for score in group.scores] == [1.0, 0.5, 0.0]
    assert group.scores[1].parts == {"brevity": 0.5, "brevity.length": 15.0}


LIMIT = 100


def format_function(**options):
    return {"function": "format", "arguments": {"pattern": "x"}, **options}


def sample_of(tokens=10, finish="stop"):
    return Sample("a:0", 0, np.zeros(tokens, np.int32), np.zeros(tokens), np.zeros(tokens), finish, "")


def scored(reward, *scores):
    outcomes = [score if isinstance(score, Outcome) else Outcome(score) for score in scores]
    return weighted_score(function_specs(reward), gated_functions(reward.functions), outcomes, solved_from(reward))


def shaped(reward, value, tokens=10, finish="stop"):
    return shaped_score(scored(reward, value), sample_of(tokens, finish), reward, LIMIT)


# --- gates ------------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([-3.0, -1.0, 0.0, 0.1, 0.5, 1.0, 2.0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=4), NUMBERS)
def test_what_waits_counts_where_the_weighted_sum_of_the_others_is_not_0(functions, solved_at):
    # open-instruct compares a scaled score with 1: with a scale of 2 every reward is 0.
    counts = {True: "when_others_score", False: "always"}
    reward = reward_of(*(format_function(weight=w, counts=counts[waits]) for w, _, waits in functions))
    always = sum(weight * score for weight, score, waits in functions if not waits)
    counted = tuple(0.0 if waits and always == 0 else score for _, score, waits in functions)
    found = scored(reward.model_copy(update={"solved_at": solved_at}), *(score for _, score, _ in functions))
    assert found.counted == counted
    assert found.value == pytest.approx(sum(w * score for (w, _, _), score in zip(functions, counted, strict=True)))
    assert found.solved == (found.value >= solved_at)
    assert list(found.parts.values()) == [score for _, score, _ in functions]


@pytest.mark.parametrize(
    ("functions", "gated"),
    [
        ([{"function": "gsm8k"}, format_function()], (False, True)),
        ([format_function(), {"function": "math"}, format_function()], (True, False, True)),
        ([{"function": "gsm8k"}, format_function(counts="always")], (False, False)),
        ([format_function()], (False,)),
        ([format_function(), format_function(counts="always")], (True, False)),
        ([{"function": "gsm8k", "counts": "when_others_score"}, format_function()], (True, False)),
        ([{"function": "a.py:f", "counts": "when_others_score"}, {"function": "gsm8k"}], (True, False)),
        ([{"function": "a.py:format"}, {"function": "gsm8k"}], (False, False)),
    ],
)
def test_format_beside_others_waits_for_them_unless_told_otherwise(functions, gated):
    assert gated_functions(reward_of(*functions).functions) == gated


def test_a_function_that_fails_masks_the_sample_even_behind_a_shut_gate():
    score = scored(reward_of({"function": "gsm8k"}, format_function()), 0.0, Outcome(None, error="took too long"))
    assert score == Score(None, {"gsm8k": 0.0}, error="format: took too long")


def test_a_sum_that_is_not_finite_is_an_error():
    score = scored(reward_of({"function": "gsm8k", "weight": 1e9}), 1e300)
    assert (score.value, score.error) == (None, "the weighted sum is inf")


def test_unless_told_otherwise_only_full_marks_of_every_function_are_solved():
    reward = reward_of(format_function(counts="always", weight=0.2), {"function": "gsm8k"}, {"function": "math"})
    assert [scored(reward, *marks).solved for marks in [(1, 1, 1), (1, 1, 0), (0, 1, 1)]] == [True, False, False]
    three_tenths = reward_of(*({"function": "gsm8k", "weight": weight} for weight in (0.1, 0.2)))
    assert scored(three_tenths, 1, 1).solved


def test_scores_that_differ_by_rounding_are_equal():
    twice = reward_of({"function": "gsm8k", "weight": 0.1}, {"function": "gsm8k", "weight": 0.2})
    assert scored(twice, 1.0, 1.0).value == 0.3 == scored(reward_of(), 0.1 + 0.2).value
    assert scored(reward_of(), 0.1 + 0.2).counted == (0.3,)


# --- penalties and masks ----------------------------------------------------------------------------------------------


OVERLONG = {"overlong": {"buffer_tokens": 20, "penalty": 2.0}}


@pytest.mark.parametrize(
    ("options", "tokens", "finish", "value"),
    [
        *((OVERLONG, tokens, "stop", 1.0) for tokens in (0, 80)),
        *((OVERLONG, tokens, "stop", value) for tokens, value in ((81, 0.9), (90, 0.0), (95, -0.5))),
        *((OVERLONG, tokens, "stop", -1.0) for tokens in (100, 140)),
        ({"non_stop_score": -0.5}, 100, "length", -0.5),
        ({"non_stop_score": -0.5}, 100, "stop", 1.0),
        ({"non_stop_score": -0.5} | OVERLONG, 100, "length", -2.5),
        ({"truncated": "mask"}, 100, "length", None),
        ({"truncated": "mask"}, 100, "stop", 1.0),
        ({}, 100, "length", 1.0),
    ],
)
def test_training_makes_of_a_right_response_what_the_recipe_says_and_it_stays_solved(options, tokens, finish, value):
    score = shaped(reward_of(**options), 1.0, tokens, finish)
    masked = value is None
    assert score.value == (None if masked else pytest.approx(value))
    assert (score.masked, score.error, score.solved) == (REACHED_LIMIT if masked else "", "", True)
    assert score.counted == (() if masked else (1.0,))
    penalty = {"overlong": overlong_penalty(tokens, schema.OverlongConfig(**OVERLONG["overlong"]), LIMIT)}
    assert score.parts == {"gsm8k": 1.0} | (penalty if "overlong" in options else {})


def test_a_failed_score_is_not_shaped():
    failed = Score(None, error="gsm8k: x")
    assert shaped_score(failed, sample_of(100, "length"), reward_of(truncated="mask", **OVERLONG), LIMIT) == failed


def test_metrics_count_masked_samples_apart_from_errors():
    masked = Score(None, masked=REACHED_LIMIT, solved=True)
    scores = (Score(1.0, solved=True), masked, Score(None, error="x"), Score(0.0))
    metrics = rollout_metrics([Group(Prompt("a:0", (1,), "sums", "7"), (sample_of(),) * 4, scores)])
    assert (metrics["reward/errors"], metrics["reward/truncated_masked"], metrics["reward/solved_share"]) == (1, 1, 0.5)
    assert metrics["reward/mean"] == 0.5
