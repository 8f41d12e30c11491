"""A critic's model directory: what of it is read, what may be missing, and what is refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from megagrpo.errors import ModelError, PreflightError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from megagrpo.weights.families import read_architecture, tensors_of
from megagrpo.weights.families.architecture import critic_of
from megagrpo.weights.files.loading import load_files
from tests.tiny_run import make_model, make_run
from tests.weight_streams import empty, manifests

GAE = ["algorithm.advantage.name=gae", "algorithm.critic={path: PATH}", "algorithm.kl.coefficient=0"]


def with_head(directory: Path, **tensors: np.ndarray) -> Path:
    """The model in `directory` with other tensors in place of the head over the vocabulary."""
    file = directory / "model.safetensors"
    weights = {name: weight for name, weight in load_file(file).items() if name != "lm_head.weight"}
    save_file(weights | {name.replace("_", "."): tensor for name, tensor in tensors.items()}, file)
    return directory


def load_last_stage(directory: Path, layout: ParallelLayout) -> dict[str, torch.Tensor]:
    arch = critic_of(read_architecture(directory))
    manifest = manifests(arch, layout, "bfloat16")[-1]
    tensors = empty(manifest)
    load_files(directory, manifest, tensors, arch)
    return tensors


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_has_the_backbone_and_a_value_head(tied: bool, tmp_path: Path) -> None:
    arch = read_architecture(make_model(tmp_path / "model", tie_word_embeddings=tied))
    backbone = {tensor.name for tensor in tensors_of(arch)} - {"lm_head.weight"}
    critic = {tensor.name: tensor for tensor in tensors_of(critic_of(arch))}
    assert critic.keys() == backbone | {"score.weight"}
    assert critic["score.weight"].shape == (1, arch.hidden)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tensor=2, pipeline=2)], ids=str)
def test_the_head_is_float32_and_the_files_or_zeros(layout: ParallelLayout, tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    new = load_last_stage(directory, layout)["chunk0.output_layer.weight"]
    assert new.dtype == torch.float32
    assert not new.any()
    score = np.linspace(-1, 1, 16, dtype=np.float32)[None]
    stored = load_last_stage(with_head(directory, score_weight=score), layout)["chunk0.output_layer.weight"]
    np.testing.assert_array_equal(stored.numpy(), score)


def test_a_head_with_a_bias_or_of_several_labels_is_refused(tmp_path: Path) -> None:
    directory = with_head(
        make_model(tmp_path / "model"), score_weight=np.zeros((3, 16), np.float32), score_bias=np.zeros(3)
    )
    with pytest.raises(ModelError) as raised:
        load_last_stage(directory, ParallelLayout())
    for words in ("score.weight", "[3, 16]", "[1, 16]", "score.bias"):
        assert words in str(raised.value)


def run_with(tmp_path: Path, **config: Any) -> list[str]:
    critic = make_model(tmp_path / "critic", **config)
    return [override.replace("PATH", str(critic)) for override in GAE]


def test_a_critic_of_its_own_is_found_before_the_run(tmp_path: Path) -> None:
    recipe = make_run(tmp_path)
    overrides = run_with(tmp_path, num_hidden_layers=2)
    assert preflight(load(recipe, overrides)).critic_directory == tmp_path / "critic"
    own = [override.replace(f"path: {tmp_path}/critic", "lr: 1.0e-4") for override in overrides]
    assert preflight(load(recipe, own)).critic_directory is None


def test_a_critic_that_cannot_serve_is_refused_before_the_run(tmp_path: Path) -> None:
    recipe = make_run(tmp_path)
    overrides = [*run_with(tmp_path, vocab_size=30, num_hidden_layers=3), "train.layout.pipeline=2"]
    with pytest.raises(PreflightError) as raised:
        preflight(load(recipe, overrides))
    for words in ("algorithm.critic.path", "vocabulary of 30", "of 31", "3 layers (the critic's)"):
        assert words in str(raised.value)
    (tmp_path / "critic" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(PreflightError, match="gpt2"):
        preflight(load(recipe, overrides))
