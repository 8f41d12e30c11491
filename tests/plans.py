"""Recipes of published models on imagined machines, and their plans; no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from megagrpo.plan.case import GPUS, Machines
from megagrpo.plan.parameters import known_models
from megagrpo.plan.plan import Plan, plan_of
from megagrpo.plan.search import Search, search
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.schema.teachers import RanksTeacherConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
QWEN_8B, QWEN_30B, QWEN_32B, QWEN_235B = (f"Qwen/Qwen3-{size}" for size in ("8B", "30B-A3B", "32B", "235B-A22B"))
QWEN_HALF_B, DEEPSEEK = "Qwen/Qwen2.5-0.5B-Instruct", "deepseek-ai/DeepSeek-V3"
H100 = Machines(GPUS["H100"], 8, 50e9)

BASE: dict[str, Any] = {
    "name": "planned",
    "model": {"path": LLAMA_70B},
    "data": {"train": [{"path": "data/train.parquet"}], "prompt_tokens_max": 1024},
    "rollout": {
        "engine": "sglang",
        "engines": 16,
        "layout": {"tensor": 8},
        "sglang": {"mem_fraction_static": 0.7, "enable_memory_saver": True},
        "prompts_per_step": 256,
        "samples_per_prompt": 8,
        "response_tokens_max": 4096,
        "timeout_seconds": 3600,
    },
    "reward": {"functions": [{"function": "gsm8k"}]},
    "train": {
        "layout": {"tensor": 8, "pipeline": 2, "data": 8},
        "total_steps": 500,
        "tokens_per_microbatch": 5120,
        "recompute": {"modules": ["mlp"]},
        "offload": ["gradients", "optimizer"],
    },
    "cluster": {"device": "cuda", "gpu": "H100", "gpus_per_node": 8},
}
"""Llama-3.1-70B on 16 nodes of 8 H100; it fits, and nothing in it is unwise."""

ON_2048: dict[str, Any] = {
    "model.path": DEEPSEEK,
    "cluster.gpu": "B200",
    "rollout.engines": 128,
    "rollout.layout": {"tensor": 16, "expert": 16},
    "rollout.prompts_per_step": 1024,
    "train.layout": {
        "tensor": 8, "pipeline": 16, "last_stage_layers": 1, "expert": 32, "expert_tensor": 1, "data": 16,
    },
    "cluster.gpus_per_node": 16,
}  # fmt: skip
"""DeepSeek-V3 on 2,048 GPUs."""


def recipe(values: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> Recipe:
    """BASE with values by their dotted paths, which keys of `more` have with two underscores for a dot; None removes
    a key."""
    tree = deepcopy(BASE)
    for path, value in {**values, **more}.items():
        *above, last = path.replace("__", ".").split(".")
        section = tree
        for key in above:
            section = section.setdefault(key, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return Recipe.model_validate(tree)


def merged(layout: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    """A recipe of 128 prompts x 8 responses of up to 8,192 tokens, sections merged into it; of no model."""
    whole: dict[str, Any] = {
        "name": "memory",
        "model": {"path": "unused"},
        "data": {"train": [{"path": "unused"}], "prompt_tokens_max": 1024},
        "rollout": {
            "engine": "sglang",
            "prompts_per_step": 128,
            "samples_per_prompt": 8,
            "response_tokens_max": 7168,
        },
        "reward": {"functions": [{"function": "gsm8k"}]},
        "train": {"total_steps": 1, "layout": layout or {}},
    }
    for name, section in sections.items():
        whole[name] = whole.get(name, {}) | section
    return Recipe.model_validate(whole)


def sft_recipe(examples: int = 64, **train: Any) -> SftRecipe:
    """Supervised fine-tuning on examples of up to 4,096 tokens, of no model."""
    return SftRecipe.model_validate(
        {
            "kind": "sft",
            "name": "planned",
            "model": {"path": "unused"},
            "data": {"train": [{"path": "unused"}], "examples_per_step": examples},
            "train": {"total_epochs": 1} | train,
        }
    )


@lru_cache
def known_model(name: str) -> Architecture:
    return read_architecture(known_models()[name])


def architecture(of: AnyRecipe) -> Architecture:
    return known_model(of.model.path)


def plan(values: Mapping[str, Any] = MappingProxyType({}), *, given: Sequence[str] = (), **more: Any) -> Plan:
    """The plan of a `recipe`, of which a test may look at what it wants."""
    return planned(recipe(values, **more), given)


def planned(of: Recipe, given: Sequence[str] = (), critic: Architecture | None = None) -> Plan:
    on_ranks = {name: one for name, one in of.teachers.items() if isinstance(one, RanksTeacherConfig)}
    teachers = {name: known_model(one.path) for name, one in on_ranks.items()}
    return plan_of(of, architecture(of), given=given, critic=critic, teachers=teachers)


def searched(of: Recipe, gpus: int) -> Search:
    """A search with the assumed values, made once: it takes a second."""
    return _searched(of.model_dump_json(), gpus)


@lru_cache
def _searched(recipe_json: str, gpus: int) -> Search:
    return search(planned(Recipe.model_validate_json(recipe_json)), gpus)
