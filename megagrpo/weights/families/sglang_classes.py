"""SGLang's model classes (sglang/srt/models, 0.5.23): what differs between them of parameters, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megagrpo.errors import Problem, brief
from megagrpo.weights.families import sglang_gaps as gaps
from megagrpo.weights.families.sglang_gaps import Gap


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
    """The rows of a rank: those of its cut; all with attention data parallelism; or all, without padding."""
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
    on_cpus: bool = True
    """Support of CPUs, with torch's own attention."""
    gaps: tuple[Gap, ...] = ()
    """Parts of models that it does not follow."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys that config.json needs for it, and what to write."""
    unread: tuple[str, ...] = ()
    """Keys that config.json may not have, since it reads `keys` in their place only if they are absent."""


def key_problems(
    where: str, config: Mapping[str, Any], of_class: SglangClass, engine: str = "SGLang"
) -> Iterator[Problem]:
    """Yields a problem for each key that config.json lacks, or has in vain. The engine ends with an error, or takes a
    default. transformers 5 writes rope_parameters, and leaves other keys out of new models."""
    write = {key: f'write "{key}": {value}' for key, value in of_class.keys.items()}
    for key in of_class.unread:
        if config.get(key) is not None:
            needed = f"absent: with it {engine} takes defaults for {', '.join(write)}"
            yield Problem(f"{where}: {key}", brief(config[key]), needed, f"{'; '.join(write.values())}; remove {key}")
    for key, fix in write.items():
        if key not in config:
            yield Problem(f"{where}: {key}", "absent", f"a key that {engine} reads", fix)


USUAL = SglangClass()
UNCOMPARED = SglangClass(gaps=(gaps.NO_CLASS,))
NEEDS_CODE = SglangClass(gaps=(gaps.CODE,))
NO_ENGINE = SglangClass(gaps=(gaps.NO_ENGINE,))
HOLDS_TOWER = SglangClass(gaps=(gaps.TOWER,))
ERNIE4_5_MOE = SglangClass(gaps=(gaps.CHOICE,))
TRANSFORMERS = SglangClass(stages=False, fuses=False, pads=False, quantizes=False)
"""SGLang's wrapper of transformers' model, for families without a class of their own."""
ONE_STAGE = SglangClass(stages=False)
LLAMA = SglangClass(head_on_every_stage=True, ties="on one stage")
ARCEE = replace(LLAMA, ties="never", pads=False)
EXAONE4 = replace(LLAMA, on_cpus=False, gaps=(gaps.HEAD_DIM, gaps.MILLION), keys=gaps.PATTERN)
MISTRAL = replace(LLAMA, gaps=(gaps.WINDOW,))
PHI3 = replace(MISTRAL, pads=False)
MINISTRAL3 = replace(LLAMA, gaps=(gaps.WINDOW, gaps.MAGNITUDE, gaps.TEMPERATURE))
MIXTRAL = replace(LLAMA, ties="never", gaps=(gaps.SCALING, gaps.HEAD_DIM))
GEMMA2 = replace(ONE_STAGE, on_cpus=False, gaps=(gaps.OWN_HEAD, gaps.SCALING, gaps.EVEN_WINDOWS), keys=gaps.ACTIVATION)
GEMMA3 = replace(ONE_STAGE, embedding="whole", gaps=(gaps.OWN_HEAD, gaps.LOCAL_SCALING))
OLMO2 = replace(ONE_STAGE, gaps=(gaps.HEAD_DIM,))
OLMO3 = replace(
    OLMO2, gaps=(gaps.HEAD_DIM, gaps.MAGNITUDE, gaps.LOCAL_SCALING), keys=gaps.ROPE_THETA, unread=("rope_parameters",)
)
GLM4 = SglangClass(ties="on one stage", pads=False)
QWEN3 = SglangClass(attention_groups=True, attentions=())
DEEPSEEK = SglangClass(
    attention_groups=True,
    ties="on one stage",
    attentions=("attn_mqa", "attn_mha"),
    least_experts="tensor",
    keys=gaps.DEEPSEEKS_ROUTER,
)
QWEN2_MOE = SglangClass(
    attention_groups=True,
    head_on_every_stage=True,
    ties="never",
    least_experts="tensor",
    on_cpus=False,
    gaps=(gaps.DENSE,),
)
QWEN3_MOE = replace(QWEN2_MOE, on_cpus=True, attentions=(), least_experts="tensor / expert")
GLM4_MOE = replace(QWEN3_MOE, wide_router=True, least_experts="tensor", gaps=())
GLM4_MOE_LITE = replace(
    GLM4_MOE, attentions=DEEPSEEK.attentions, gaps=(gaps.QUERY_RANK, gaps.DENSE_BEHIND), keys=gaps.FIRST_DENSE
)
MINIMAX_M2 = SglangClass(
    embedding_on_every_stage=True,
    ties="never",
    wide_router=True,
    cuts_norms=True,
    least_experts="tensor",
    on_cpus=False,
    keys=gaps.MINIMAX,
)
GPT_OSS = SglangClass(
    attention_groups=True,
    expert_parallel=False,
    head_on_every_stage=True,
    ties="never",
    alternates=True,
    quantizes=False,
    windows_cached=0.8,
    on_cpus=False,
    gaps=(gaps.MAGNITUDE,),
)
QWEN3_NEXT = SglangClass(
    stages=False,
    ties="never",
    attention_groups=True,
    by_key_head=True,
    quantizes=False,
    renamed=((".self_attn.", "."),),
    on_cpus=False,
    gaps=(gaps.DENSE,),
    keys=gaps.ROPE_THETA | gaps.INTERVAL,
    unread=("rope_parameters",),
)
QWEN3_5 = SglangClass(
    attention_groups=True,
    embedding="whole in groups",
    quantizes=False,
    renamed=((".self_attn.", "."), ("model.language_model.", "model.")),
    on_cpus=False,
    gaps=(gaps.QUARTER,),
    keys=gaps.INTERVAL,
)
QWEN3_5_TEXT = replace(QWEN3_5, ties="on one stage")
