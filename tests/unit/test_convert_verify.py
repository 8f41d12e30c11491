"""The comparison finds every difference, and only those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megagrpo import cli
from megagrpo.convert.targets import to_hugging_face, to_megatron
from megagrpo.convert.verify import verify
from megagrpo.errors import ModelError
from tests.safetensors_files import saved, with_tensors
from tests.tiny_models import make_model

NAME = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def megatron(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_megatron(model, tmp_path_factory.mktemp("converted") / "megatron").directory


def test_one_flipped_bit_is_found(
    model: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = saved(model)
    tensors[NAME].view(torch.int32)[7, 11] ^= 1
    other = with_tensors(model, tmp_path / "other", tensors)
    for first in (model, megatron):
        found = verify(first, other)
        assert [difference.tensor for difference in found.differences] == [NAME]
        assert "1 of 3,840 elements" in found.differences[0].what
        assert "first at [7, 11]" in found.differences[0].what
        assert 0 < found.largest < 1e-7
    assert cli.main(["convert", "verify", str(megatron), str(other)]) == 1
    assert NAME in capsys.readouterr().out
    assert cli.main(["convert", "verify", str(model), str(megatron)]) == 0
    assert "the same: 39 tensors" in capsys.readouterr().out


def test_the_largest_difference_is_said_a_nan_is_infinitely_far_and_zeros_differ_by_zero(
    model: Path, tmp_path: Path
) -> None:
    def other(name: str, value: float, norm: float = 0.25) -> Path:
        tensors = saved(model)
        tensors[NAME][3, 5], tensors["model.norm.weight"][2] = value, norm
        return with_tensors(model, tmp_path / name, tensors)

    zero = other("zero", 0.0)
    far = verify(zero, other("far", 0.5, norm=0.5))
    found = {difference.tensor: difference.largest for difference in far.differences}
    assert (found, far.largest) == ({NAME: 0.5, "model.norm.weight": 0.25}, 0.5)
    assert verify(zero, other("nan", float("nan"))).largest == float("inf")
    assert not verify(tmp_path / "nan", tmp_path / "nan").differences
    (difference,) = verify(zero, other("minus", -0.0)).differences
    assert (difference.tensor, difference.largest) == (NAME, 0.0)


def test_a_missing_tensor_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = saved(model)
    del tensors[NAME]
    other = with_tensors(model, tmp_path / "other", tensors)
    with pytest.raises(ModelError, match=NAME):
        verify(model, other)
    assert cli.main(["convert", "verify", str(model), str(other)]) == 2
    assert NAME in capsys.readouterr().err


def test_another_shape_and_layers_of_one_only_are_found(model: Path, tmp_path: Path) -> None:
    wider = make_model("llama", tmp_path / "wider", intermediate_size=96)
    shapes = {difference.tensor: difference.what for difference in verify(model, wider).differences}
    assert shapes[NAME] == "[48, 80] and [48, 96]"
    deeper = make_model("llama", tmp_path / "deeper", num_hidden_layers=5)
    only = {difference.tensor: difference.what for difference in verify(model, deeper).differences}
    assert only["model.layers.4.mlp.down_proj.weight"] == f"only in {deeper}"
    assert f"only in {deeper}" in [difference.what for difference in verify(deeper, model).differences]


def test_another_dtype_is_found_unless_a_cast_is_asked_for(model: Path, tmp_path: Path) -> None:
    half = to_hugging_face(model, tmp_path / "half", dtype="bfloat16").directory
    found = verify(model, half)
    assert len(found.differences) == found.tensors
    assert found.differences[0].what == "float32 and bfloat16"
    assert not verify(model, half, dtype="bfloat16").differences
    assert verify(model, half, dtype="float32").differences


def test_tensors_outside_the_model_are_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_tensors(model, tmp_path / "other", saved(model) | {"mtp.weight": torch.ones(2)})
    assert verify(model, other).left_out == ((other, ("mtp.weight",)),)
    assert cli.main(["convert", "verify", str(model), str(other)]) == 0
    assert "mtp.weight" in capsys.readouterr().out


def test_a_checkpoint_without_a_config_is_read_with_that_of_the_other(model: Path, tmp_path: Path) -> None:
    iteration = to_megatron(model, tmp_path / "megatron").directory / "iter_0000000"
    (tmp_path / "megatron" / "hugging_face").rename(tmp_path / "elsewhere")
    assert not verify(iteration, model).differences
    assert not verify(model, iteration).differences
    assert json.loads((tmp_path / "elsewhere" / "config.json").read_text())["model_type"] == "llama"


def test_copies_of_tensors_that_are_not_trained_are_compared_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, name = make_model("qwen3_5", tmp_path / "model"), "model.visual.pos_embed.weight"
    assert not to_hugging_face(model, tmp_path / "copy").left_out
    assert cli.main(["convert", "verify", str(model), str(tmp_path / "copy")]) == 0
    assert "not compared" not in capsys.readouterr().out
    tensors = saved(model)
    tensors[name].view(torch.int32)[0, 3] ^= 1
    other = with_tensors(model, tmp_path / "other", tensors)
    assert [difference.tensor for difference in verify(model, other).differences] == [name]
    assert cli.main(["convert", "verify", str(model), str(other)]) == 1
    assert f"{name}: copies that differ" in capsys.readouterr().out
