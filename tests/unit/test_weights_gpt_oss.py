"""Files of gpt-oss: columns of gate and up that alternate, and experts in MXFP4."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from megagrpo.convert.targets import to_hugging_face, to_megatron
from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.families import architecture_of, read_architecture
from megagrpo.weights.files import loading
from megagrpo.weights.files.loading import ModelFiles, dequantized
from tests.safetensors_files import assert_same_tensors, saved, with_tensors
from tests.tiny_models import randomize
from tests.weight_streams import loaded, manifests, through_ranks

HIDDEN, FFN, EXPERTS = 64, 96, 4
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss in bfloat16."""
    config = transformers.GptOssConfig(
        vocab_size=48, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("gpt_oss")
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomize(made, 0)
    made.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The model with random experts in MXFP4, and the tensors that it stands for."""
    stored, stands_for = saved(model), saved(model)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        blocks = torch.randint(256, (experts, columns, rows // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(110, 130, (experts, columns, rows // 32), generator=generator).to(torch.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        stands_for[name] = _convert_moe_packed_tensors(blocks, scales)
    directory = with_tensors(model, tmp_path_factory.mktemp("mxfp4"), stored)
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return directory, stands_for


def test_every_region_of_mxfp4_is_read_as_transformers_dequantises_it(packed: Any) -> None:
    directory, stands_for = packed
    files = ModelFiles(directory)
    for name, rows, columns in (("gate_up_proj", HIDDEN, FFN), ("down_proj", FFN, HIDDEN)):
        name = f"model.layers.1.mlp.experts.{name}"
        whole = stands_for[name].view(EXPERTS, rows, columns, -1)
        for expert in ((0, 4), (2, 1)):
            for row in ((0, rows), (3, 1), (31, 2), (32, 32), (5, 50)):
                for column in ((0, columns), (17, 30)):
                    for at in range(whole.shape[-1]):
                        parts = (expert, row, column, (at, 1))
                        wanted = whole[tuple(slice(start, start + size) for start, size in parts)]
                        assert torch.equal(files.read(name, *map(tuple, zip(*parts, strict=True))), wanted), parts


def test_all_values_and_scales_of_mxfp4_are_those_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    wanted = _convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    found = dequantized(blocks, scales)
    assert torch.equal(found.view(torch.int16), wanted.contiguous().view(torch.int16))


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(data=3), ParallelLayout(data=2, expert=2)])
def test_mxfp4_is_loaded_and_exported_as_what_it_stands_for(
    layout: ParallelLayout, packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, write = [], os.pwrite

    def counting(descriptor: int, data: Any, at: int) -> int:
        runs.append(len(data))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", counting)
    directory, stands_for = packed
    ranks = through_ranks(directory, tmp_path / "out", layout, "bfloat16", "bfloat16")
    assert_same_tensors(saved(tmp_path / "out"), stands_for)
    assert min(runs) > 2, "runs of one element"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    plain = with_tensors(tmp_path / "out", tmp_path / "plain", stands_for)
    for found, wanted in zip(
        loaded(plain, manifests(read_architecture(plain), layout, "bfloat16")), ranks, strict=True
    ):
        assert_same_tensors(found, wanted)


def test_a_rank_reads_its_experts_alone_and_gate_and_up_at_once(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, stands_for = packed
    arch, counts, real = read_architecture(directory), [], loading.read_region

    def counting(*region: Any) -> torch.Tensor:
        counts.append(math.prod(region[-1]) * (2 if region[1].dtype == "U8" else 0))
        return real(*region)

    monkeypatch.setattr(loading, "read_region", counting)
    held = manifests(arch, ParallelLayout(data=2, expert=2), "bfloat16")
    loaded(directory, held[:1])
    of_experts = sum(its.numel() for name, its in stands_for.items() if name.endswith(("gate_up_proj", "down_proj")))
    assert sum(counts) == of_experts / 2 * (1 + 1 / 16)


def test_blocks_without_their_scales_or_of_another_shape_are_refused(packed: Any, tmp_path: Path) -> None:
    directory, _ = packed
    tensors = saved(directory)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    tensors["model.layers.1.mlp.experts.down_proj_blocks"] = torch.zeros(4, 64, 2, 16, dtype=torch.uint8)
    with_tensors(directory, tmp_path / "wrong", tensors)
    (tmp_path / "wrong" / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ModelError) as caught:
        ModelFiles(tmp_path / "wrong")
    for said in ("layers.0.mlp.experts.down_proj_blocks", "without scales", "U8 [4, 64, 3, 16]", "U8 [4, 64, 2, 16]"):
        assert said in str(caught.value)


def test_mxfp4_is_taken_of_gpt_oss_alone(packed: Any) -> None:
    config = json.loads((packed[0] / "config.json").read_text())
    assert architecture_of(config).experts
    for wrong in (
        transformers.LlamaConfig().to_dict() | {"quantization_config": MXFP4},
        config | {"quantization_config": {"quant_method": "awq"}},
    ):
        with pytest.raises(ModelError, match="quantization_config"):
            architecture_of(wrong)


def test_a_conversion_joins_alternating_columns_and_one_for_megatron_lm_is_refused(model: Path, tmp_path: Path) -> None:
    to_hugging_face(model, tmp_path / "again")
    assert_same_tensors(saved(model), saved(tmp_path / "again"))
    with pytest.raises(ModelError, match="windows"):
        to_megatron(model, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
