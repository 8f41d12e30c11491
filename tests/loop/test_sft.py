"""`megagrpo sft` from its command to a model that transformers loads; killed, it continues with the same numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megagrpo.data.messages import load_examples
from megagrpo.errors import EXIT_RUN_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from megagrpo.recipe.schema.sft import ConversationFileConfig, SftDataConfig
from megagrpo.tokenizer import load_tokenizer
from tests.loop import small_run
from tests.safetensors_files import saved, with_tensors

STEPS = 6
NOT_PRINTED = ("step", "time")
"""Keys of metrics.jsonl's lines that are not metrics."""


def recipe(inputs: Path, output: Path) -> dict[str, Any]:
    """Five steps are an epoch, so that the sixth straddles two; an evaluation and a checkpoint every two."""
    files = {name: [{"path": str(write_conversations(inputs, name, sums))}] for name, sums in SUMS.items()}
    return {
        "kind": "sft",
        "name": "small_sft",
        "seed": 3,
        "model": {"path": str(inputs / "model")},
        "data": {"train": files["train"], "examples_per_step": 6, "tokens_max": 32},
        "train": {
            "layout": {"pipeline": 2},
            "total_steps": STEPS,
            "tokens_per_microbatch": 64,
            "optimizer": {"lr": 1e-2, "schedule": "linear"},
        },
        "eval": {"files": files["held_out"], "every_steps": 2},
        "checkpoint": {"every_steps": 2},
        "track": {"directory": str(output), "console": "lines"},
        "cluster": {"device": "cpu"},
    }


SUMS = {
    "train": [(a, b) for a in range(10, 16) for b in range(10, 15)],
    "held_out": [(a, 15) for a in range(10, 16)],
}


def write_conversations(directory: Path, name: str, sums: list[tuple[int, int]]) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": f"#### {a + b}"}]}
        for a, b in sums
    ]
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def finished_sft(inputs: Path, tmp_path_factory: pytest.TempPathFactory, ray: Mapping[str, str]) -> Path:
    """Directory of a run that was not interrupted. What it printed on standard output is in `printed`, beside it."""
    output = tmp_path_factory.mktemp("finished_sft")
    recipe_file = small_run.write(recipe(inputs, output), output)
    how: Any = {"command": "sft", "environment": ray, "errors": subprocess.DEVNULL}
    (output / "printed").write_text(small_run.train(recipe_file, "--json", **how))
    return output / "small_sft"


def transformers_loss(model_directory: Path, conversations: Path) -> float:
    """Mean -log p of the assistant's tokens, one conversation at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    losses = []
    files = [ConversationFileConfig(path=str(conversations))]
    data = SftDataConfig(train=files, examples_per_step=1, tokens_max=32)
    for example in load_examples(files, load_tokenizer(str(model_directory)), data, seed=0).items:
        tokens = torch.from_numpy(example.tokens).long()
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        losses.append(-log_p.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(example.loss_mask[1:])])
    return torch.cat(losses).mean().item()


def test_with_json_a_run_prints_an_object_per_line_and_every_step(finished_sft: Path) -> None:
    printed = (finished_sft.parent / "printed").read_text()
    events = [json.loads(line) for line in printed.splitlines()]
    assert (events[0]["event"], events[-1]["event"], events[-1]["state"]) == ("start", "end", "finished")
    steps = {event["step"]: event["metrics"] for event in events if event["event"] == "step"}
    logged = small_run.metrics(finished_sft)
    assert steps == {step: {k: v for k, v in entry.items() if k not in NOT_PRINTED} for step, entry in logged.items()}
    (score,) = events[-1]["held_out"]
    assert (score["name"], score["last"]) == ("loss", logged[STEPS]["eval/loss"])
    assert {"run directory", "checkpoint", "Hugging Face model"} <= events[-1]["places"].keys()


def test_the_loss_falls_and_the_exported_model_has_it(inputs: Path, finished_sft: Path) -> None:
    metrics = small_run.metrics(finished_sft)
    assert sorted(metrics) == list(range(STEPS + 1))
    held_out = [metrics[step]["eval/loss"] for step in (0, 2, 4, 6)]
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < held_out[0] - 1
    for step, directory in ((0, inputs / "model"), (STEPS, finished_sft / "hugging_face")):
        loss = transformers_loss(directory, inputs / "held_out.jsonl")
        assert metrics[step]["eval/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics[STEPS]["epoch"] == 1.0
    assert metrics[1]["example_tokens/trained_share"] == pytest.approx(0.5), "8 of prompt, 8 of answer"


@pytest.mark.soak
def test_a_run_that_diverges_keeps_its_last_finite_checkpoint_and_continues_from_it_with_a_better_recipe(
    inputs: Path, finished_sft: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    """And a model that has diverged already is refused."""
    values = recipe(inputs, tmp_path)
    values["checkpoint"]["keep_last"] = 1
    recipe_file = small_run.write(values, tmp_path)
    directory = shutil.copytree(finished_sft, tmp_path / "small_sft")
    shutil.rmtree(directory / f"checkpoints/step_{STEPS:06}")
    tensors, name = saved(inputs / "model"), "model.layers.1.self_attn.v_proj.weight"
    tensors[name][0, 0] = torch.nan
    shutil.copytree(inputs / "model", tmp_path / "model")
    model = with_tensors(inputs / "model", tmp_path / "model", tensors)

    wild = ("train.optimizer.lr=10", "train.optimizer.weight_decay=1e9", "train.optimizer.schedule=constant")
    wild += ("train.optimizer.skipped_steps_max=0",)
    other = (f"model.path={model}", "name=other")
    how: Any = {"command": "sft", "environment": ray}
    diverged, refused = small_run.side_by_side(
        lambda: small_run.end(small_run.start(recipe_file, *wild, **how), EXIT_RUN_FAILED),
        lambda: small_run.end(small_run.start(recipe_file, *other, **how), EXIT_USER_ERROR),
    )
    assert f"{model}: {name}" in refused
    assert "step 6" in diverged
    assert diverged.count("lower train.optimizer.lr") == 1, "the error is said once"
    assert "Traceback" not in diverged
    assert "has diverged" in diverged or "not finite" in diverged  # weights beyond bounds, or a loss that is no number
    assert f"train.optimizer.lr=5; it begins from {directory}/checkpoints/step_000004" in diverged
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000004"]
    assert "continuing after step 4" in small_run.train(recipe_file, **how)


@pytest.mark.soak
def test_killed_or_stopped_in_an_update_it_continues_with_the_same_numbers(
    inputs: Path, finished_sft: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe_file = small_run.write(recipe(inputs, tmp_path), tmp_path)
    directory = shutil.copytree(finished_sft, tmp_path / "small_sft")
    for left in (f"checkpoints/step_{STEPS:06}", "hugging_face"):  # as if it had been killed before that
        shutil.rmtree(directory / left)

    through = ("tests.loop.altered_runs", "signal", "SIGTERM", "update", "1")
    process = small_run.start(recipe_file, command="sft", through=through, environment=ray)
    printed = small_run.end(process, EXIT_STOPPED)
    assert "continuing after step 4" in printed
    assert "stopped by SIGTERM" in printed
    assert "step_000005" in printed, "an update that has begun is finished and saved"
    assert "continuing after step 5" in small_run.train(recipe_file, command="sft", environment=ray)
    assert small_run.stable(small_run.metrics(directory)) == small_run.stable(small_run.metrics(finished_sft))
    ours, theirs = ((run / "hugging_face" / "model.safetensors").read_bytes() for run in (directory, finished_sft))
    assert ours == theirs


@pytest.mark.soak
def test_a_rank_that_is_killed_is_started_again_inside_the_run(
    inputs: Path, finished_sft: Path, tmp_path: Path
) -> None:
    recipe_file = small_run.write(recipe(inputs, tmp_path), tmp_path)
    through = ("tests.loop.altered_runs", "signal_rank", "SIGKILL", "update", "4")
    printed = small_run.train(recipe_file, command="sft", through=through)
    assert "after step 3: training ranks are lost; they are started again (1 of 3)" in printed
    ours, theirs = (small_run.metrics(directory) for directory in (tmp_path / "small_sft", finished_sft))
    assert small_run.stable(ours) == small_run.stable(theirs)
