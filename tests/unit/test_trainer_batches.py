"""Batches of steps are kept, thinned out and read again whole; a replay says what it lacks and what differs."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import PreflightError, RunStopped, UnusableCheckpointError
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from megagrpo.trainer.batches import ranges, read_batch, require_fitting, saved_steps
from megagrpo.trainer.one_half import Untrained, compared, logged_metrics, replay, sample_all, train_only
from megagrpo.trainer.schedule import Live, grpo_step
from megagrpo.trainer.step import baselines_of
from megagrpo.types import Group
from tests.step_fakes import make_run, number
from tests.tiny_run import make_run as make_recipe
from tests.tiny_run import recipe_with
from tests.unit.test_checkpoint_groups import comparable


def tracked(tmp_path: Path, keep: int = 2) -> tuple[str, ...]:
    (tmp_path / "kept").mkdir(exist_ok=True)
    return f"track.directory={tmp_path}", "name=kept", f"checkpoint.keep_batches={keep}"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The directory of a run of four steps that keeps the batches of two."""
    run = make_run(*tracked(tmp_path), scores=lambda prompt: (0.0, 0.0, 1.0, None))
    for step in range(1, 5):
        grpo_step(run, Live(run), step, 0.0)
    return tmp_path / "kept"


def test_the_newest_batches_are_kept_whole(tmp_path: Path) -> None:
    run = make_run(*tracked(tmp_path), scores=lambda prompt: (0.0, 0.0, 1.0, None))
    steps = [grpo_step(run, Live(run), step, 0.0) for step in range(1, 5)]
    directory = tmp_path / "kept"
    assert saved_steps(directory) == [3, 4]
    for step in (3, 4):
        batch = read_batch(directory, step)
        assert comparable(batch.sampled.all) == comparable(steps[step - 1].sampled.all)
        assert comparable(batch.sampled.groups) == comparable(steps[step - 1].sampled.groups)
        assert (batch.total_steps, batch.recipe) == (10, "recipe.0.yaml")


def test_a_batch_says_which_of_its_groups_are_trained_and_how_they_were_found(tmp_path: Path) -> None:
    dynamic = "rollout.dynamic_sampling={rounds_max: 3}"
    scores = lambda prompt: (0.0, 0.0, 1.0, 1.0 if prompt % 3 else 0.0)  # noqa: E731
    equal = lambda prompt: (0.0,) * 4 if prompt % 2 else scores(prompt)  # noqa: E731
    run = make_run(*tracked(tmp_path), dynamic, scores=equal)
    grpo_step(run, Live(run), 1, 0.0)
    sampled = read_batch(tmp_path / "kept", 1).sampled
    assert len(sampled.groups) == 4 < len(sampled.all)
    assert sampled.rounds > 1
    assert all(number(group.prompt) % 2 == 0 for group in sampled.groups)
    assert all(group in sampled.all for group in sampled.groups)


def test_a_batch_has_the_baselines_of_remax(tmp_path: Path) -> None:
    greedy = lambda prompt: None if prompt % 2 else prompt / 8  # noqa: E731
    run = make_run(
        *tracked(tmp_path), "algorithm.advantage.name=remax", scores=lambda p: (0.0,) * 4, greedy=greedy, shuffle=False
    )
    grpo_step(run, Live(run), 1, 0.0)
    kept, expected = read_batch(tmp_path / "kept", 1).sampled.groups, [0.0, np.nan, 0.25, np.nan]
    np.testing.assert_array_equal(baselines_of(kept), expected)
    assert [group.baseline.index for group in kept if group.baseline] == [4] * 4
    path = tmp_path / "kept" / "batches" / "step_000001.safetensors"
    groups, notes = read_groups(path, dict)
    earlier = [Group(group.prompt, group.samples, group.scores) for group in groups]
    write_groups(path, earlier, notes | {"baselines": expected})  # as earlier versions did
    np.testing.assert_array_equal(baselines_of(read_batch(tmp_path / "kept", 1).sampled.groups), expected)


def test_a_run_keeps_no_batches_unless_it_is_asked_to(tmp_path: Path) -> None:
    run = make_run(*tracked(tmp_path, 0), scores=lambda prompt: (0.0, 0.0, 1.0, 1.0))
    grpo_step(run, Live(run), 1, 0.0)
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    "change", [{"groups": [9]}, {"groups": []}, {"groups": "x"}, {"total_steps": 0}, {"baselines": [1.0]}, {"x": 1}]
)
def test_a_file_of_groups_that_is_no_batch_is_refused(kept: Path, change: dict[str, Any]) -> None:
    path = kept / "batches" / "step_000004.safetensors"
    groups, notes = read_groups(path, dict)
    write_groups(path, groups, notes | change if "x" not in change else change)
    with pytest.raises(UnusableCheckpointError, match="needed"):
        read_batch(kept, 4)
    write_groups(path, [Group(group.prompt, group.samples) for group in groups], notes)
    with pytest.raises(UnusableCheckpointError, match="scores"):
        read_batch(kept, 4)
    write_groups(path, [], notes | {"groups": []})
    with pytest.raises(UnusableCheckpointError, match="without samples"):
        read_batch(kept, 4)


@pytest.mark.parametrize(
    ("override", "vocabulary", "named"),
    [
        ("name=other", 33, "token 33\n"),
        ("rollout.response_tokens_max=2", 100, "at most 6"),
        ("reward.functions=[{function: gsm8k}, {function: math}]", 100, "scores of 1 functions"),
        ("algorithm.advantage.name=remax", 100, "greedy"),
    ],
)
def test_samples_that_a_recipe_cannot_train_on_are_refused(
    tmp_path: Path, override: str, vocabulary: int, named: str
) -> None:
    run = make_run(*tracked(tmp_path), scores=lambda prompt: (0.0, 0.0, 1.0, 1.0), counted=[(1.0,)] * 4, shuffle=False)
    for step in range(1, 9):
        grpo_step(run, Live(run), step, 0.0)
    sampled = read_batch(tmp_path / "kept", 8).sampled  # its prompts end with tokens 30 to 33
    require_fitting(sampled, run.recipe, 100, "here")
    with pytest.raises(UnusableCheckpointError, match=named):
        require_fitting(sampled, recipe_with("data.prompt_tokens_max=4", override), vocabulary, "here")


def test_a_batch_that_was_not_kept_is_named_with_those_that_were(kept: Path) -> None:
    with pytest.raises(UnusableCheckpointError, match=r"no batch of step 2\n.*saved are steps 3 to 4"):
        read_batch(kept, 2)


@pytest.mark.parametrize(("steps", "text"), [([], "none"), ([1, 2, 4, 6, 7], "steps 1 to 2, 4, 6 to 7")])
def test_steps_are_named_in_ranges(steps: list[int], text: str) -> None:
    assert ranges(steps) == text


def test_a_replay_names_the_batches_that_lie_between_the_checkpoint_and_the_step(kept: Path) -> None:
    recipe = recipe_with(*tracked(kept.parent))
    with pytest.raises(UnusableCheckpointError, match="before it is none") as refused:
        replay(SimpleNamespace(recipe=recipe), kept, 4, print)  # type: ignore[arg-type]
    assert refused.value.problems[0].needed == "the batches of steps 1 to 2, too"


def test_training_alone_does_not_write_over_the_run_that_it_reads(kept: Path) -> None:
    recipe = recipe_with(*tracked(kept.parent))
    with pytest.raises(UnusableCheckpointError, match="name=again"):
        train_only(SimpleNamespace(recipe=recipe), kept)  # type: ignore[arg-type]


def test_what_only_engines_need_is_not_asked_of_a_run_without_them(tmp_path: Path) -> None:
    servers = (
        "rollout.engine=external",
        "rollout.urls=['http://localhost:1']",
        "rollout.api_key_variable=NOT_SET_HERE",
    )
    loaded = load(make_recipe(tmp_path), servers)
    with pytest.raises(PreflightError, match="NOT_SET_HERE"):
        preflight(loaded)
    preflight(loaded, engines_too=False)


def test_samples_without_training_are_saved_step_by_step_until_the_run_is_told_to_stop(tmp_path: Path) -> None:
    run = make_run(*tracked(tmp_path, 0), scores=lambda prompt: (0.0, 0.0, 1.0, 1.0))
    said: list[Any] = []
    tracker = SimpleNamespace(rollouts=lambda *given: None, log=lambda *line: said.append(line))
    setup: Any = SimpleNamespace(recipe=run.recipe, total_steps=3, stopping=run.stopping, clock=run.clock)
    setup.tracker = tracker
    training: Any = SimpleNamespace(run=run, source=Untrained(run), give_up=lambda: None)
    assert sample_all(setup, training, TrainerState(0, 0, {}, {})).step == 3
    assert [step for step, _ in said] == saved_steps(tmp_path / "kept") == [1, 2, 3]
    assert not run.policy.calls, "nothing was trained"
    run.stopping.signal = signal.SIGTERM
    with pytest.raises(RunStopped, match="batches of steps 1 to 3 are saved"):
        sample_all(setup, training, TrainerState(0, 0, {}, {}))


def test_logged_metrics_are_the_last_whole_line_of_the_step_without_what_measures_the_machine(tmp_path: Path) -> None:
    entry = {"step": 2, "time": 5.0, "seconds/update": 1.0, "tokens_per_second": 3.0, "eval/mean@1": 1.0}
    lines = [{"step": math.inf}, entry | {"lr": 1.0}, entry | {"lr": 0.1, "grad_norm": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3, "l')
    found = logged_metrics(tmp_path, 2)
    assert found.pop("lr") == 0.1
    assert math.isnan(found.pop("grad_norm"))
    assert not found
    assert logged_metrics(tmp_path, 3) == {}


def test_a_comparison_shows_the_last_bit_and_what_is_on_one_side_only() -> None:
    again = {"lr": 0.1, "loss/total": math.nextafter(0.5, 1), "kl/mean": math.inf, "entropy": 1.0}
    logged = {"lr": 0.1, "loss/total": 0.5, "kl/mean": math.nan, "prompts/set_aside": 2.0}
    different, (*_, loss, lr, differ, left) = compared(logged, again)
    assert different == ["loss/total"]
    assert loss.split() == ["loss/total", "0.5", "0.5", "+1.11e-16"]
    assert lr.split() == ["lr", "0.1", "0.1"]
    assert differ == "1 of 3 metrics differ"
    assert left.endswith("evaluations, entropy, prompts/set_aside")
