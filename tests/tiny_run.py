"""Everything a recipe names, made in a blink: a model of zeros, its tokenizer, prompts and the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from megagrpo.recipe.load import Places, apply_overrides
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import architecture_of, tensors_of

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 31,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}


def make_run(directory: Path, **config: Any) -> Path:
    """Write model/, train.jsonl and recipe.yaml into `directory`; return the recipe. `config` changes config.json."""
    make_model(directory / "model", **config)
    (directory / "train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(directory), sort_keys=False))
    return path


def recipe(directory: Path) -> dict[str, Any]:
    """Only what has no default, as plain values."""
    return {
        "name": "tiny",
        "model": {"path": str(directory / "model")},
        "data": {"train": [{"path": str(directory / "train.jsonl")}], "prompt_tokens_max": 16},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "response_tokens_max": 16},
        "reward": {"functions": [{"function": "gsm8k"}]},
        "train": {"layout": {"tensor": 1}, "total_steps": 2, "tokens_per_microbatch": 64},
        "track": {"directory": str(directory / "runs")},
    }


def recipe_with(*overrides: str) -> Recipe:
    """The same with overrides. It may break rules."""
    tree, _, problems = apply_overrides(recipe(Path("tiny")), Places("recipe.yaml"), overrides)
    assert not problems
    return Recipe.model_validate(tree)


def tracked_recipe(directory: Path, **track: Any) -> Recipe:
    """A recipe of a run in directory/runs/adder, with fields of its track section. Nothing in it has to exist."""
    tracked = {"directory": str(directory / "runs"), "console": "off", "mlflow": None} | track
    return Recipe.model_validate(recipe(directory) | {"name": "adder", "track": tracked})


def make_model(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    whole = CONFIG | config
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = tensors_of(architecture_of(whole))
    save_file({t.name: np.zeros(t.shape, np.float32) for t in tensors}, directory / "model.safetensors")
    letters = {letter: number for number, letter in enumerate("0123456789+=# abcdefghij")}
    Tokenizer(models.WordLevel(letters, unk_token=" ")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return directory
