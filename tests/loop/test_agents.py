"""Whole runs whose rollouts are made by an agent, with the embedded engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import pytest

from megagrpo.errors import EXIT_STOPPED
from megagrpo.track.rollout_files import read_file, rollout_file
from megagrpo.trainer.batches import read_batch
from tests.engines.policy import logits_of
from tests.loop import small_run
from tests.loop.test_evaluate import in_order
from tests.loop.test_teachers import make_teacher

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
Environment = Mapping[str, str]
STEPS = range(1, small_run.STEPS + 1)


def write(inputs: Path, output: Path, name: str, schedule: dict[str, Any], **agent: Any) -> Path:
    """Evaluations go through the agent, too. Deterministic, as rows of a batch depend on which agents wait. Another
    model on the ranks teaches."""
    values = small_run.recipe(inputs, output, name) | {"schedule": schedule}
    values["deterministic"] = schedule["kind"] == "one_step_off" or schedule == {"kind": "sync"}
    values["agent"] = {"function": f"{Path(__file__).parent / 'digits_agent.py'}:rollout", "tokens_max": 60}
    values["agent"] |= {"arguments": {"forks": True}, **agent}
    values["reward"] = {"functions": [{"function": "agent"}, {"function": f"{__file__}:said_twice", "weight": 0.0}]}
    values["teachers"] = {"big": {"kind": "ranks", "path": str(make_teacher(output / "teacher"))}}
    values["algorithm"]["distillation"] = {"objective": "sampled_token"}
    values["checkpoint"]["keep_batches"] = small_run.STEPS
    if schedule["kind"] != "sync":
        values["cluster"]["placement"] = "disaggregated"
    return small_run.write(values, output)


def said_twice(messages: list[dict[str, Any]], tool_calls: list[Any]) -> float:
    """A reward function of the recipe that reads the conversation."""
    return float(sum(message["role"] == "assistant" for message in messages) == 2 and not tool_calls)


def numbers(run: Path) -> dict[int, dict[str, float]]:
    left_out = ("staleness/", "agent/seconds", "agent/tools/", "agent/audited")
    return {
        step: {name: value for name, value in entry.items() if not name.startswith(left_out)}
        for step, entry in small_run.stable(small_run.metrics(run)).items()
    }


def require_whole(run: Path, steps: Iterable[int] = STEPS) -> None:
    """Checks that trained samples are conversations of two turns in one branch, or have a further one in another."""
    for step in steps:
        for group in read_batch(run, step).sampled.groups:
            assert len(group.samples) == 4
            for sample in group.samples:
                assert sample.agent is not None
                branches = sample.agent.branches
                assert (np.concatenate([one.tokens[one.trained] for one in branches]) == sample.tokens).all()
                assert sum(turn.tokens for turn in sample.agent.turns) == len(sample.tokens)
                if sample.finish == "stop":
                    forks = group.prompt.extra_info["index"] % 2
                    assert (len(branches), len(sample.agent.turns)) == (1 + forks, 2 + forks)
                    assert sample.agent.reward is not None


def trained_prompts(run: Path) -> Counter[str]:
    return Counter(group.prompt.id for step in STEPS for group in read_batch(run, step).sampled.groups)


@pytest.fixture(scope="module")
def synchronous(inputs: Path, tmp_path_factory: pytest.TempPathFactory, ray: Environment) -> Path:
    output = tmp_path_factory.mktemp("synchronous")
    small_run.train(write(inputs, output, "run", {"kind": "sync"}), environment=ray)
    return output / "run"


def test_turns_are_trained_and_evaluations_are_rollouts(synchronous: Path) -> None:
    require_whole(synchronous)
    entries = small_run.metrics(synchronous)
    assert [entries[step]["agent/turns/max"] for step in STEPS] == [3.0] * len(STEPS)
    assert [entries[step]["agent/failed"] for step in STEPS] == [0.0] * len(STEPS)
    assert any("sums/" in name for name in entries[2])
    assert (synchronous / "logs" / "agents_0.log").exists()


def test_a_teacher_reads_each_branch_as_the_policy_saw_it_and_says_nothing_of_other_tokens(synchronous: Path) -> None:
    forked = Counter[int]()
    for step in STEPS:
        samples = [sample for group in read_batch(synchronous, step).sampled.groups for sample in group.samples]
        said = read_file(rollout_file(synchronous, step), ["teacher_logprobs"])["teacher_logprobs"].to_pylist()
        for sample, found in zip(samples, said, strict=True):
            assert sample.agent is not None
            wanted = []
            for branch in sample.agent.branches:
                tokens = branch.tokens.tolist()
                logprobs = logits_of(synchronous.parent / "teacher", tokens[:1], tokens[1:]).log_softmax(-1)
                wanted += [float(logprobs[at - 1, tokens[at]]) for at in np.flatnonzero(branch.trained)]
            assert found == pytest.approx(wanted, abs=1e-5)
            forked[len(sample.agent.branches)] += 1
    assert min(forked[1], forked[2]) > 0


def test_an_evaluation_of_a_runs_model_has_the_runs_rollouts(
    synchronous: Path, tmp_path: Path, ray: Environment
) -> None:
    options = ("--recipe", str(synchronous / "recipe.yaml"), "--output", str(tmp_path))
    small_run.train(synchronous / "hugging_face", *options, command="eval", environment=ray)
    (log,) = tmp_path.glob("*/responses.jsonl")
    assert in_order(log) == in_order(synchronous / "evaluations" / f"step_{small_run.STEPS:06d}.jsonl")


@pytest.mark.soak
def test_a_run_that_is_interrupted_continues_with_the_same_numbers(
    synchronous: Path, inputs: Path, tmp_path: Path, ray: Environment
) -> None:
    recipe = write(inputs, tmp_path, "run", {"kind": "sync"}, processes=2)
    through = ("tests.loop.altered_runs", "signal", "SIGTERM", "update", "3")
    small_run.end(small_run.start(recipe, through=through, environment=ray), EXIT_STOPPED)
    assert "continuing after step" in small_run.train(recipe, environment=ray)
    assert numbers(tmp_path / "run") == numbers(synchronous)


@pytest.mark.soak
@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "async", "max_staleness": 2},
        {"kind": "sync", "carry_over": 4, "max_staleness": 2},
        {"kind": "one_step_off"},
    ],
    ids=["async", "carry_over", "one_step_off"],
)
def test_every_prompt_is_trained_once_in_every_schedule_also_if_the_run_is_interrupted(
    schedule: dict[str, Any], synchronous: Path, inputs: Path, tmp_path: Path, ray: Environment
) -> None:
    recipe = write(inputs, tmp_path, "run", schedule)
    through = ("tests.loop.altered_runs", "signal", "SIGTERM", "update", "3")
    small_run.end(small_run.start(recipe, through=through, environment=ray), EXIT_STOPPED)
    assert "continuing after step" in small_run.train(recipe, environment=ray)
    require_whole(tmp_path / "run")
    assert trained_prompts(tmp_path / "run") == trained_prompts(synchronous)


@pytest.mark.soak
def test_over_sampling_ends_the_rollouts_that_it_throws_away(inputs: Path, tmp_path: Path, ray: Environment) -> None:
    small_run.train(write(inputs, tmp_path, "run", {"kind": "sync", "oversample": 3}), environment=ray)
    require_whole(tmp_path / "run")
    entries = small_run.metrics(tmp_path / "run")
    assert [entries[step]["staleness/max"] for step in STEPS] == [0.0] * len(STEPS)
    assert all(entries[step]["cut/samples"] > 0 and "cut/bias" not in entries[step] for step in STEPS)


def test_rollouts_that_do_not_end_hold_back_no_other_and_are_masked(
    inputs: Path, tmp_path: Path, ray: Environment
) -> None:
    recipe = write(inputs, tmp_path, "run", {"kind": "sync"}, timeout_seconds=12, arguments={"slow": 0.2})
    small_run.train(recipe, "train.total_steps=1", "eval.sets={}", environment=ray)
    entries = small_run.metrics(tmp_path / "run")
    late = Counter[bool]()
    for group in read_batch(tmp_path / "run", 1).sampled.groups:
        for sample, score in zip(group.samples, group.scores, strict=True):
            assert sample.agent is not None
            late[sample.finish == "abort"] += 1
            assert (score.value is None) == (sample.finish == "abort")
            assert ("longer than 12 s" in score.error) == (sample.finish == "abort")
    assert 0 < late[True] < late[False]
    assert entries[1]["agent/late"] == late[True]


@pytest.mark.soak
def test_agent_processes_that_are_killed_cost_rollouts_and_no_step(
    inputs: Path, tmp_path: Path, ray: Environment
) -> None:
    recipe = write(inputs, tmp_path, "run", {"kind": "async", "max_staleness": 2}, processes=3)
    process = small_run.start(recipe, environment=ray)
    over, killed = Event(), list[int]()

    def kill() -> None:
        """One of the three at each step: more often, a slow machine would have no rollout left."""
        logged = tmp_path / "run" / "metrics.jsonl"
        while not over.wait(0.1):
            if not logged.exists() or len(killed) >= len(logged.read_text().splitlines()):
                continue
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has ended
                    with_runner = any(part.endswith("agents/runner.py") for part in child.cmdline())
                    if with_runner and not child.children() and time.time() - child.create_time() > 1.0:
                        child.kill()
                        killed.append(child.pid)
                        break

    killing = Thread(target=kill, daemon=True)
    killing.start()
    printed = small_run.end(process)
    over.set()
    assert killed
    assert "restarting agent process" in printed
    assert len(small_run.metrics(tmp_path / "run")) >= len(STEPS)
