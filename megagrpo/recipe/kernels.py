"""Megatron's layers that a training rank takes on a card, and the attention kernels that they reach there.

Transformer Engine 2.17.1's limits for packed sequences are read from its source: get_attention_backend in
pytorch/attention/dot_product_attention/utils.py, and common/fused_attn/fused_attn.cpp with cuDNN 9.18.1 or later.
Training ranks hide flash-attn 4 from it (megatron/model.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from packaging.version import Version

from megagrpo.errors import Problem
from megagrpo.recipe.schema import AnyRecipe, TrainConfig
from megagrpo.section import problem
from megagrpo.weights.families.architecture import Architecture

LayerSpec = Literal["local", "transformer_engine"]
Capability = tuple[int, int]
"""A card's compute capability: (9, 0) is an H100's."""
FLASH_ATTN_2 = (Version("2.1.1"), Version("2.8.3"))
"""The lowest and the highest version that Transformer Engine 2.17.1 takes."""
FLASH_ATTN_2_BLACKWELL, FLASH_ATTN_2_DETERMINISTIC = Version("2.7.3"), Version("2.4.1")


@dataclass(frozen=True)
class Installed:
    """The installed packages of those that Transformer Engine and its attention need."""

    transformer_engine: bool = False
    flash_attn_2: Version | None = None
    flash_attn_3: bool = False


@dataclass(frozen=True)
class Attention:
    """A model's demands on attention kernels: dimensions of a head's keys and values, elements, and context ranks.
    `only_local` is what Transformer Engine's layers do not have of the model (Architecture.only_local)."""

    key_dim: int
    value_dim: int
    half: bool  # bfloat16
    context: int = 1
    backend: str = "auto"
    """train.megatron.attention_backend: auto, flash (only flash-attn) or fused (only cuDNN's)."""
    deterministic: bool = False
    only_local: str | None = None

    @property
    def dims(self) -> tuple[int, int]:
        return self.key_dim, self.value_dim


@dataclass(frozen=True)
class Layers:
    """The layers of a training rank. `kernel` computes their attention; `why` is the reason why auto takes them."""

    spec: LayerSpec
    kernel: str
    why: str


def attention_of(arch: Architecture, train: TrainConfig, *, half: bool) -> Attention:
    dims, options = arch.layers[-1].attention, train.megatron  # no published model ends with a delta net
    backend, deterministic = options.get("attention_backend", "auto"), bool(options.get("deterministic_mode"))
    context = train.layout.context
    return Attention(dims.head_dim, dims.value_dim, half, context, backend, deterministic, arch.only_local)


def installed() -> Installed:
    """Returns the packages that are installed in this environment."""
    two = _version("flash-attn")
    return Installed(find_spec("transformer_engine") is not None, two, _version("flash-attn-3") is not None)


def layers_on(card: Capability, installed: Installed, model: Attention) -> Layers:
    """Returns the layers of `train.layer_spec: auto`, adapters aside: Transformer Engine's if a fused kernel computes
    their attention. Without one, they would keep every score of the longest sequence."""
    name = f"sm{card[0]}{card[1]}"
    local = torch_kernel(card, model)
    if not installed.transformer_engine:
        return Layers("local", local, "Transformer Engine is not installed")
    if model.only_local is not None:
        return Layers("local", local, f"Transformer Engine's layers have no {model.only_local}")
    if (fused := fused_kernel(card, installed, model)) is not None:
        return Layers("transformer_engine", fused, f"{fused} takes packed sequences on {name}")
    why = f"Transformer Engine has no fused attention for this model's packed sequences on {name}"
    helps = Installed(True, FLASH_ATTN_2[1])
    if installed.flash_attn_2 is None and fused_kernel(card, helps, model) is not None:
        why += f"; flash-attn {FLASH_ATTN_2[1]} would be one"
    return Layers("local", local, why)


def auto_problems(recipe: AnyRecipe, fused: bool) -> Iterator[Problem]:
    """Yields problems of `auto` where it takes local layers (not `fused`). Recipe rules check explicit local layers."""
    train = recipe.train
    auto = train.layer_spec == "auto" and train.lora is None and recipe.cluster.device != "cpu"
    if auto and not fused and "moe_act" in train.recomputed.modules:
        yield problem("moe_act_of_auto_layers")


def fused_kernel(card: Capability, installed: Installed, model: Attention) -> str | None:
    """Returns Transformer Engine's fused kernel for attention over packed sequences in training; None if none fits."""
    if not model.half:
        return None
    kernels = {
        "cuDNN's fused attention": model.backend != "flash" and _cudnn(card, model),
        "flash-attn 3": model.backend != "fused" and installed.flash_attn_3 and _flash_attn_3(card, model),
        "flash-attn 2": model.backend != "fused" and _flash_attn_2(card, installed.flash_attn_2, model),
    }
    return next((name for name, works in kernels.items() if works), None)


def torch_kernel(card: Capability, model: Attention) -> str:
    """Returns the torch kernel for the attention of Megatron's local layers. torch's flash attention takes no mask,
    which context ranks need, and needs keys and values of one size."""
    if model.half and card >= (8, 0) and model.context == 1 and model.key_dim == model.value_dim <= 256:
        return "torch's flash attention"
    return "torch's memory-efficient attention"


def local_kernels(card: Capability, arch: Architecture, model: Attention, longest: int) -> dict[str, str]:
    """Returns what computes each kind of attention in Megatron's local layers, for sequences of `longest` tokens.
    `model` has the recipe's demands."""
    kernels = {}
    for part in (kind.attention for kind in arch.kinds):
        name, own = part.core(model.context, longest)
        heads = replace(model, key_dim=part.head_dim, value_dim=part.value_dim)
        kernels[name] = own or torch_kernel(card, heads)
    return kernels


def _cudnn(card: Capability, model: Attention) -> bool:
    if card < (9, 0) or model.key_dim % 8 or model.value_dim % 8 or (card[0] == 12 and model.deterministic):
        return False
    if card[0] > 9:
        return max(model.dims) <= 128 or (model.dims == (192, 128) and card[0] != 12)
    same_or_small = model.key_dim == model.value_dim or min(model.dims) < 128 or model.dims == (192, 128)
    return max(model.dims) <= 256 and same_or_small


def _flash_attn_3(card: Capability, model: Attention) -> bool:
    if card != (9, 0) or model.key_dim > 256 or (model.deterministic and max(model.dims) >= 256):
        return False
    latent = (128 < model.key_dim <= 192 and 96 < model.value_dim <= 128) or (
        model.key_dim <= 64 and model.value_dim <= 512
    )
    return model.key_dim == model.value_dim or latent


def _flash_attn_2(card: Capability, version: Version | None, model: Attention) -> bool:
    """Returns whether flash-attn 2 takes the model, whose keys and values are padded to one size."""
    lowest = FLASH_ATTN_2_BLACKWELL if card >= (10, 0) else FLASH_ATTN_2[0]
    lowest = max(lowest, FLASH_ATTN_2_DETERMINISTIC) if model.deterministic else lowest
    if version is None or not lowest <= version <= FLASH_ATTN_2[1] or card < (8, 0):
        return False
    most = 256 if card in ((8, 0), (9, 0), (10, 0), (12, 0)) else 192
    return max(model.dims) <= most and max(model.dims) % 8 == 0


def _version(package: str) -> Version | None:
    try:
        return Version(Version(metadata.version(package)).public)
    except metadata.PackageNotFoundError:
        return None
