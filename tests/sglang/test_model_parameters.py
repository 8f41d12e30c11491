"""Every rank of an engine holds the parameters of SGLang's own model classes, with the bits that these load from the
same files. Float8 blocks have the bits of SGLang's own quantiser. No server of a quantised model runs on CPUs without
AMX, which SGLang's kernels for blocks need there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.sides import sglang
from megagrpo.weights.transport.sglang import checksum
from megagrpo.weights.views import torch_dtype
from tests.tiny_models import COMPOSITES, TINY_FAMILIES, config_of, make_model

pytestmark = pytest.mark.long
FIVE_LAYERS: dict[str, Any] = {"num_hidden_layers": 5}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
MINISTRAL: dict[str, Any] = {
    "rope_parameters": TINY_FAMILIES["ministral3"][1]["rope_parameters"] | {"original_max_position_embeddings": 16384}
}
CASES: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("llama", FIVE_LAYERS, {"tensor": 4, "pipeline": 3}),
    ("mistral", {}, {"tensor": 2, "pipeline": 2}),
    ("qwen2", FIVE_LAYERS, {"tensor": 2, "pipeline": 3}),
    ("qwen2_tied", {}, {"pipeline": 2}),
    ("qwen3", {}, {"tensor": 4, "attention_data": 2}),
    ("qwen3", {"tie_word_embeddings": True}, {"tensor": 4, "attention_data": 4, "pipeline": 4}),
    ("qwen3_moe", {}, {"tensor": 4, "expert": 2, "attention_data": 2}),
    ("qwen3_moe", FIVE_LAYERS, {"tensor": 4, "expert": 4, "attention_data": 4, "pipeline": 2}),
    ("mixtral", FIVE_LAYERS, {"tensor": 4, "expert": 2, "pipeline": 2}),
    ("deepseek_v3", FIVE_LAYERS, {"tensor": 4, "expert": 2, "attention_data": 2, "pipeline": 2}),
    ("deepseek_v3", {"num_attention_heads": 8, "num_key_value_heads": 8}, {"tensor": 8, "expert": 8}),
    ("deepseek_v3", {"q_lora_rank": None}, {"tensor": 4, "expert": 4, "attention_data": 4, "pipeline": 4}),
    ("arcee", FIVE_LAYERS, {"tensor": 4, "pipeline": 3}),
    ("exaone4", FIVE_LAYERS | {"head_dim": 12}, {"tensor": 4, "pipeline": 3}),
    ("gemma2", TIED, {"tensor": 4}),
    ("gemma3_text", TIED, {"tensor": 4}),
    ("glm4", FIVE_LAYERS, {"tensor": 4, "pipeline": 3}),
    ("glm4_moe", {}, {"tensor": 4, "expert": 2, "attention_data": 2, "pipeline": 2}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}, {"tensor": 4, "expert": 4, "attention_data": 4}),
    ("glm4_moe_lite", {"rms_norm_eps": 1e-6}, {"tensor": 4, "expert": 2, "attention_data": 2, "pipeline": 2}),
    ("gpt_oss", {}, {"tensor": 4, "attention_data": 2, "pipeline": 2}),
    ("gpt_oss", {"num_key_value_heads": 1}, {"tensor": 2}),
    ("granite", TIED, {"tensor": 4}),
    ("kimi_k2", {"rms_norm_eps": 1e-6}, {"tensor": 4, "expert": 2, "attention_data": 2, "pipeline": 2}),
    ("minimax_m2", {}, {"tensor": 4, "expert": 2, "pipeline": 2}),
    ("minimax_m2", {"num_key_value_heads": 4}, {"tensor": 2}),
    ("ministral3", FIVE_LAYERS | MINISTRAL, {"tensor": 4, "pipeline": 3}),
    ("olmo2", {}, {"tensor": 4}),
    ("olmo3", {}, {"tensor": 2}),
    ("phi3", FIVE_LAYERS, {"tensor": 4, "pipeline": 3}),
    ("qwen2_moe", {"mlp_only_layers": []}, {"tensor": 4, "expert": 2, "attention_data": 2, "pipeline": 2}),
    ("qwen3_5", TIED, {"tensor": 2, "pipeline": 2}),
    ("qwen3_5_moe", {}, {"tensor": 4, "expert": 2, "attention_data": 2}),
    ("qwen3_5_text", TIED | {"linear_num_key_heads": 4, "num_key_value_heads": 1}, {"tensor": 4}),
    ("qwen3_5_moe_text", {}, {"tensor": 4, "expert": 4, "attention_data": 2, "pipeline": 2}),
    ("qwen3_next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}, {"tensor": 4, "expert": 2}),
    ("qwen3_next", {"linear_num_key_heads": 4}, {"tensor": 4, "attention_data": 2}),
    ("ernie4_5", TIED, {"tensor": 2}),
    ("seed_oss", {}, {"tensor": 2}),
    ("smollm3", TIED, {"tensor": 2}),
]
INTERVAL = {"full_attention_interval": 4}
LIKE_DEEPSEEK = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "kimi_k2": LIKE_DEEPSEEK | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "minimax_m2": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "qwen3_5_text": INTERVAL,
    "qwen3_5_moe_text": INTERVAL,
    "qwen3_next": INTERVAL,
}
"""Keys of published configs that transformers 5 does not write: SGLang needs them, or would hold blocks as files do."""


WHOLE_BLOCKS = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2,
}  # fmt: skip
GROUPED = WHOLE_BLOCKS | {"head_dim": 64, "num_key_value_heads": 4}
ROUTED = GROUPED | {"moe_intermediate_size": 256}
WEIGHTED = {"hidden_size": 512, "mlp_only_layers": [], "shared_expert_intermediate_size": 256}
LATENT = WHOLE_BLOCKS | {
    "num_key_value_heads": 8, "moe_intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
QUANTIZED: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("llama", GROUPED, {"tensor": 2}),
    ("mistral", GROUPED, {"pipeline": 2}),
    ("qwen2_tied", GROUPED, {"tensor": 2}),
    ("qwen3", GROUPED, {"tensor": 2, "attention_data": 2}),
    ("qwen3_moe", ROUTED, {"tensor": 2}),
    ("qwen3_moe", ROUTED, {"tensor": 2, "expert": 2}),
    ("mixtral", GROUPED | {"hidden_size": 512}, {"tensor": 2}),
    ("deepseek_v3", LATENT, {"tensor": 4, "expert": 4, "attention_data": 2, "pipeline": 2}),
    ("arcee", GROUPED, {"tensor": 2}),
    ("exaone4", GROUPED | {"hidden_size": 512, "layer_types": ["full_attention"] * 2}, {"tensor": 2}),
    ("gemma2", GROUPED | TIED, {"tensor": 2}),
    ("glm4", GROUPED, {"tensor": 2}),
    ("glm4_moe", ROUTED, {"tensor": 2}),
    ("glm4_moe_lite", LATENT | {"rms_norm_eps": 1e-6}, {"tensor": 2}),
    ("granite", GROUPED | {"hidden_size": 512}, {"tensor": 2}),
    ("minimax_m2", GROUPED | {"hidden_size": 512}, {"tensor": 2}),
    ("ministral3", GROUPED | MINISTRAL, {"tensor": 2}),
    ("olmo2", GROUPED | {"hidden_size": 512}, {"tensor": 2}),
    ("phi3", GROUPED | {"hidden_size": 512}, {"tensor": 2}),
    ("qwen2_moe", ROUTED | WEIGHTED, {"tensor": 2}),
]


@dataclass(frozen=True)
class Asked:
    """Answers of SGLang's code: of each case its directory, layout, quantization and parameters by rank; and of each
    matrix, True if the bits of its blocks are the same."""

    cases: list[tuple[Path, EngineLayoutConfig, str | None, list[dict[str, list[Any]]]]]
    same_bits: list[bool]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    root, questions = tmp_path_factory.mktemp("configs"), []
    for number, (family, changes, layout) in enumerate([*CASES, *QUANTIZED]):
        path = root / f"{number}-{family}"
        if number >= len(CASES):
            config = config_of(family, **changes)
            config.architectures = [TINY_FAMILIES[family][0].replace("Config", "ForCausalLM")]
            config.save_pretrained(path)
        else:
            make_model(family, path, **changes)
        keys = {"dtype": "bfloat16", **PUBLISHED.get(family, {})}
        written = json.loads((path / "config.json").read_text()) | keys
        if family in COMPOSITES:
            written["text_config"] |= INTERVAL
        (path / "config.json").write_text(json.dumps(written))
        questions.append((path, layout, None if number < len(CASES) else "fp8"))
    torch.save(matrices(), root / "matrices")
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("model_parameters.py")), str(root / "matrices")],
        input=json.dumps([[str(path), *rest] for path, *rest in questions]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    same_bits, of_cases = json.loads(answer.stdout.splitlines()[-1])
    of_each = zip(questions, of_cases, strict=True)
    return Asked([(path, EngineLayoutConfig(**sizes), fp8, ranks) for (path, sizes, fp8), ranks in of_each], same_bits)


def matrices() -> list[torch.Tensor]:
    """bfloat16: of many magnitudes, with whole and partial blocks, zeros, every finite bfloat16, and 448 exactly."""
    generator = torch.Generator().manual_seed(1)
    found = [
        (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)
        for shape in ((128, 128), (300, 200), (1, 5), (576, 129))
        for scale in (1.0, 0.02, 1e-7, 3e4, 0.0)
    ]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = torch.where(every.isfinite(), every, 0).view(256, 256)
    limits = torch.tensor([448.0, 450.0, 447.0, 3.5, 7.0, 1.75, 1e-4, 9e-5, -448.0]).to(torch.bfloat16)
    return [*found, every, *(torch.eye(3, dtype=torch.bfloat16) * limit for limit in limits)]


def test_every_rank_has_the_parameters_that_sglangs_classes_load(asked: Asked) -> None:
    assert len(asked.cases) == len(CASES) + len(QUANTIZED)
    for directory, layout, quantization, ranks in asked.cases:
        arch = read_architecture(directory)
        assert not sglang.split_problems(arch, layout, "cuda", quantization)
        for rank, wanted in enumerate(ranks):
            held = sglang.manifest(arch, layout, rank, "bfloat16", "cuda", quantization=quantization)
            found = {name: [list(its.outer_shape), its.dtype] for name, its in held.storages.items()}
            assert found == {name: its[:2] for name, its in wanted.items()}, (directory.name, rank)
            if quantization is None:
                tensors = {
                    name: torch.empty(its.shape, dtype=torch_dtype(its.dtype)) for name, its in held.storages.items()
                }
                load_files(directory, held, tensors)
                unlike = [name for name, its in tensors.items() if checksum(its) != wanted[name][2]]
                assert not unlike, (directory.name, rank)


def test_blocks_have_the_bits_of_sglangs_quantiser(asked: Asked) -> None:
    assert len(asked.same_bits) == len(matrices())
    assert all(asked.same_bits)
