"""Files into ranks: every rank of every layout gets what the naive oracle says, reading only what it owns."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.sides.checkpoint import extra_tensors
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from megagrpo.weights.views import torch_dtype
from tests.safetensors_files import saved, stack_experts, with_tensors
from tests.tiny_models import FAMILIES, make_model
from tests.weights_oracle import rank_tensors

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tensor=2),
    ParallelLayout(tensor=4),  # more ranks than query groups
    ParallelLayout(pipeline=2),
    ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelLayout(pipeline=3, last_stage_layers=2),
    ParallelLayout(data=2, context=2, expert=4),
    ParallelLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "weights_models"


@pytest.fixture
def model(models: Path, tmp_path: Path) -> Path:
    """A copy of a model, to be damaged."""
    return Path(shutil.copytree(make_model("qwen3_moe", models / "qwen3_moe"), tmp_path / "model"))


def empty(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Tensors for a manifest, full of a value that no checkpoint holds."""
    return {
        name: torch.full(storage.shape, torch.nan, dtype=torch_dtype(storage.dtype))
        for name, storage in manifest.storages.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_of_every_layout_holds_what_the_oracle_says(family: str, models: Path) -> None:
    directory = make_model(family, models / family)
    arch = read_architecture(directory)
    checkpoint = load_file(directory / "model.safetensors")
    for layout in LAYOUTS:
        for where in rank_grid(layout):
            manifest = LOCAL_SPEC.manifest(arch, layout, where, "float32")
            tensors = empty(manifest)
            load_files(directory, manifest, tensors)
            expected = rank_tensors(arch, layout, where, checkpoint)
            assert tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(tensors[name], tensor), (str(layout), where.rank, name)


def load_one(directory: Path) -> dict[str, torch.Tensor]:
    """The second of two tensor ranks. Nothing may be written if it fails."""
    layout = ParallelLayout(tensor=2)
    manifest = LOCAL_SPEC.manifest(read_architecture(directory), layout, rank_grid(layout)[1], "bfloat16")
    tensors = empty(manifest)
    try:
        load_files(directory, manifest, tensors)
    except ModelError:
        assert all(tensor.isnan().all() for tensor in tensors.values())
        raise
    return tensors


def test_values_are_cast_to_the_dtype_of_the_rank(model: Path) -> None:
    held = load_one(model)["chunk0.decoder.layers.1.self_attention.linear_proj.weight"]
    whole = saved(model)["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(held, whole.chunk(2, 1)[1].bfloat16())


def test_stacked_experts_and_several_files_are_read_too(model: Path) -> None:
    before = load_one(model)
    with_tensors(model, model, stack_experts(saved(model)) | {"an.unknown.tensor": torch.zeros(2)})
    after = load_one(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    (model / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        load_one(model)


def test_all_missing_tensors_and_wrong_shapes_and_dtypes_are_named(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(130, 48)
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 48, dtype=torch.int8)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_one(model)
    assert len(caught.value.problems) == 4
    for text in ("model.norm.weight", "experts.3.up_proj", "[130, 48]", "[131, 48] by config.json", "dtype I8"):
        assert text in str(caught.value)


def in_fp8(directory: Path, source: Path) -> dict[str, torch.Tensor]:
    """Writes `source` as DeepSeek publishes its models, scales in a file of their own; returns what it stands for."""
    stands_for, stored, scales = {}, {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("proj.weight") and "kv_a_proj" not in name:
            stands_for[name] = stored[name] = weight if name.endswith("bias") else weight.bfloat16()
            continue
        quantized, real = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight).bfloat16()
        scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale[i, j] = weight[block].abs().max() / 448
                quantized[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
                real[block] = (quantized[block].float() * scale[i, j]).bfloat16()
        stands_for[name], stored[name], scales[name + "_scale_inv"] = real, quantized, scale
    # A layer that predicts further tokens, with the name of the one after the last.
    stored["model.layers.4.eh_proj.weight"] = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    scales["model.layers.4.eh_proj.weight_scale_inv"] = torch.zeros(1, 1)
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weight_map = {}
    for file, tensors in (("a.safetensors", stored), ("b.safetensors", scales)):
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return stands_for


LARGE = {"hidden_size": 160, "intermediate_size": 300, "kv_lora_rank": 132, "moe_intermediate_size": 136}


def test_weights_in_fp8_are_read_as_what_they_stand_for(models: Path, tmp_path: Path) -> None:
    stands_for = in_fp8(tmp_path / "fp8", make_model("deepseek_v3", models / "deepseek_v3_large", **LARGE))
    arch = read_architecture(tmp_path / "fp8")
    for layout in (ParallelLayout(), ParallelLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=2)):
        for where in rank_grid(layout):
            manifest = LOCAL_SPEC.manifest(arch, layout, where, "bfloat16")
            assert {name for name, s in manifest.storages.items() if s.dtype == "float32"} == {
                name for name in manifest.storages if name.endswith("expert_bias")
            }
            tensors = empty(manifest)
            load_files(tmp_path / "fp8", manifest, tensors)
            expected = rank_tensors(arch, layout, where, stands_for)
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert extra_tensors(tmp_path / "fp8") == [
        "model.layers.4.eh_proj.weight",
        "model.layers.4.eh_proj.weight_scale_inv",
    ]


def test_fp8_without_its_scales_is_refused(models: Path, tmp_path: Path) -> None:
    in_fp8(tmp_path / "fp8", make_model("deepseek_v3", models / "deepseek_v3_large", **LARGE))
    scales = load_file(tmp_path / "fp8" / "b.safetensors")
    lost = scales.pop("model.layers.0.self_attn.o_proj.weight_scale_inv")
    scales["model.layers.1.self_attn.o_proj.weight_scale_inv"] = lost[:1, :1].repeat(1, 9)
    save_file(scales, tmp_path / "fp8" / "b.safetensors")
    with pytest.raises(ModelError) as caught:
        load_one(tmp_path / "fp8")
    assert len(caught.value.problems) == 2
    for text in ("layers.0.self_attn.o_proj.weight", "fp8 without scales", "F32 [1, 9]", "F32 [2, 1]"):
        assert text in str(caught.value)


def test_files_that_are_no_safetensors_are_named(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    for content in (
        whole[:-1],
        whole[:100],
        b"",
        b"\x10" + bytes(7) + b"not a header....",
        (2).to_bytes(8, "little") + b"[]",
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            load_one(model)
    path.unlink()
    with pytest.raises(ModelError, match="no such file"):
        load_one(model)


def test_only_the_bytes_that_a_rank_owns_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes taken from the files, against what the manifest holds."""
    read, real = 0, os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        count = real(descriptor, buffers, offset)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    tensors = load_one(model)
    padding = 48 * 2  # one row of 131 in the embedding and in the head
    assert read == 4 * (sum(tensor.numel() for tensor in tensors.values()) - padding)
