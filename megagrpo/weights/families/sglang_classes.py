"""SGLang's model classes (sglang/srt/models, 0.5.23): what differs between them of parameters, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megagrpo.errors import Problem
from megagrpo.weights.families import deepseek_like, gemma, llama_like, olmo
from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class SglangClass:
    """A family's class, where it differs from the other families' classes."""

    attention_groups: bool = False
    """Support of attention data parallelism. A class without it would mix the groups up."""
    stages: bool = True
    """Support of pipeline parallelism."""
    expert_parallel: bool = True
    """Support of whole experts on their own ranks, also in the class's loader."""
    embedding_on_every_stage: bool = False
    """Unused embeddings on the pipeline stages after the first one."""
    head_on_every_stage: bool = False
    """Unused heads on the pipeline stages before the last one."""
    ties: Literal["on stages", "on one stage", "never"] = "on stages"
    """The layouts in which a tied head is the embedding. On the last of several stages it is a copy."""
    embedding: Literal["cut", "whole in groups", "whole"] = "cut"
    """The embedding of a rank: cut by rows; whole with attention data parallelism; or whole, without padding."""
    wide_router: bool = False
    """Routers in float32."""
    by_key_head: bool = False
    """Projections of delta nets that hold the parts of one key head after those of another."""
    cuts_norms: bool = False
    """Norms over all heads of queries and keys cut by heads, in place of whole ones."""
    fuses: bool = True
    """One parameter of queries, keys and values, and one of gate and up. Otherwise each rank has whole key heads."""
    pads: bool = True
    """A loader of MLPs that SGLang pads on CPUs."""
    alternates: bool = False
    """Rows of gate and up of experts that alternate, in place of all rows of gate before those of up."""
    quantizes: bool = True
    """In a quantised model, blocks for the roles in weights/blocks.py, and for no others."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names in published files that are others in the class."""
    attentions: tuple[str, ...] = ("attn",)
    """The attention modules of a layer that get scales of float8 keys and values in a quantised model."""
    least_experts: Literal["one", "tensor", "tensor / expert"] = "one"
    """The parallel sizes that give the least number of experts."""
    windows_cached: float = 1.0
    """The tokens that layers with windows cache, over those of other layers. Most classes free none."""
    refuses: Callable[[Architecture], Iterable[Problem]] = lambda arch: ()
    """Reasons why the class does not serve a model, such as config values that it ignores."""


def _never_compared(arch: Architecture) -> Iterator[Problem]:
    yield Problem(
        f"{arch.family} on SGLang",
        "a family whose parameters were never compared with those of SGLang's class",
        "a family that docs/families.md lists with SGLang",
        "rollout.engine: transformers",
    )


USUAL = SglangClass()
UNCOMPARED = SglangClass(refuses=_never_compared)
TRANSFORMERS = SglangClass(stages=False, fuses=False, pads=False, quantizes=False)
"""SGLang's wrapper of transformers' model, for families without a class of their own."""
ONE_STAGE = SglangClass(stages=False)
LLAMA = SglangClass(head_on_every_stage=True, ties="on one stage")
ARCEE = replace(LLAMA, ties="never", pads=False)
EXAONE4 = replace(LLAMA, refuses=olmo.ignored_by_sglangs_exaone4)
MISTRAL = replace(LLAMA, refuses=llama_like.ignored_by_sglangs_mistral)
MIXTRAL = replace(LLAMA, ties="never", refuses=llama_like.ignored_by_sglangs_mixtral)
GEMMA2 = replace(ONE_STAGE, refuses=gemma.ignored_by_sglang)
GEMMA3 = replace(GEMMA2, embedding="whole")
PHI3 = replace(MISTRAL, pads=False)
GLM4 = SglangClass(ties="on one stage", pads=False)
QWEN3 = SglangClass(attention_groups=True, attentions=())
DEEPSEEK = SglangClass(
    attention_groups=True,
    ties="on one stage",
    attentions=("attn_mqa", "attn_mha"),
    least_experts="tensor",
    refuses=deepseek_like.ignored_by_sglang,
)
QWEN2_MOE = SglangClass(
    attention_groups=True,
    head_on_every_stage=True,
    ties="never",
    least_experts="tensor",
    refuses=llama_like.dense_layers_ignored_by_sglang,
)
QWEN3_MOE = replace(QWEN2_MOE, attentions=(), least_experts="tensor / expert")
GLM4_MOE = replace(QWEN2_MOE, attentions=(), wide_router=True, refuses=lambda arch: ())
GLM4_MOE_LITE = replace(
    GLM4_MOE, attentions=DEEPSEEK.attentions, refuses=deepseek_like.ignored_by_sglangs_glm4_moe_lite
)
MINIMAX_M2 = SglangClass(
    embedding_on_every_stage=True, ties="never", wide_router=True, cuts_norms=True, least_experts="tensor"
)
GPT_OSS = SglangClass(
    attention_groups=True,
    expert_parallel=False,
    head_on_every_stage=True,
    ties="never",
    alternates=True,
    windows_cached=0.8,
    quantizes=False,
)
QWEN3_NEXT = SglangClass(
    stages=False,
    ties="never",
    attention_groups=True,
    by_key_head=True,
    quantizes=False,
    renamed=((".self_attn.", "."),),
    refuses=llama_like.dense_layers_ignored_by_sglang,
)
QWEN3_5 = SglangClass(
    attention_groups=True,
    embedding="whole in groups",
    quantizes=False,
    renamed=((".self_attn.", "."), ("model.language_model.", "model.")),
)
QWEN3_5_TEXT = replace(QWEN3_5, ties="on one stage")
