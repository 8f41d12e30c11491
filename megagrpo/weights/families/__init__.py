"""The supported models. A family defines once what its config.json means and which tensors its checkpoints hold.

To add a family: write a function from the config to an Architecture in a file of this folder, and add a row to
FAMILIES. docs/families.md describes both, and what a new part of a layer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.families import (
    composite,
    deepseek_like,
    ernie,
    fused,
    gemma,
    gpt_oss,
    llama_like,
    olmo,
    qwen_next,
    sglang_classes,
)
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.part import LayerTensors, Tensor
from megagrpo.weights.families.reading import read_json
from megagrpo.weights.families.sglang_classes import SglangClass

if TYPE_CHECKING:
    from megagrpo.weights.sides.assembly import ManifestBuilder


@dataclass(frozen=True)
class Family:
    """A family: a reader of its config.json (as a dict), names in its checkpoints, and SGLang's class."""

    architecture_of: Callable[[Mapping[str, Any]], Architecture]
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of the names of Architecture.tensors that are others in published files, on all sides."""
    in_transformers: tuple[tuple[str, str], ...] = ()
    """Parts of names in published files that are others in a model that transformers has loaded."""
    known_as: str | None = None
    """The model_type by which transformers loads the files, if it does not know the family's own."""
    fuse: Callable[[ManifestBuilder, Layer, LayerTensors], None] = lambda *_: None
    """Adds the tensors of a layer's files that hold several of its tensors (sides/assembly.py)."""
    stacks: bool = False
    """`fuse` adds all experts of a layer, and transformers loads them so."""
    mxfp4: bool = False
    """Published files have stacked experts in MXFP4: their last axis but one in blocks (files/loading.py)."""
    carried: str = r"mtp\..*"
    """The pattern of names of tensors that are not trained: they are copied from the model's files to exports."""
    sglang: SglangClass = sglang_classes.USUAL


LING = Family(
    deepseek_like.ling, deepseek_like.LINGS_NAMES, fuse=fused.query_key_value, sglang=sglang_classes.NO_ENGINE
)
FAMILIES: dict[str, Family] = {
    "arcee": Family(llama_like.arcee, sglang=sglang_classes.ARCEE),
    "bailing_moe": LING,
    "bailing_moe_v2": LING,
    "deepseek_v3": Family(deepseek_like.deepseek_v3, sglang=sglang_classes.DEEPSEEK),
    "dots1": Family(deepseek_like.dots1, sglang=sglang_classes.UNCOMPARED),
    "ernie4_5": Family(llama_like.ernie4_5, sglang=sglang_classes.TRANSFORMERS),
    "ernie4_5_moe": Family(
        ernie.ernie4_5_moe,
        ernie.NAMES,
        ernie.LOADED,
        fuse=ernie.bias_as_row,
        carried=r"model\.mtp_.*",
        sglang=sglang_classes.ERNIE4_5_MOE,
    ),
    "exaone4": Family(olmo.exaone4, olmo.NAMES, sglang=sglang_classes.EXAONE4),
    "gemma2": Family(gemma.gemma2, gemma.NAMES, sglang=sglang_classes.GEMMA2),
    "gemma3": Family(
        composite.text_of(gemma3_text=gemma.gemma3),
        gemma.NAMES + composite.NAMES,
        composite.LOADED,
        carried=composite.TOWER,
        sglang=sglang_classes.HOLDS_TOWER,
    ),
    "gemma3_text": Family(gemma.gemma3, gemma.NAMES, sglang=sglang_classes.GEMMA3),
    "glm4": Family(llama_like.glm4, llama_like.GLM4_NAMES, fuse=fused.gate_and_up, sglang=sglang_classes.GLM4),
    "glm4_moe": Family(deepseek_like.glm4_moe, sglang=sglang_classes.GLM4_MOE),
    "glm4_moe_lite": Family(deepseek_like.glm4_moe_lite, sglang=sglang_classes.GLM4_MOE_LITE),
    "gpt_oss": Family(
        gpt_oss.gpt_oss,
        gpt_oss.NAMES,
        fuse=gpt_oss.alternating_and_transposed,
        stacks=True,
        mxfp4=True,
        sglang=sglang_classes.GPT_OSS,
    ),
    "granite": Family(llama_like.granite, sglang=sglang_classes.ONE_STAGE),
    "kimi_k2": Family(deepseek_like.deepseek_v3, known_as="deepseek_v3", sglang=sglang_classes.DEEPSEEK),
    "llama": Family(llama_like.llama, sglang=sglang_classes.LLAMA),
    "mimo": Family(
        llama_like.mimo, known_as="qwen2", carried=r"model\.mtp_layers\..*", sglang=sglang_classes.NEEDS_CODE
    ),
    "minimax_m2": Family(
        deepseek_like.minimax_m2,
        deepseek_like.MINIMAX_NAMES,
        in_transformers=((".block_sparse_moe.", ".mlp."),),
        sglang=sglang_classes.MINIMAX_M2,
    ),
    "ministral3": Family(llama_like.ministral3, sglang=sglang_classes.MINISTRAL3),
    "mistral": Family(llama_like.mistral, sglang=sglang_classes.MISTRAL),
    "mistral3": Family(
        composite.text_of(mistral=llama_like.mistral, ministral3=llama_like.ministral3),
        composite.NAMES,
        composite.LOADED,
        carried=composite.TOWER,
        sglang=sglang_classes.HOLDS_TOWER,
    ),
    "mixtral": Family(
        llama_like.mixtral,
        llama_like.MIXTRAL_NAMES,
        in_transformers=((".block_sparse_moe.", ".mlp."),),
        sglang=sglang_classes.MIXTRAL,
    ),
    "olmo2": Family(olmo.olmo2, olmo.NAMES, sglang=sglang_classes.OLMO2),
    "olmo3": Family(olmo.olmo3, olmo.NAMES, sglang=sglang_classes.OLMO3),
    "phi3": Family(llama_like.phi3, fuse=fused.everything, sglang=sglang_classes.PHI3),
    "qwen2": Family(llama_like.qwen2),
    "qwen2_moe": Family(llama_like.qwen2_moe, llama_like.SHARED_EXPERT_NAMES, sglang=sglang_classes.QWEN2_MOE),
    "qwen3": Family(llama_like.qwen3, sglang=sglang_classes.QWEN3),
    "qwen3_5": Family(
        composite.text_of(qwen3_5_text=qwen_next.qwen3_5),
        composite.QWEN_NAMES,
        composite.QWEN_LOADED,
        fuse=qwen_next.fused_whole,
        carried=composite.QWEN_TOWER,
        sglang=sglang_classes.QWEN3_5,
    ),
    "qwen3_5_moe": Family(
        composite.text_of(qwen3_5_moe_text=qwen_next.qwen3_5_moe),
        llama_like.SHARED_EXPERT_NAMES + composite.QWEN_NAMES,
        composite.QWEN_LOADED,
        fuse=qwen_next.fused_whole,
        carried=composite.QWEN_TOWER,
        sglang=sglang_classes.QWEN3_5,
    ),
    "qwen3_5_moe_text": Family(
        qwen_next.qwen3_5_moe,
        llama_like.SHARED_EXPERT_NAMES,
        fuse=qwen_next.fused_whole,
        sglang=sglang_classes.QWEN3_5_TEXT,
    ),
    "qwen3_5_text": Family(qwen_next.qwen3_5, fuse=qwen_next.fused_whole, sglang=sglang_classes.QWEN3_5_TEXT),
    "qwen3_moe": Family(llama_like.qwen3_moe, sglang=sglang_classes.QWEN3_MOE),
    "qwen3_next": Family(
        qwen_next.qwen3_next,
        llama_like.SHARED_EXPERT_NAMES,
        fuse=qwen_next.fused_by_head,
        sglang=sglang_classes.QWEN3_NEXT,
    ),
    "seed_oss": Family(llama_like.seed_oss, sglang=sglang_classes.TRANSFORMERS),
    "smollm3": Family(llama_like.smollm3, sglang=sglang_classes.TRANSFORMERS),
}
"""By model_type in config.json."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture of a config.json (as a dict). Raises ModelError, naming what is not supported."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        fix = "choose a model of these families; docs/families.md says how to add one"
        raise ModelError(Problem("config.json: model_type", family, f"one of {', '.join(FAMILIES)}", fix))
    return FAMILIES[family].architecture_of(config)


def tensors_of(arch: Architecture) -> tuple[Tensor, ...]:
    """Returns all tensors of the model: names as in published files, shapes [out, in] or [n], and roles."""
    pairs = FAMILIES[arch.family].renamed
    if not pairs:
        return arch.tensors()
    return tuple(replace(tensor, name=renamed(tensor.name, pairs)) for tensor in arch.tensors())


def renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Returns the name with the first of each pair replaced by the second, one pair after another."""
    for pair in pairs:
        name = name.replace(*pair)
    return name


def read_architecture(directory: str | Path) -> Architecture:
    """Returns the architecture of the model in `directory`, from its config.json. Raises ModelError."""
    refuse_adapter(Path(directory))
    return architecture_of(read_json(Path(directory) / "config.json", "a Hugging Face model directory"))


def refuse_adapter(directory: Path) -> None:
    """Raises ModelError if a PEFT directory holds an adapter without its model."""
    if (directory / "adapter_config.json").is_file() and not any(directory.glob("model*.safetensors")):
        given, needed = "an adapter (adapter_config.json) without its model", "a Hugging Face model directory"
        fix = f"megagrpo convert merge-lora --adapter {directory} --source MODEL --output DIR"
        raise ModelError(Problem(str(directory), given, needed, fix))
