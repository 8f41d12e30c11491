"""Megatron's modules of the parts of layers, and of the norms around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megagrpo.megatron.attention import PackedAttention, PackedLatentAttention
from megagrpo.megatron.delta_net import DeltaNet
from megagrpo.weights.families import parts
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.latent_attention import NORM_EPSILON


def block_spec(config: TransformerConfig, arch: Architecture, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Returns the modules of one model chunk's layers, by config.transformer_impl."""
    if config.transformer_impl == "transformer_engine":
        # flash-attn 4, which SGLang installs, has no backward pass before sm90. Its 4.0.0b36 returns zeros for causal
        # attention, without an error, called as Transformer Engine 2.17.1 does (Transformer Engine's issue 3528).
        from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils

        FlashAttentionUtils.v4_is_installed, FlashAttentionUtils.v4_warning_printed = False, True
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if config.multi_latent_attention:
            for layer in block.layer_specs:
                layer.submodules.self_attention.module = LatentAttention
        return block
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    of_chunk = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [_local_layer(config, arch.layers[layer]) for layer in of_chunk]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _local_layer(config: TransformerConfig, layer: Layer) -> ModuleSpec:
    """Returns Megatron's local layer with our norms, and our attention over packed sequences."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if layer.mlp.experts else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    modules, norms = spec.submodules, layer.norms
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm if norms.inputs else IdentityOp
    if norms.outputs or norms.factor != 1:
        added = ModuleSpec(module=Added, params={"config": config, "norms": norms})
        modules.self_attn_bda = modules.mlp_bda = added
    if isinstance(layer.mlp, parts.Experts):
        submodules = modules.mlp.keywords["submodules"]
        if config.add_bias_linear:
            submodules.experts.keywords["submodules"].linear_fc2 = OwnOutput
        if isinstance(layer.mlp.router, parts.SoftmaxRouter):
            submodules.router = SoftmaxRouter
    ATTENTION[type(layer.attention)](modules.self_attention, layer.attention)
    return spec


def _grouped_attention(spec: ModuleSpec, part: parts.Attention) -> None:
    modules = spec.submodules
    options: dict[str, Any] = {"scale": part.scale, "window": part.window, "score_cap": part.score_cap}
    options |= {"sinks": part.sinks, "rope": part.rope, "query_temperature": part.temperature}
    modules.core_attention = ModuleSpec(module=PackedAttention, params=options)
    if part.norm == "head":
        modules.q_layernorm = modules.k_layernorm = RMSNorm
    elif part.norm == "projection":
        modules.q_layernorm = ModuleSpec(module=ProjectionNorm, params={"heads": part.heads})
        modules.k_layernorm = ModuleSpec(module=ProjectionNorm, params={"heads": part.groups})


def _latent_attention(spec: ModuleSpec, part: parts.LatentAttention) -> None:
    modules, spec.module = spec.submodules, LatentAttention
    modules.core_attention = ModuleSpec(module=PackedLatentAttention, params={"rope": part.rope})
    modules.q_layernorm = modules.kv_layernorm = LatentNorm


def _delta_net(spec: ModuleSpec, part: parts.DeltaNet) -> None:
    spec.module, spec.params, spec.submodules = DeltaNet, {"sizes": part}, None


ATTENTION: dict[type, Callable[[ModuleSpec, Any], None]] = {
    parts.Attention: _grouped_attention,
    parts.LatentAttention: _latent_attention,
    parts.DeltaNet: _delta_net,
}
"""Functions that set the modules of a part in the spec of Megatron's self-attention."""


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention, made of the modules in its spec, with values of their own size, as before 0.19.

    Megatron 0.19 decides once more where norms are, and asks queries without a latent to have one before their
    projection: such models have none there. It pads the values of packed sequences to the size of keys, which makes
    attention slower (github.com/NVIDIA/Megatron-LM/issues/6240).
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _run_core_attention(self, *tensors: Any, **arguments: Any) -> Tensor:
        if arguments.get("attn_mask_type") is None:
            arguments["attn_mask_type"] = self.attn_mask_type
        return self.core_attention(*tensors, **arguments)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467). Megatron's own local norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each tensor rank sees its part of the sequence; finalize_model_grads sums the gradients of what is so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.zero_centred:  # in float32, rounded once: 1 + weight is not exact in bfloat16
            normed = F.rms_norm(hidden.float(), hidden.shape[-1:], 1 + self.weight.float(), self.eps)
            return normed.to(hidden.dtype)
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


class LatentNorm(RMSNorm):
    """The norm of a latent, with an epsilon of its own."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, NORM_EPSILON)


class ProjectionNorm(torch.nn.Module):
    """Root-mean-square norm over all heads of all tensor ranks: hidden [tokens, 1, heads / tensor, head_dim]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int, **_: Any) -> None:
        super().__init__()
        self.eps, self.size, self.group = eps, heads * hidden_size, parallel_state.get_tensor_model_parallel_group()
        size = self.size // self.group.size()
        self.weight = torch.nn.Parameter(
            torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), self.group)
        squares = copy_to_tensor_model_parallel_region(squares, self.group)
        normed = (wide * torch.rsqrt(squares / self.size + self.eps)).to(hidden.dtype)
        return (normed * self.weight).view_as(hidden)


class Added(torch.nn.Module):
    """Megatron's bias-dropout-add without dropout: residual + factor x (norm of) output."""

    def __init__(self, config: TransformerConfig, norms: parts.Norms) -> None:
        super().__init__()
        self.factor = norms.factor
        if norms.outputs:
            self.norm = RMSNorm(config, norms.hidden, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            # Megatron enables gradients here, in passes without them as well: norms would keep their inputs.
            with torch.set_grad_enabled(output.requires_grad):
                output = output if bias is None else output + bias
                output = self.norm(output) if hasattr(self, "norm") else output
                return residual + (output if self.factor == 1 else output * self.factor)

        return add


class SoftmaxRouter(TopKRouter):
    """A router with softmax scores. Its bias decides which experts a token passes, and not their weights."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = logits.view(-1, self.config.num_moe_experts)
        with torch.no_grad():
            scores = logits.float().softmax(-1) + self.expert_bias
            replay = self.router_replay
            arguments = scores, self.topk
            _, chosen = _topk(*arguments) if replay is None else replay.get_replay_topk(*arguments, _topk)
        return topk_routing_with_score_function(logits, self.topk, precomputed_indices=chosen)


def _topk(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    return torch.topk(scores, topk, dim=1)


class OwnOutput(RowParallelLinear):
    """A linear layer whose output is no view: Megatron's experts add a bias to it in place, for which autograd asks.

    Megatron sums the gradient of its bias over tensor ranks, which hold different experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(hidden)
        return output.clone(), bias
