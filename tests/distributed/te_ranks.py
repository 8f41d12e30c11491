"""Models on CPU ranks as GPUs have them: the config for cuda, and Transformer Engine's layers from te_stub."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import config, model, process, trained_model
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import critic_of


def build_as_on_gpus() -> None:
    """Models of this process are built so from now on; a rank of a test serves one call."""
    trained_model.transformer_config = lambda arch, train, dtype, _: config.transformer_config(
        arch, train, dtype, "cuda"
    )
    multi_latent_attention.fused_apply_mla_rope_for_q = rotate_queries
    multi_latent_attention.fused_apply_mla_rope_for_kv = keys_and_values
    token_dispatcher.MoEAlltoAllTokenDispatcher.__init__ = with_indices_here


make_dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher.__init__


def with_indices_here(self: Any, *args: Any, **kwargs: Any) -> None:
    """With moe_permute_fusion, Megatron makes them on a device that it calls cuda by name."""
    settings = kwargs["config"]
    fused, settings.moe_permute_fusion = settings.moe_permute_fusion, False
    make_dispatcher(self, *args, **kwargs)
    settings.moe_permute_fusion = fused


def tensors_elsewhere(directories: list[Path], layer_specs: list[str]) -> list[str]:
    """Lists the tensors of the models, and of critics of them, that are not on the rank's device, here meta."""
    process.start_parallel(ParallelLayout(), seed=1)
    build_as_on_gpus()
    torch.cuda.current_device = lambda: torch.device("meta")
    found = []
    for directory, spec in product(directories, layer_specs):
        policy, train = read_architecture(directory), TrainConfig(layer_spec=spec)
        for arch in (policy, critic_of(policy)):
            settings = config.transformer_config(arch, train, torch.bfloat16, "cuda")
            (chunk,) = model.build_chunks(arch, settings, ParallelLayout())
            for name, module in chunk.named_modules():
                held = module._parameters | module._buffers | vars(module)
                found += [
                    f"{directory.name} {spec} {name}.{key}"
                    for key, value in held.items()
                    if isinstance(value, Tensor) and value.numel() and value.device.type != "meta"
                ]
    return found


# --- Megatron's Triton kernels for latent attention (fusions/fused_mla_yarn_rope_apply.py) ----------------------------


def rotate_queries(
    query: Tensor,
    cosine: Tensor,
    sine: Tensor,
    plain_dim: int,
    rotary_dim: int,
    cu_seqlens: Tensor,
    context_rank: int,
    context: int,
) -> Tensor:
    plain, rotary = query.split([plain_dim, rotary_dim], dim=-1)
    at = _positions(cu_seqlens, context_rank, context)
    return torch.cat([plain, _rotated(rotary, cosine[at, 0], sine[at, 0])], dim=-1)


def keys_and_values(
    both: Tensor,
    rotary: Tensor,
    cosine: Tensor,
    sine: Tensor,
    rotary_dim: int,
    plain_dim: int,
    value_dim: int,
    cu_seqlens: Tensor,
    context_rank: int,
    context: int,
) -> tuple[Tensor, Tensor]:
    plain, value = both.split([plain_dim, value_dim], dim=-1)
    at = _positions(cu_seqlens, context_rank, context)
    turned = _rotated(rotary, cosine[at, 0], sine[at, 0]).expand(-1, plain.shape[1], -1)
    return torch.cat([plain, turned], dim=-1), value


def _positions(cu_seqlens: Tensor, context_rank: int, context: int) -> Tensor:
    found = []
    for length in cu_seqlens.diff().tolist():
        chunks = torch.arange(length).chunk(2 * context) if context > 1 else (torch.arange(length),)
        found += [chunks[context_rank], chunks[-1 - context_rank]] if context > 1 else chunks
    return torch.cat(found)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pairs of neighbours become halves."""
    first, second = heads[..., 0::2], heads[..., 1::2]
    (cos_left, cos_right), (sin_left, sin_right) = cosine.chunk(2, -1), sine.chunk(2, -1)
    return torch.cat([first * cos_left - second * sin_left, second * cos_right + first * sin_right], dim=-1)
