"""vLLM's model classes (vllm/model_executor/models, 0.32.0): what differs between them of parameters, what they do not
follow of a model, and keys that they need. All were compared on CPUs with transformers (tests/vllm).

They are told in the terms of SGLang's classes: the two engines name and cut most parameters alike.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megagrpo.weights.families import sglang_gaps as gaps
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.attention import Attention, Rope
from megagrpo.weights.families.parts.experts import Experts
from megagrpo.weights.families.sglang_classes import SglangClass
from megagrpo.weights.families.sglang_gaps import Gap

OTHER_ENGINES = "rollout.engine: sglang or transformers"


def _temperature(arch: Architecture) -> object:
    found = (its.attention.temperature for its in arch.kinds if isinstance(its.attention, Attention))
    return next((its.positions for its in found if its and its.positions < arch.max_positions), None)


def _long_factor(arch: Architecture) -> object:
    longs = [long for its in arch.kinds if (rope := its.attention.rope) and (long := rope.long)]
    others = (
        long.factor for long in longs if not _close(long.factor, arch.max_positions / long.original_max_positions)
    )
    return next(others, None)


def _own_magnitude(rope: Rope) -> object:
    """Returns what makes yarn's magnitude another than the usual one."""
    unread = rope.yarn.mscale_all_dim if rope.yarn and rope.yarn.magnitude is None else None
    return gaps.own_magnitude(rope) or unread or None


def _close(given: float, wanted: float) -> bool:
    return math.isclose(given, wanted, rel_tol=1e-6)


def _never_rotates(arch: Architecture) -> object:
    return "no window, and no rotary embedding" if all(its.attention.rope is None for its in arch.kinds) else None


def _clamp(arch: Architecture) -> object:
    found = (its.mlp.clamp for its in arch.kinds if isinstance(its.mlp, Experts))
    return next((clamp for clamp in found if clamp != 7.0), None)


TEMPERATURE = Gap(
    "original_max_position_embeddings",
    "max_position_embeddings or more, so that queries do not grow: vLLM reads their factor from another key",
    _temperature,
)
OWN_HEAD = replace(gaps.OWN_HEAD, needed="true: vLLM loads no other head here")
BIAS = Gap("qkv_bias", "true: vLLM has biases here", gaps.of_attention(lambda arch, its: None if its.bias else "false"))
LONG_FACTOR = Gap(
    "rope_scaling.factor",
    "absent, or max_position_embeddings / original_max_position_embeddings: vLLM reads no other",
    _long_factor,
)
NEVER_ROTATES = Gap(
    "layer_types",
    "a layer with a window, or sliding_window: null. vLLM rotates all layers if none has a window",
    _never_rotates,
)
OF_GPT_OSS = (
    gaps.EVEN_WINDOWS,
    Gap("rope_type", "yarn: vLLM has no other here", gaps.of_rope(lambda its: None if its.yarn else "no scaling")),
    Gap(
        "attention_factor or mscale_all_dim",
        "absent, or an attention_factor of 1 + 0.1 ln(factor): vLLM reads neither here",
        gaps.of_rope(_own_magnitude),
    ),
    Gap(
        "rms_norm_eps",
        "1e-05, which vLLM takes in any case",
        lambda arch: None if _close(arch.norm_epsilon, 1e-5) else arch.norm_epsilon,
    ),
    Gap("swiglu_limit", "7, which vLLM takes in any case", _clamp),
)

RENAMED = (
    (".experts.w", ".experts.routed_experts.w"),
    ("_weight_bias", "_bias"),
    ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj"),
)
"""Parts of parameters' names in SGLang, and vLLM's."""
USUAL = SglangClass(renamed=RENAMED)
ROUTER = {key: gaps.DEEPSEEKS_ROUTER[key] for key in ("topk_method", "scoring_func")}
DEEPSEEK = replace(USUAL, ties="never", keys=ROUTER)

CLASSES: dict[str, SglangClass] = {
    "arcee": USUAL,
    "deepseek_v3": DEEPSEEK,
    "ernie4_5": USUAL,
    "exaone4": replace(USUAL, gaps=(NEVER_ROTATES,)),
    "gemma2": replace(USUAL, gaps=(OWN_HEAD,)),
    "gemma3_text": USUAL,
    "glm4": USUAL,
    "glm4_moe": replace(USUAL, ties="never", wide_router=True),
    "gpt_oss": replace(
        USUAL,
        ties="never",
        alternates=True,
        gaps=OF_GPT_OSS,
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
    "phi3": replace(USUAL, gaps=(LONG_FACTOR,)),
    "qwen2": replace(USUAL, gaps=(gaps.HEAD_DIM,)),
    "qwen2_moe": replace(USUAL, gaps=(gaps.HEAD_DIM, BIAS)),
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
