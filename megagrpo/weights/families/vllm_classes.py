"""vLLM's model classes (vllm/model_executor/models, 0.32.0): what differs between them of parameters, what they do not
follow of a model, and keys that they need. All were compared on CPUs with transformers (tests/vllm).

They are told in the terms of SGLang's classes: the two engines name and cut most parameters alike.
"""

from __future__ import annotations

from dataclasses import replace

from megagrpo.weights.families import sglang_gaps as gaps
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.attention import Attention
from megagrpo.weights.families.sglang_classes import SglangClass
from megagrpo.weights.families.sglang_gaps import Gap

OTHER_ENGINES = "rollout.engine: sglang or transformers"


def _temperature(arch: Architecture) -> object:
    found = (its.attention.temperature for its in arch.kinds if isinstance(its.attention, Attention))
    return next((its.positions for its in found if its and its.positions < arch.max_positions), None)


TEMPERATURE = Gap(
    "original_max_position_embeddings",
    "max_position_embeddings or more, so that queries do not grow: vLLM reads their factor from another key",
    _temperature,
    OTHER_ENGINES,
)
OWN_HEAD = replace(gaps.OWN_HEAD, needed="true: vLLM loads no other head here", fix=OTHER_ENGINES)

RENAMED = (
    (".experts.w", ".experts.routed_experts.w"),
    ("_weight_bias", "_bias"),
    ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj"),
)
"""Parts of parameters' names in SGLang, and vLLM's."""
USUAL = SglangClass(renamed=RENAMED)
DEEPSEEK = replace(USUAL, ties="never", keys=gaps.DEEPSEEKS_ROUTER)

CLASSES: dict[str, SglangClass] = {
    "arcee": USUAL,
    "deepseek_v3": DEEPSEEK,
    "ernie4_5": USUAL,
    "exaone4": USUAL,
    "gemma2": replace(USUAL, gaps=(OWN_HEAD,)),
    "gemma3_text": USUAL,
    "glm4": USUAL,
    "glm4_moe": replace(USUAL, ties="never", wide_router=True),
    "gpt_oss": replace(
        USUAL,
        ties="never",
        alternates=True,
        renamed=(*RENAMED, ("model.embed_tokens.", "model.embedding."), (".self_attn.", ".attn.")),
    ),
    "granite": USUAL,
    "kimi_k2": DEEPSEEK,
    "llama": USUAL,
    "ministral3": replace(USUAL, gaps=(TEMPERATURE,)),
    "mistral": USUAL,
    "mixtral": USUAL,
    "olmo2": USUAL,
    "olmo3": USUAL,
    "phi3": USUAL,
    "qwen2": USUAL,
    "qwen2_moe": USUAL,
    "qwen3": USUAL,
    "qwen3_moe": USUAL,
    "seed_oss": USUAL,
    "smollm3": USUAL,
}
"""By family."""

_TOWER = "a vision tower: its composite class was not compared"
_CODE = "a config.json that it cannot read without the model's own code, which is never run"
_DELTA = "gated delta nets: it packs their convolutions on CPUs, and was not compared on GPUs"
_ROUTER = "routers with a bias but without groups, which it lacks on CPUs; it was not compared on GPUs"
REFUSED = {
    "bailing_moe": _CODE,
    "bailing_moe_v2": _CODE,
    "dots1": "routers whose bias it rounds to the model's dtype",
    "ernie4_5_moe": _ROUTER,
    "gemma3": _TOWER,
    "glm4_moe_lite": "latents with a plain rotary embedding, wrong on CPUs; it was not compared on GPUs",
    "mimo": _CODE,
    "minimax_m2": _ROUTER,
    "mistral3": _TOWER,
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
}
"""The reasons why vLLM does not sample other families."""
