"""docs/families.md: a new dense family is one file and one line. A toy family on every side, and in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megagrpo import cli
from megagrpo.convert.hugging_face import to_hugging_face
from megagrpo.convert.megatron import to_megatron
from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families import FAMILIES, Family, read_architecture, tensors_of
from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.families.decoder import decoder_tensors
from megagrpo.weights.families.reading import ConfigReader
from megagrpo.weights.files.export import begin_export, finish_export, write_part
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import sglang, transformers
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from tests.safetensors_files import assert_same_files
from tests.tiny_run import make_run
from tests.unit.test_weights_load import empty
from tests.unit.test_weights_plan import carry_out
from tests.weights_oracle import engine_tensors, random_checkpoint, rank_tensors


def toy(config: Mapping[str, Any]) -> Architecture:
    """The whole of a family's file: biases and norms of queries and keys together, which no other family has."""
    read = ConfigReader(config)
    read.refuse_if_set("mlp_bias")
    return read.architecture(qkv_bias=True, qk_norm=True)


def toy_with_sinks(arch: Architecture) -> tuple[Tensor, ...]:
    """With a kind of tensor that no side has been taught."""
    sinks = Tensor("model.layers.0.self_attn.sinks", (arch.heads,), "sinks", 0)  # type: ignore[arg-type]
    return (*decoder_tensors(arch), sinks)


def test_a_dense_family_is_one_function_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FAMILIES, "toy", Family(toy))
    recipe = make_run(tmp_path, model_type="toy", head_dim=6, tie_word_embeddings=False)
    model = tmp_path / "model"
    arch, layout = read_architecture(model), ParallelLayout(tensor=2, pipeline=2)
    checkpoint = random_checkpoint(arch)
    save_file(checkpoint, model / "model.safetensors", {"format": "pt"})
    engines = [sglang.manifest(arch, EngineLayoutConfig(tensor=2), rank, "float32", "cpu") for rank in range(2)]
    for spec in (LOCAL_SPEC, TE_SPEC):
        manifests = [spec.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
        ranks = [empty(manifest) for manifest in manifests]
        for where, manifest, tensors in zip(rank_grid(layout), manifests, ranks, strict=True):
            load_files(model, manifest, tensors)
            assert_equal(tensors, rank_tensors(arch, layout, where, checkpoint, te=spec is TE_SPEC))
        for rank, tensors in enumerate(carry_out(make_plan(manifests, engines), ranks)):
            assert_equal(tensors, engine_tensors(arch, 2, 1, rank, "cpu", checkpoint))
        (whole,) = carry_out(make_plan(manifests, [transformers.manifest(arch, "float32")]), ranks)
        assert_equal(whole, checkpoint)
        export = begin_export(tmp_path / "exported", model, arch, "float32")
        plan = make_plan(manifests, export.files)
        for rank, tensors in enumerate(ranks):
            write_part(export, plan, rank, tensors)
        finish_export(export)
        assert_same_files(model, tmp_path / "exported")
    to_megatron(model, tmp_path / "megatron")
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_files(model, tmp_path / "back")
    assert cli.main(["plan", str(recipe), "rollout.engine=sglang", "cluster.device=cuda"]) == 0
    assert "toy of" in capsys.readouterr().out


def test_a_tensor_that_a_side_was_not_taught_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", Family(toy, toy_with_sinks))
    make_run(tmp_path, model_type="toy")
    arch = read_architecture(tmp_path / "model")
    assert tensors_of(arch)[-1].role == "sinks"
    one = ParallelLayout()
    for spec in (LOCAL_SPEC, TE_SPEC):
        with pytest.raises(ModelError, match=r"toy on Megatron\n.*the role sinks"):
            spec.manifest(arch, one, rank_grid(one)[0], "float32")
    with pytest.raises(ModelError, match=r"toy on SGLang\n.*the role sinks"):
        sglang.manifest(arch, EngineLayoutConfig(), 0, "float32", "cuda")


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
