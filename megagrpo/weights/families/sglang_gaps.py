"""Parts of models that SGLang's classes (0.5.23) ignore, or compute otherwise than transformers, and keys that they
need. SGLang itself says nothing of most of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from megagrpo.errors import Problem
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.attention import Attention, Rope
from megagrpo.weights.families.parts.latent_attention import LatentAttention

INSTEAD = "rollout.engine: transformers"


@dataclass(frozen=True)
class Gap:
    """A key or a part with values that a class does not follow. `given` returns such a value, or None."""

    key: str
    needed: str
    given: Callable[[Architecture], object]
    fix: str = INSTEAD


def gap_problems(
    arch: Architecture, gaps: Iterable[Gap], engine: str = "SGLang", fix: str | None = None
) -> Iterator[Problem]:
    """Yields a problem for each gap that the model meets. fix: in place of each gap's own."""
    for gap in gaps:
        if (given := gap.given(arch)) is not None:
            yield Problem(f"{arch.family} on {engine}: {gap.key}", str(given), gap.needed, fix or gap.fix)


def of_attention(given: Callable[[Architecture, Attention], object]) -> Callable[[Architecture], object]:
    """Returns a function that gives the first value, not None, of some layer's attention by query groups."""

    def of_model(arch: Architecture) -> object:
        found = (given(arch, its.attention) for its in arch.kinds if isinstance(its.attention, Attention))
        return next((value for value in found if value is not None), None)

    return of_model


def of_rope(given: Callable[[Rope], object], *, local: bool = False) -> Callable[[Architecture], object]:
    """Returns the same of some layer's rotary embedding, or of one in a layer with a window."""
    return of_attention(lambda arch, its: given(its.rope) if its.rope and (its.window or not local) else None)


def _scaling(rope: Rope) -> str | None:
    kinds = {"llama3": rope.factor, "yarn": rope.yarn, "longrope": rope.long, "linear": rope.linear != 1 or None}
    return next((name for name, value in kinds.items() if value is not None), None)


def own_magnitude(rope: Rope) -> float | None:
    """Returns yarn's attention_factor if it is not the usual one."""
    if (yarn := rope.yarn) is None or yarn.magnitude is None:
        return None
    return None if math.isclose(yarn.magnitude, 1 + 0.1 * math.log(yarn.factor), rel_tol=1e-6) else yarn.magnitude


def _odd_windows(arch: Architecture) -> object:
    local = [isinstance(its.attention, Attention) and its.attention.window is not None for its in arch.layers]
    return None if local == [layer % 2 == 0 for layer in range(len(local))] else "other layers with windows"


def _some_dense(arch: Architecture) -> object:
    return "MLPs in some layers" if any(not its.mlp.experts for its in arch.kinds) else None


def _not_first_dense(arch: Architecture) -> object:
    dense = [not its.mlp.experts for its in arch.layers]
    return None if dense == sorted(dense, reverse=True) else "MLPs behind experts"


def _without_query_rank(arch: Architecture) -> object:
    ranks = [its.attention.query_rank for its in arch.kinds if isinstance(its.attention, LatentAttention)]
    return "null" if None in ranks else None


NO_CLASS = Gap(
    "model_type",
    "a family that docs/families.md lists with SGLang",
    lambda arch: "a family without a class of SGLang, or never compared with it",
)
CODE = Gap(
    "model_type", "one that SGLang can read without the model's own code, which is never run", lambda arch: arch.family
)
NO_ENGINE = replace(CODE, fix="another model: transformers lacks this one too, so no engine samples it")
TOWER = Gap("vision_config", "a class that SGLang builds without its vision tower", lambda arch: "a vision tower")
CHOICE = Gap(
    "e_score_correction_bias",
    "no bias of the choice of experts: on GPUs SGLang ignores it beside softmax scores",
    lambda arch: "a bias in every router",
)
WINDOW = Gap(
    "sliding_window",
    "null, or max_position_embeddings at least: SGLang ignores windows here",
    of_attention(lambda arch, its: its.window if its.window and its.window < arch.max_positions else None),
)
EVEN_WINDOWS = Gap("layer_types", "windows in every other layer from the first one on", _odd_windows)
HEAD_DIM = Gap(
    "head_dim",
    "hidden_size / num_attention_heads",
    of_attention(lambda arch, its: its.head_dim if its.queries != arch.hidden else None),
)
SCALING = Gap("rope_scaling", "a rotary embedding without scaling, which SGLang ignores here", of_rope(_scaling))
LOCAL_SCALING = Gap(
    "rope_parameters.sliding_attention",
    "no scaling in layers with windows: SGLang ignores it",
    of_rope(_scaling, local=True),
)
MAGNITUDE = Gap("attention_factor", "absent, or 1 + 0.1 ln(factor): SGLang reads no other", of_rope(own_magnitude))
QUARTER = Gap(
    "partial_rotary_factor",
    "0.25, which SGLang takes whatever rope_parameters says",
    of_rope(lambda rope: rope.part if rope.part != 0.25 else None),
)
MILLION = Gap(
    "rope_theta",
    "1000000, which SGLang takes in any case",
    of_rope(lambda rope: rope.theta if rope.theta != 1e6 else None),
)
TEMPERATURE = Gap(
    "original_max_position_embeddings",
    "16384, by which SGLang scales queries in any case",
    of_attention(
        lambda arch, its: its.temperature.positions if its.temperature and its.temperature.positions != 16384 else None
    ),
)
OWN_HEAD = Gap(
    "tie_word_embeddings",
    "true: SGLang loads no other head here",
    lambda arch: None if arch.tied_embeddings else "a head of its own",
)
DENSE = Gap("mlp_only_layers", "[], with decoder_sparse_step: 1: SGLang has experts in all layers", _some_dense)
DENSE_BEHIND = Gap("mlp_layer_types", "only the first layers dense, as first_k_dense_replace says", _not_first_dense)
QUERY_RANK = Gap("q_lora_rank", "a size: SGLang does not load q_proj here", _without_query_rank)


# --- config.json ------------------------------------------------------------------------------------------------------

ROPE_THETA = {"rope_theta": "its value, and rope_scaling if there is one, as transformers 4 writes them"}
INTERVAL = {"full_attention_interval": "the layers from one with attention to the next one, such as 4"}
FIRST_DENSE = {"first_k_dense_replace": "the number of first layers without experts"}
PATTERN = {
    "sliding_window_pattern": '"LLLG", with an L for each layer with a window, or null beside a null sliding_window'
}
ACTIVATION = {"hidden_act": '"gelu_pytorch_tanh"'}
DEEPSEEKS_ROUTER = {"moe_layer_freq": "1", "topk_method": '"noaux_tc"', "scoring_func": '"sigmoid"'}
MINIMAX = {
    "scoring_func": '"sigmoid"',
    "use_qk_norm": "true",
    "use_routing_bias": "true",
    "rotary_dim": "the elements of a head that are rotated",
}
