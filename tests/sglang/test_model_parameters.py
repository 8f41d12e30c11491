"""Every rank of an engine holds the parameters of SGLang's own model classes, and float8 blocks have the bits of
SGLang's own quantiser. No server of a quantised model runs on CPUs without AMX, which SGLang's kernels for blocks need
there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides import sglang
from tests.tiny_models import DIMENSIONS, TINY_FAMILIES

FIVE_LAYERS = {"num_hidden_layers": 5}
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
]


WHOLE_BLOCKS = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2,
}  # fmt: skip
GROUPED = WHOLE_BLOCKS | {"head_dim": 64, "num_key_value_heads": 4}
ROUTED = GROUPED | {"moe_intermediate_size": 256}
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
        class_name, own = TINY_FAMILIES[family]
        config = getattr(transformers, class_name)(**(DIMENSIONS | own | changes))
        config.architectures = [class_name.replace("Config", "ForCausalLM")]
        config.save_pretrained(root / f"{number}-{family}")
        questions.append((root / f"{number}-{family}", layout, None if number < len(CASES) else "fp8"))
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


def test_every_rank_has_sglangs_parameters(asked: Asked) -> None:
    assert len(asked.cases) == len(CASES) + len(QUANTIZED)
    for directory, layout, quantization, ranks in asked.cases:
        arch = read_architecture(directory)
        assert not sglang.split_problems(arch, layout, "cuda", quantization)
        for rank, wanted in enumerate(ranks):
            held = sglang.manifest(arch, layout, rank, "bfloat16", "cuda", quantization=quantization)
            found = {name: [list(its.shape), its.dtype] for name, its in held.storages.items()}
            assert found == wanted, (directory.name, rank)


def test_blocks_have_the_bits_of_sglangs_quantiser(asked: Asked) -> None:
    assert len(asked.same_bits) == len(matrices())
    assert all(asked.same_bits)
