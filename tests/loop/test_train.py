"""`megagrpo train`, whole: real ranks, a real engine, real Ray, as a user starts it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.cli import main
from megagrpo.evaluation.responses import read_responses
from megagrpo.plan.case import A_CPU, Case
from megagrpo.plan.plan import calibrated
from megagrpo.plan.time import step_time
from megagrpo.recipe.load import load
from megagrpo.track.jsonl import PLAN_FILE
from megagrpo.track.metrics import undocumented
from megagrpo.track.rollout_files import read_rollouts
from megagrpo.weights.families import read_architecture
from tests.loop import small_run
from tests.loop.conftest import Finished


def test_a_run_leaves_metrics_for_every_step(finished: Finished) -> None:
    entries = small_run.metrics(finished.directory)
    assert sorted(entries) == list(range(small_run.STEPS + 1))
    names = set().union(*entries.values()) - {"step", "time"}
    assert not undocumented(names)
    expected = "reward/mean kl/mean entropy grad_norm clip/low logprob_difference/max packing/efficiency"
    assert set(expected.split()) <= set(entries[1])
    assert "eval/sums/mean@1" in entries[0]
    assert "eval/sums/mean@1" in entries[2]
    assert entries[1]["weights/version"] == 1


def test_a_run_keeps_its_plan_and_says_what_a_weight_sync_moves(finished: Finished) -> None:
    planned = json.loads((finished.directory / PLAN_FILE).read_text(encoding="utf-8"))
    assert {phase["phase"] for phase in planned["memory"][0]["phases"]} >= {"rollout", "update"}
    exported = finished.directory / "hugging_face"
    weights = sum(path.stat().st_size for path in exported.glob("*.safetensors"))
    assert small_run.metrics(finished.directory)[1]["weights/sync_bytes"] == pytest.approx(weights, rel=0.05)


def test_the_responses_of_every_evaluation_are_kept_with_their_scores(finished: Finished) -> None:
    metrics = small_run.metrics(finished.directory)
    files = {int(path.stem.removeprefix("step_")): path for path in (finished.directory / "evaluations").iterdir()}
    assert sorted(files) == [step for step in metrics if "eval/sums/mean@1" in metrics[step]]
    for step, path in files.items():
        found = list(read_responses(path))
        assert fmean(one.score for one in found if one.score is not None) == metrics[step]["eval/sums/mean@1"]
        assert fmean(one.tokens for one in found) == metrics[step]["eval/sums/response_tokens/mean"]
        assert all(one.prompt and one.set == "sums" for one in found)


def test_rollout_and_training_logprobs_agree_and_the_worst_tokens_of_every_step_are_written(finished: Finished) -> None:
    directory, metrics = finished.directory, small_run.metrics(finished.directory)
    lines = [json.loads(line) for line in (directory / "mismatch.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, small_run.STEPS + 1))
    for line in lines:
        assert line["max"] == metrics[line["step"]]["logprob_difference/max"]
        assert 0 <= line["mean"] <= line["p99"] <= line["max"] < 1e-4
        assert line["effective_share"] == pytest.approx(1, abs=1e-6)
        assert len(line["worst"]) == 8
        worst = line["worst"][0]
        assert abs(worst["train_logprob"] - worst["rollout_logprob"]) == pytest.approx(line["max"], abs=1e-9)
        assert {token["weight_version"] for token in line["worst"]} == {line["step"] - 1}
        assert all(token["text"] for token in line["worst"])
    shown = small_run.train(directory, "--mismatch", command="report")  # all that the recipe asks for is proven
    tokens = f"{sum(line['tokens'] for line in lines):,}"
    assert f"weights {tokens} of {tokens} were sampled by versions 0 to {small_run.STEPS - 1}, each verified" in shown
    assert f"tokens  {tokens} of {tokens} have a logprob of the trainer's" in shown
    assert "logprob_difference" not in finished.printed


def test_rollouts_are_kept_with_their_tokens_and_say_what_the_metrics_say(finished: Finished) -> None:
    metrics, rollouts = small_run.metrics(finished.directory), read_rollouts(finished.directory).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(finished.directory / "hugging_face")
    for step, entry in metrics.items():
        rows = [row for row in rollouts if row["step"] == step and row["set"] == "train"]
        assert len(rows) == (16 if step else 0), "all samples"
        held_out = [row for row in rollouts if row["step"] == step and row["set"] == "sums"]
        assert bool(held_out) == ("eval/sums/mean@1" in entry)
        if held_out:
            assert fmean(row["score"] for row in held_out) == entry["eval/sums/mean@1"]
            assert {row["advantage"] for row in held_out} == {None}
        for row in rows + held_out:
            assert "".join(row["token_texts"]) == tokenizer.decode(row["token_ids"])
            assert len(row["rollout_logprobs"]) == len(row["token_versions"]) == row["tokens"] == len(row["token_ids"])
            assert row["age"] == 0
            assert row["prompt"]
        if not rows:
            continue
        trained = [row for row in rows if row["train_logprobs"] is not None]
        pairs = [zip(row["train_logprobs"], row["rollout_logprobs"], strict=True) for row in trained]
        apart = [abs(train - rollout) for pair in pairs for train, rollout in pair]
        assert fmean(apart) == pytest.approx(entry["logprob_difference/mean"], rel=1e-5)
        assert fmean(value for row in trained for value in row["entropies"]) == pytest.approx(entry["entropy"], 1e-5)
        assert fmean(row["score"] for row in rows) == pytest.approx(entry["reward/mean"])
        advantages = [row["advantage"] for row in trained]
        assert max(advantages) == entry["advantages/max"]
        assert all(row["token_advantages"] == pytest.approx([row["advantage"]] * row["tokens"]) for row in trained)
        assert fmean(row["tokens"] for row in rows) == entry["response_tokens/mean"]
        assert sorted({row["sample"] for row in rows}) == [0, 1, 2, 3]
    assert "ground truth" in small_run.train(finished.directory, "--rollout", "1:3", command="report")


def test_each_step_says_how_long_the_ranks_waited_for_samples_and_the_engines_for_weights(finished: Finished) -> None:
    for step, entry in small_run.metrics(finished.directory).items():
        if step:
            seconds = {name.removeprefix("seconds/"): value for name, value in entry.items()}
            assert entry["trainer/idle_seconds"] == pytest.approx(seconds["rollout"] + seconds["reward"])
            assert entry["trainer/idle_share"] == pytest.approx(entry["trainer/idle_seconds"] / seconds["step"])
            trained = sum(seconds[phase] for phase in ("reward", "logprobs", "update", "weight_sync"))
            assert trained < entry["engines/idle_seconds"]
            assert 0 < entry["engines/idle_share"] < 1, "engines sample while the ranks wait"


def test_a_run_says_what_is_being_started(finished: Finished) -> None:
    lines = (
        "starting Ray, then the processes",
        "starting 2 training ranks and 1 engines (transformers)",
        "bringing the",
    )
    places = [finished.printed.index(line) for line in (*lines, "step 1/")]
    assert places == sorted(places)


def test_a_run_remembers_its_recipe_and_its_environment(finished: Finished) -> None:
    recipe = yaml.safe_load((finished.directory / "recipe.yaml").read_text())
    assert recipe["train"]["optimizer"]["beta2"] == 0.95  # a default, written out
    environment = json.loads((finished.directory / "environment.json").read_text())
    assert environment["libraries"]["torch"]


def test_a_plan_that_is_calibrated_by_a_run_says_what_its_phases_took(finished: Finished, inputs: Path) -> None:
    recipe, architecture = load(finished.directory / "recipe.yaml").recipe, read_architecture(inputs / "model")
    case = Case(recipe, architecture, A_CPU)
    case = replace(case, assumptions=calibrated(case, finished.directory))
    entries = [entry for step, entry in sorted(small_run.metrics(finished.directory).items()) if step > 1]
    for phase in step_time(case).phases:
        if phase.phase != "driver":
            measured = median(entry[f"seconds/{phase.phase}"] for entry in entries)
            assert phase.seconds == pytest.approx(measured, rel=1e-6)


def test_the_list_of_runs_has_it(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(finished.directory.parent), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    last = small_run.metrics(finished.directory)[small_run.STEPS]
    assert (listed["name"], listed["state"], listed["step"]) == ("small", "finished", listed["total_steps"])
    assert (listed["reward"], listed["seconds_per_step"]) == (last["reward/mean"], last["seconds/step"])
    assert listed["held_out"]["sums/mean@1"]["last"] == last["eval/sums/mean@1"]


def test_mlflow_has_the_same_metrics(finished: Finished) -> None:
    assert main(["track", "sync", str(finished.directory)]) == 0  # on a busy machine the run has left something to it
    rewards = [entry["reward/mean"] for step, entry in small_run.metrics(finished.directory).items() if step]
    with sqlite3.connect(finished.directory.parent / "mlflow.db") as database:
        stored = database.execute("select value from metrics where key = 'reward/mean' order by step").fetchall()
    assert [value for (value,) in stored] == rewards


def test_transformers_loads_the_export_and_it_is_not_the_model_of_the_start(finished: Finished, inputs: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(finished.directory / "hugging_face")
    start = AutoModelForCausalLM.from_pretrained(inputs / "model")
    assert AutoTokenizer.from_pretrained(finished.directory / "hugging_face").chat_template
    difference = max((a - b).abs().max().item() for a, b in zip(trained.parameters(), start.parameters(), strict=True))
    assert 1e-4 < difference < 0.1
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.isfinite(trained(tokens).logits).all()


def test_the_end_says_how_to_see_metrics_and_where_everything_is(finished: Finished) -> None:
    assert "mlflow ui --backend-store-uri" in finished.printed
    assert str(finished.directory) in finished.printed
    assert not set("\x1b\r") & set(finished.printed), "it is piped"


def test_the_recipe_that_a_run_has_kept_finds_the_run_complete(finished: Finished, ray: Mapping[str, str]) -> None:
    before = small_run.metrics(finished.directory)
    printed = small_run.train(finished.directory / "recipe.yaml", environment=ray)
    assert "complete" in printed
    assert small_run.metrics(finished.directory) == before


def test_models_on_the_way_are_whole_and_the_users_command_sees_each(finished: Finished) -> None:
    run, listed = finished.directory, finished.directory.parent / "listed"
    on_the_way = [run / "hugging_face_steps" / f"step_{step:06d}" for step in (2, 4)]
    small_run.wait_until(lambda: listed.exists() and listed.read_text().count("\n") == 3, "three commands", 60)
    assert sorted(listed.read_text().split()) == sorted(
        str(directory / "model.safetensors") for directory in (*on_the_way, run / "hugging_face")
    )
    weights = [(directory / "model.safetensors").read_bytes() for directory in (*on_the_way, run / "hugging_face")]
    assert weights[0] != weights[1] == weights[2], finished.printed
    assert [path.name for path in sorted((run / "hugging_face_steps").iterdir())] == ["step_000002", "step_000004"]
