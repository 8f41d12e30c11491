"""The supported models. A family defines once what its config.json means and which tensors its checkpoints hold.

To add a dense decoder: write `families/<name>.py` with a function from the config to an Architecture, and add a line
to FAMILIES. docs/families.md describes what a new kind of layer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.families import deepseek_v3, llama_like
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Tensor
from megagrpo.weights.families.reading import read_json


@dataclass(frozen=True)
class SglangClass:
    """A family's class in sglang/srt/models (0.5.23), where it differs from the other families' classes."""

    attention_groups: bool = False
    """Support of attention data parallelism. A class without it would mix the groups up."""
    head_on_every_stage: bool = False
    """Unused heads on the pipeline stages before the last one."""
    attentions: tuple[str, ...] = ("attn",)
    """The attention modules of a layer that get scales of float8 keys and values in a quantised model."""
    least_experts: Literal["one", "tensor", "tensor / expert"] = "one"
    """The parallel sizes that give the least number of experts."""
    refuses: Callable[[Architecture], Iterable[Problem]] = lambda arch: ()
    """The config values that the class ignores."""


@dataclass(frozen=True)
class Family:
    """A family: a reader of its config.json (as a dict), names in its checkpoints, and SGLang's class."""

    architecture_of: Callable[[Mapping[str, Any]], Architecture]
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of the names of Architecture.tensors that are others in published files, on all sides."""
    sglang: SglangClass = SglangClass()


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        deepseek_v3.architecture_of,
        sglang=SglangClass(attention_groups=True, attentions=("attn_mqa", "attn_mha"), least_experts="tensor"),
    ),
    "llama": Family(llama_like.llama, sglang=SglangClass(head_on_every_stage=True)),
    "mistral": Family(llama_like.mistral, sglang=SglangClass(head_on_every_stage=True)),
    "mixtral": Family(
        llama_like.mixtral,
        llama_like.MIXTRAL_NAMES,
        SglangClass(head_on_every_stage=True, refuses=llama_like.ignored_by_sglangs_mixtral),
    ),
    "qwen2": Family(llama_like.qwen2),
    "qwen3": Family(llama_like.qwen3, sglang=SglangClass(attention_groups=True, attentions=())),
    "qwen3_moe": Family(
        llama_like.qwen3_moe,
        sglang=SglangClass(
            attention_groups=True, head_on_every_stage=True, attentions=(), least_experts="tensor / expert"
        ),
    ),
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
    renamed = FAMILIES[arch.family].renamed
    if not renamed:
        return arch.tensors()
    return tuple(
        replace(tensor, name=reduce(lambda name, pair: name.replace(*pair), renamed, tensor.name))
        for tensor in arch.tensors()
    )


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
