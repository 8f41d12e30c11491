"""Layer specs: what modules a transformer layer is made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megagrpo.megatron.attention import PackedAttention, PackedLatentAttention
from megagrpo.weights.families.architecture import Architecture


def block_spec(config: TransformerConfig, arch: Architecture, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk, of the kind that config.transformer_impl names."""
    if config.transformer_impl == "transformer_engine":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    dense_layers = arch.layers if arch.experts is None else arch.experts.dense_layers
    layers = [_local_layer(config, arch, has_experts=layer >= dense_layers) for layer in here]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _local_layer(config: TransformerConfig, arch: Architecture, has_experts: bool) -> ModuleSpec:
    """Megatron's local layer, with a norm that knows sequence parallelism and attention for packed sequences."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=arch.latent is not None,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    if arch.latent is not None:
        attention.core_attention = PackedLatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        return spec
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"rope": arch.rope})
    if attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467). Megatron's own local norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each tensor rank sees its part of the sequence; finalize_model_grads sums the gradients of what is so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)
