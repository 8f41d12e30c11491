"""Parts of models that SGLang ignores are refused by their keys in config.json. A plan says how to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from megagrpo.errors import MegagrpoError
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families import architecture_of
from megagrpo.weights.sides.sglang import split_problems
from tests.ling_model import CONFIG
from tests.tiny_models import DIMENSIONS, LIKE, TINY_FAMILIES
from tests.tiny_run import make_run

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = PLAIN | {"rope_type": "linear", "factor": 4.0}
LLAMA3 = PLAIN | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SCALED = YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
WINDOW, TIED = {"sliding_window": 8}, {"tie_word_embeddings": True}
USUAL, OTHER = {"attention_factor": 1.138629436111989}, {"attention_factor": 1.3}


def by_kind(full: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def problems(family: str, changes: dict[str, Any]) -> list[str]:
    class_name, own = TINY_FAMILIES[family]
    config = getattr(transformers, class_name)(**(DIMENSIONS | own | changes)).to_dict()
    config["model_type"] = family if family in LIKE else config["model_type"]
    return [problem.where for problem in split_problems(architecture_of(config), EngineLayoutConfig(), "cuda")]


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("mistral", WINDOW, "sliding_window"),
        ("ministral3", WINDOW | {"rope_parameters": SCALED}, "sliding_window"),
        ("phi3", WINDOW, "sliding_window"),
        ("ministral3", {}, "original_max_position_embeddings"),
        ("ministral3", {"rope_parameters": SCALED | OTHER}, "attention_factor"),
        ("mixtral", {"rope_parameters": LLAMA3}, "rope_scaling"),
        ("mixtral", {"head_dim": 16}, "head_dim"),
        ("olmo2", {"head_dim": 16}, "head_dim"),
        ("olmo3", by_kind(YARN | OTHER, PLAIN), "attention_factor"),
        ("olmo3", by_kind(YARN, YARN), "rope_parameters.sliding_attention"),
        ("exaone4", {"head_dim": 12, "rope_parameters": PLAIN}, "rope_theta"),
        ("gemma2", {}, "tie_word_embeddings"),
        ("gemma2", TIED | {"rope_parameters": LLAMA3}, "rope_scaling"),
        ("gemma2", TIED | {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("gemma3_text", {}, "tie_word_embeddings"),
        ("gemma3_text", TIED | by_kind(PLAIN, LINEAR), "rope_parameters.sliding_attention"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"] * 2}, "mlp_layer_types"),
        ("gpt_oss", {"rope_parameters": YARN | {"truncate": False} | OTHER}, "attention_factor"),
        ("qwen3_moe_mixed", {}, "mlp_only_layers"),
        ("qwen2_moe", {}, "mlp_only_layers"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_5_text", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("dots1", {}, "model_type"),
    ],
)  # fmt: skip
def test_a_part_that_sglangs_class_ignores_is_refused(family: str, changes: dict[str, Any], key: str) -> None:
    assert [where.partition(" on SGLang: ")[2] for where in problems(family, changes)] == [key]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": DIMENSIONS["max_position_embeddings"]}),
        ("ministral3", {"rope_parameters": SCALED | USUAL}),
        ("olmo3", by_kind(YARN | USUAL, PLAIN)),
        ("olmo3", by_kind(PLAIN, PLAIN)),
        ("exaone4", {"head_dim": 12}),
        ("gemma2", TIED),
        ("gemma3_text", TIED | by_kind(LINEAR, PLAIN)),
        ("kimi_k2", {}),
        ("glm4_moe_lite", {}),
        ("qwen2_moe", {"mlp_only_layers": []}),
        *[
            (family, {})
            for family in ("arcee", "deepseek_v3", "glm4", "glm4_moe", "granite", "olmo2", "phi3", "phi3_long")
        ],
        *[(family, {}) for family in ("gpt_oss", "minimax_m2", "qwen3_moe", "qwen3_next", "qwen3_5_text")],
    ],
)
def test_what_sglangs_class_follows_is_not_refused(family: str, changes: dict[str, Any]) -> None:
    assert problems(family, changes) == []


EXPERTS = {"head_dim": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
MINIMAX = EXPERTS | {"model_type": "minimax_m2", "num_local_experts": 4}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MINIMAX, r'scoring_func\n.*absent(?s:.)*write "scoring_func": "sigmoid"(?s:.)*write "use_qk_norm": true'),
        ({"model_type": "olmo3"} | by_kind(YARN, PLAIN), r'write "rope_theta": (?s:.)*; remove rope_parameters'),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window(?s:.)*fix: rollout.engine: transformers"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_plan_names_the_key_and_the_fix(
    config: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megagrpo.rollout.arguments.asked", lambda *asked: {"environment": "", "problems": []})
    recipe = make_run(tmp_path, **config)
    with pytest.raises(MegagrpoError, match=said):
        preflight(load(recipe, ["rollout.engine=sglang"]), plan_only=True)
    preflight(load(recipe, ["rollout.engine=transformers"]), plan_only=True)


def test_a_family_that_transformers_lacks_too_is_not_sent_to_its_engine() -> None:
    for family in ("bailing_moe", "bailing_moe_v2"):
        assert family not in transformers.CONFIG_MAPPING
        (problem,) = split_problems(architecture_of(CONFIG | {"model_type": family}), EngineLayoutConfig(), "cuda")
        assert "no engine samples it" in problem.fix
        assert "rollout.engine" not in problem.fix
