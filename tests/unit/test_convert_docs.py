"""The commands of docs/convert.md, run one after another as they stand there."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megagrpo import cli
from megagrpo.checkpoint.store import CheckpointStore, describe
from megagrpo.checkpoint.torch_dist import TorchFile, write_metadata
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.convert.targets import to_megatron
from megagrpo.errors import EXIT_USER_ERROR
from megagrpo.weights.boxes import Storage
from tests.safetensors_files import assert_same_files, assert_same_tensors, saved, write_peft
from tests.tiny_models import make_model

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "convert.md"
NAME = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the sources that the page's commands name: a model, Megatron-LM's directory and a run of ours."""
    monkeypatch.chdir(tmp_path)
    model = make_model("qwen2", tmp_path / "model")
    with_value(model, 0.0625)
    run = to_megatron(with_value(make_model("qwen2", tmp_path / "other"), 0.06298828125), tmp_path / "megatron-lm-run")
    (run.directory / "hugging_face").rename(tmp_path / "not_there")
    runs = tmp_path / "runs"
    average = {"reference." + name: tensor / 2 for name, tensor in saved(model).items()}
    save_training(runs / "my_run" / "checkpoints", saved(model), {"model": {"path": str(model)}}, average)
    adapter = saved(write_peft(tmp_path / "adapter", model))
    lora = {"model": {"path": str(model)}, "train": {"lora": {"rank": 4, "alpha": 8.0}}}
    save_training(runs / "my_lora_run" / "checkpoints", adapter, lora)
    return tmp_path


def with_value(model: Path, value: float) -> Path:
    tensors = saved(model)
    tensors[NAME][7, 11] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def save_training(
    directory: Path, tensors: dict[str, torch.Tensor], recipe: dict[str, Any], more: Mapping[str, torch.Tensor] = {}
) -> None:
    """A training checkpoint with these weights, and more tensors by their keys."""
    store = CheckpointStore(directory, keep_last=1)
    ranks = store.begin(3)
    stored = {f"param.{name}": tensor for name, tensor in tensors.items()} | dict(more)
    with TorchFile(ranks / "__0_0.distcp") as file:
        written = [file.add(key, (0,) * tensor.dim(), tensor.clone()) for key, tensor in stored.items()]
    write_metadata(ranks, {key: Storage(key, tuple(t.shape), "float32") for key, t in stored.items()}, written)
    state = TrainerState(3, weight_version=4, data_cursor={}, recipe=recipe)
    store.commit(state, [describe(ranks, path) for path in ranks.iterdir()])


def test_the_page_does_what_it_says(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran = 0
    for block in re.findall(r"```\n(\$.+?)```", PAGE.read_text(), re.DOTALL):
        for command, shown in re.findall(r"^\$ megagrpo (.+)\n((?:[^$\n].*\n)*)", block, re.MULTILINE):
            code = cli.main(shlex.split(command))
            said = capfd.readouterr()
            assert code == (1 if shown else 0), said.err
            assert shown in said.out
            assert "\x1b" not in said.err  # no bar without a terminal
            ran += 1
    assert ran == 9
    assert_same_files(place / "model", place / "model-again")
    assert_same_files(place / "merged", place / "merged-from-run")
    assert_same_files(place / "model", place / "best")
    halves = {name: tensor / 2 for name, tensor in saved(place / "model").items()}
    assert_same_tensors(saved(place / "average"), halves)


@pytest.mark.parametrize(
    "command",
    [
        "megatron-to-hf --source runs/my_lora_run/checkpoints",  # adapters, which merge-lora reads
        "merge-lora --adapter runs/my_lora_run/checkpoints --source model",  # no average
        "merge-lora --adapter adapter --source model",  # no training checkpoint
        "megatron-to-hf --source model",
    ],
)
def test_a_reference_that_is_not_there_is_refused(command: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", *command.split(), "--reference", "--output", "out"]) == EXIT_USER_ERROR
    assert not (place / "out").exists()


def test_the_scripts_are_the_commands(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for script, arguments in (
        ("hf_to_megatron", "--source model --output megatron"),
        ("megatron_to_hf", "--source megatron --output again"),
        ("verify", "model again"),
        ("merge_lora", "--adapter adapter --source model --output merged"),
    ):
        monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(REPOSITORY / "tools" / "convert_ckpt" / f"{script}.py"), run_name="__main__")
        assert ended.value.code == 0, capsys.readouterr().err
    assert "the same: 51 tensors" in capsys.readouterr().out
