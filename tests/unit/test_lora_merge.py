"""megagrpo convert merge-lora: float32 sums rounded once, from PEFT's files, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.convert import targets
from megagrpo.convert.merge_lora import merge_lora, open_adapter
from megagrpo.errors import EXIT_USER_ERROR, CheckpointError, ModelError
from tests.safetensors_files import ADAPTED, assert_same_files, saved, write_peft
from tests.tiny_models import make_model

Merged = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By name: W + s B A in float64, and the largest rounding error of float32 arithmetic in it."""


def exactly_merged(model: Path, adapter: Path, scales: Mapping[str, float]) -> Merged:
    found = saved(adapter)
    wanted = {name: (tensor.double(), torch.zeros(()).double()) for name, tensor in saved(model).items()}
    for module, scale in scales.items():
        a, b = (found[f"base_model.model.{module}.lora_{which}.weight"].double() for which in "AB")
        weight, _ = wanted[module + ".weight"]
        # Each of the rank's products and sums, the scale and the last sum are rounded once: 2**-24 of what is summed.
        summed = weight.abs() + abs(scale) * (b.abs() @ a.abs())
        wanted[module + ".weight"] = weight + scale * (b @ a), (2 * a.shape[0] + 2) * 2.0**-24 * summed
    return wanted


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("qwen2", tmp_path / "model", num_hidden_layers=2)


def assert_merged(directory: Path, wanted: Merged, dtype: torch.dtype = torch.float32) -> None:
    """Every value is the sum in float32, in whatever order a machine's kernels sum, rounded once to `dtype`."""
    found = saved(directory)
    assert found.keys() == wanted.keys()
    for name, (exact, error) in wanted.items():
        assert found[name].dtype == dtype, name
        low, high = ((exact + side * error).to(dtype) for side in (-1, 1))
        assert bool(((low <= found[name]) & (found[name] <= high)).all()), name


def test_sums_are_those_of_float32_in_pieces_of_any_size(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_peft(tmp_path / "adapter", model)
    wanted = exactly_merged(model, adapter, dict.fromkeys(ADAPTED, 2.0))
    merge_lora(model, adapter, tmp_path / "merged")
    assert_merged(tmp_path / "merged", wanted)
    monkeypatch.setattr(targets, "PIECE_BYTES", 1000)  # five rows at a time
    merge_lora(model, adapter, tmp_path / "pieces")
    assert_merged(tmp_path / "pieces", wanted)


def test_bfloat16_is_rounded_once(model: Path, tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "adapter", model)
    merge_lora(model, adapter, tmp_path / "merged", dtype="bfloat16")
    assert_merged(tmp_path / "merged", exactly_merged(model, adapter, dict.fromkeys(ADAPTED, 2.0)), torch.bfloat16)
    # From a bfloat16 model to float32, the sum is not rounded to bfloat16 on the way.
    rounded = {name: tensor.bfloat16() for name, tensor in saved(model).items()}
    save_file(rounded, model / "model.safetensors")
    merge_lora(model, adapter, tmp_path / "wide", dtype="float32")
    assert_merged(tmp_path / "wide", exactly_merged(model, adapter, dict.fromkeys(ADAPTED, 2.0)))


def test_peft_scales(model: Path, tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "adapter", model, use_rslora=True, alpha_pattern={"layers.1.*": 3, "down_proj": 5})
    merge_lora(model, adapter, tmp_path / "merged")
    assert_merged(tmp_path / "merged", exactly_merged(model, adapter, {ADAPTED[0]: 4.0, ADAPTED[1]: 1.5}))


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("gemma3_text", ("self_attn.q_proj", "mlp.down_proj")),
        ("olmo2", ("self_attn.o_proj",)),
        ("minimax_m2", ("self_attn.k_proj", "block_sparse_moe.experts.1.w2")),
        ("phi3", ("self_attn.qkv_proj", "mlp.gate_up_proj")),
        ("glm4", ("self_attn.v_proj", "mlp.gate_up_proj")),
        ("qwen3_next", ("self_attn.q_proj", "mlp.shared_expert.up_proj")),
        ("qwen3_5_text", ("self_attn.q_proj", "mlp.gate_proj")),
    ],
)
def test_adapters_of_matrices_that_the_files_name_or_fuse_in_their_own_way_are_merged(
    family: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    model = make_model(family, tmp_path / "model")
    names = tuple(f"model.layers.3.{module}" for module in modules)
    adapter = write_peft(tmp_path / "adapter", model, names)
    merge_lora(model, adapter, tmp_path / "merged")
    assert_merged(tmp_path / "merged", exactly_merged(model, adapter, dict.fromkeys(names, 2.0)))


def test_adapters_of_a_composite_may_have_the_names_of_its_text_model_alone(tmp_path: Path) -> None:
    model, text = (make_model(family, tmp_path / family) for family in ("qwen3_5", "qwen3_5_text"))
    adapter = write_peft(tmp_path / "adapter", text, ("model.layers.1.mlp.up_proj",))
    merge_lora(model, adapter, tmp_path / "short")
    tensors = saved(adapter).items()
    longer = {name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in tensors}
    save_file(longer, adapter / "adapter_model.safetensors")
    merge_lora(model, adapter, tmp_path / "long")
    assert_same_files(tmp_path / "short", tmp_path / "long")
    module = "model.language_model.layers.1.mlp.up_proj"
    assert_merged(tmp_path / "long", exactly_merged(model, adapter, {module: 2.0}))


ADAPTED_DOWN = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({ADAPTED_DOWN.format("A"): (0, 80), ADAPTED_DOWN.format("B"): (48, 0)}, r"given: \[0, 80\]\n.*r at least 1"),
        ({ADAPTED_DOWN.format("A"): ()}, r"lora_A.weight\n.*given: \[\]\n.*needed: .*r at least 1"),
        ({ADAPTED_DOWN.format("B"): (47, 4)}, r"lora_B.weight\n.*given: \[47, 4\]\n.*needed: \[48, 4\]"),
        ({"base_model.model.lm_head.weight": (131, 48)}, "lm_head.weight"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 131)}, "lora_embedding_A"),
    ],
)
def test_tensors_of_another_kind_or_model_are_refused(
    model: Path, tmp_path: Path, change: dict[str, tuple[int, ...]], said: str
) -> None:
    adapter = write_peft(tmp_path / "adapter", model)
    changed = {name: torch.zeros(shape) for name, shape in change.items()}
    save_file(saved(adapter) | changed, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=said):
        merge_lora(model, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", [None, True, False, "gaussian", "eva", "orthogonal"])
def test_initializations_that_leave_the_model_as_it_is_are_merged(tmp_path: Path, model: Path, name: Any) -> None:
    ignored = dict.fromkeys(("modules_to_save", "alora_invocation_tokens", "layer_replication", "use_dora"))
    adapter = write_peft(tmp_path / "adapter", model, init_lora_weights=name, bias="none", **ignored)
    assert dict(open_adapter(adapter).scales) == {module + ".weight": 2.0 for module in ADAPTED}


OTHER_METHODS: list[dict[str, Any]] = [
    {"use_dora": True},
    {"lora_alpha": "8"},
    {"peft_type": "LOHA"},
    *({"init_lora_weights": name} for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", [])),
    {"bias": "all"},
    {"lora_bias": True},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [1]},
    {"alora_invocation_tokens": [1, 2]},
    {"layer_replication": [[0, 1], [0, 2]]},
    {"use_qalora": True},
    {"use_bdlora": {"nblocks": 2}},
    {"arrow_config": {"top_k": 3}},
    {"kasa_config": {"beta": 1.0}},
    {"monteclora_config": {"num_samples": 8}},
]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *((config, rf"{next(iter(config))}\n +given: .*\n +needed: ") for config in OTHER_METHODS),
        ({"alpha_pattern": ["q_proj"]}, r'alpha_pattern\n +given: \["q_proj"\]\n +needed: a JSON object'),
        ({"rank_pattern": ["q_proj"]}, r'rank_pattern\n +given: \["q_proj"\]\n +needed: a JSON object'),
        ({"alpha_pattern": {"layers.(1": 3}}, r"alpha_pattern\n.*layers\.\(1.*\n +needed: a regular expression"),
        ({"rank_pattern": {"*": 3}}, r'rank_pattern\n +given: "\*": .*\n +needed: a regular expression'),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern, q_proj\n +given: null\n +needed: a number"),
        ({"lora_alpha": float("nan")}, r"lora_alpha\n +given: NaN\n +needed: a number"),
        ({"r": 2}, r"r\n +given: 2\n +needed: 4"),
        ({"r": "4"}, r'r\n +given: "4"\n +needed: 4'),
        ({"rank_pattern": {"down_proj": 8}}, r"r\n +given: 8\n +needed: 4"),
    ],
    ids=str,
)
def test_other_methods_and_what_peft_could_not_read_either_are_refused(
    model: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=rf"adapter_config\.json: {said}.*\n +fix: "):
        merge_lora(model, write_peft(tmp_path / "adapter", model, **config), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("text", ["[]", "{", "\xff"])
def test_a_config_that_is_no_json_object_is_said(model: Path, tmp_path: Path, text: str) -> None:
    adapter = write_peft(tmp_path / "adapter", model)
    (adapter / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"adapter_config\.json\n +given: .*\n +needed: a JSON .*\n +fix: "):
        open_adapter(adapter)


def test_what_is_no_adapter_is_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("garbage")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"adapter_config\.json") as said:
            merge_lora(model, path, tmp_path / "merged")
        assert said.value.exit_code == EXIT_USER_ERROR
