"""Ranks into files: what was loaded comes out bit for bit, whatever the layout, and only when all of it is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from megagrpo.errors import CheckpointError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.export import begin_export, finish_export, write_part
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from tests.safetensors_files import assert_same_files, saved
from tests.tiny_models import FAMILIES, make_model
from tests.unit.test_weights_load import LARGE, LAYOUTS, empty, in_fp8

SIDES = {"local": LOCAL_SPEC.manifest, "te": TE_SPEC.manifest}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "weights_models"


def round_trip(model: Path, target: Path, layout: ParallelLayout, side: str, **options: int) -> None:
    arch = read_architecture(model)
    manifests = [SIDES[side](arch, layout, where, "float32") for where in rank_grid(layout)]
    ranks = [empty(manifest) for manifest in manifests]
    for manifest, tensors in zip(manifests, ranks, strict=True):
        load_files(model, manifest, tensors)
    export = begin_export(target, model, arch, "float32", **options)
    plan = make_plan(manifests, export.files)
    for rank, tensors in enumerate(ranks):
        assert not target.exists()
        write_part(export, plan, rank, tensors)
    finish_export(export)


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_and_exported_again_is_bit_identical(family: str, models: Path, tmp_path: Path) -> None:
    model = make_model(family, models / family)
    for number, layout in enumerate(LAYOUTS):
        round_trip(model, tmp_path / str(number), layout, "te" if number % 2 else "local")
        assert_same_files(model, tmp_path / str(number))


def test_transformers_loads_a_sharded_export(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2_tied", models / "qwen2_tied")
    (model / "tokenizer_config.json").write_text("{}")
    round_trip(model, tmp_path / "out", ParallelLayout(tensor=2, pipeline=2), "local", file_bytes=40_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (model, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved(tmp_path / "out").values())


def test_an_export_can_be_in_another_dtype(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen3", models / "qwen3")
    arch = read_architecture(model)
    manifest = LOCAL_SPEC.manifest(arch, ParallelLayout(), rank_grid(ParallelLayout())[0], "float32")
    tensors = empty(manifest)
    load_files(model, manifest, tensors)
    export = begin_export(tmp_path / "out", model, arch, "bfloat16")
    write_part(export, make_plan([manifest], export.files), 0, tensors)
    finish_export(export)
    original = saved(model)
    assert all(torch.equal(original[name].bfloat16(), tensor) for name, tensor in saved(tmp_path / "out").items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_model_in_fp8_is_exported_in_bfloat16_as_what_it_stands_for(models: Path, tmp_path: Path) -> None:
    stands_for = in_fp8(tmp_path / "fp8", make_model("deepseek_v3", models / "deepseek_v3_large", **LARGE))
    arch, layout = read_architecture(tmp_path / "fp8"), ParallelLayout(tensor=2, pipeline=2)
    manifests = [TE_SPEC.manifest(arch, layout, where, "bfloat16") for where in rank_grid(layout)]
    export = begin_export(tmp_path / "out", tmp_path / "fp8", arch, "bfloat16")
    plan = make_plan(manifests, export.files)
    for rank, manifest in enumerate(manifests):
        tensors = empty(manifest)
        load_files(tmp_path / "fp8", manifest, tensors)
        write_part(export, plan, rank, tensors)
    finish_export(export)
    exported = saved(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in exported.items()} == {n: t.dtype for n, t in stands_for.items()}
    assert all(torch.equal(exported[name], tensor) for name, tensor in stands_for.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_a_second_export_replaces_the_first_and_leftovers(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2", models / "qwen2")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_text("cut short")
    round_trip(model, tmp_path / "out", ParallelLayout(), "local")
    finish_export(begin_export(tmp_path / "out", model, read_architecture(model), "bfloat16"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_named(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2", models / "qwen2")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        begin_export(tmp_path / "file" / "out", model, read_architecture(model), "float32")
