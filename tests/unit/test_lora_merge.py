"""megagrpo convert merge-lora: plain torch's numbers to the last bit, from PEFT's files and from our checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.convert import hugging_face
from megagrpo.convert.merge_lora import merge_lora
from megagrpo.errors import CheckpointError, ModelError
from tests.peft_files import ADAPTED, write_peft
from tests.safetensors_files import saved
from tests.tiny_models import make_model


def torch_merged(model: Path, adapter: Path, scales: Mapping[str, float]) -> dict[str, torch.Tensor]:
    weights = saved(model)
    found = saved(adapter)
    for module, scale in scales.items():
        a, b = (found[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")
        weights[module + ".weight"] = weights[module + ".weight"] + scale * (b @ a)
    return weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("qwen2", tmp_path / "model", num_hidden_layers=2)


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_merged_is_bit_for_bit_what_torch_computes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_peft(tmp_path / "adapter", model)
    wanted = torch_merged(model, adapter, dict.fromkeys(ADAPTED, 2.0))
    merge_lora(model, adapter, tmp_path / "merged")
    assert_equal(saved(tmp_path / "merged"), wanted)
    monkeypatch.setattr(hugging_face, "PIECE_BYTES", 1000)  # five rows at a time
    merge_lora(model, adapter, tmp_path / "pieces")
    assert_equal(saved(tmp_path / "pieces"), wanted)


def test_bfloat16_is_rounded_once(model: Path, tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "adapter", model)
    wanted = torch_merged(model, adapter, dict.fromkeys(ADAPTED, 2.0))
    merge_lora(model, adapter, tmp_path / "merged", dtype="bfloat16")
    assert_equal(saved(tmp_path / "merged"), {name: tensor.bfloat16() for name, tensor in wanted.items()})
    # and from a bfloat16 model into float32, not by way of bfloat16
    rounded = {name: tensor.bfloat16() for name, tensor in saved(model).items()}
    save_file(rounded, model / "model.safetensors")
    merge_lora(model, adapter, tmp_path / "wide", dtype="float32")
    exact = torch_merged(model, adapter, dict.fromkeys(ADAPTED, 2.0))
    assert_equal(saved(tmp_path / "wide"), {name: tensor.float() for name, tensor in exact.items()})


def test_peft_scales(model: Path, tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "adapter", model, use_rslora=True, alpha_pattern={"layers.1.*": 3, "down_proj": 5})
    merge_lora(model, adapter, tmp_path / "merged")
    assert_equal(saved(tmp_path / "merged"), torch_merged(model, adapter, {ADAPTED[0]: 4.0, ADAPTED[1]: 1.5}))


def cut_short(tensors: dict[str, torch.Tensor]) -> None:
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    tensors[key] = tensors[key][:47].clone()


def with_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(131, 48)


def with_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 131)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_short, r"lora_B.weight\n.*given: \[47, 4\]\n.*needed: \[48, 4\]"),
        (with_head, "lm_head.weight"),
        (with_embedding, "lora_embedding_A"),
    ],
)
def test_tensors_of_another_kind_or_model_are_refused(
    model: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    adapter = write_peft(tmp_path / "adapter", model)
    tensors = saved(adapter)
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=said):
        merge_lora(model, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_alpha": "8"}, {"peft_type": "LOHA"}], ids=str)
def test_other_methods_are_refused(model: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(config))):
        merge_lora(model, write_peft(tmp_path / "adapter", model, **config), tmp_path / "merged")


def test_what_is_no_adapter_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        merge_lora(model, tmp_path, tmp_path / "merged")
