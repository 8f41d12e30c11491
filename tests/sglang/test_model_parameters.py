"""Every rank of an engine holds the parameters that SGLang's own model classes have there: names and shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A config.json for each case."""
    found = []
    for number, (family, changes, _) in enumerate(CASES):
        class_name, own = TINY_FAMILIES[family]
        config = getattr(transformers, class_name)(**(DIMENSIONS | own | changes))
        config.architectures = [class_name.replace("Config", "ForCausalLM")]
        found.append(tmp_path_factory.mktemp("configs") / f"{number}-{family}")
        config.save_pretrained(found[-1])
    return found


def test_every_rank_has_sglangs_parameters(directories: list[Path]) -> None:
    asked = [[str(path), layout] for path, (_, _, layout) in zip(directories, CASES, strict=True)]
    script = Path(__file__).with_name("model_parameters.py")
    answer = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    of_cases = json.loads(answer.stdout.splitlines()[-1])
    for directory, (family, _, sizes), ranks in zip(directories, CASES, of_cases, strict=True):
        arch, layout = read_architecture(directory), EngineLayoutConfig(**sizes)
        for rank, wanted in enumerate(ranks):
            held = sglang.manifest(arch, layout, rank, "float32", "cuda")
            shapes = {name: list(storage.shape) for name, storage in held.storages.items()}
            assert shapes == wanted, (family, sizes, rank)
