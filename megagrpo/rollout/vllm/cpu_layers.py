"""vLLM's layers on CPUs, computed with the very parameters that weight syncs write (vLLM 0.32.0).

vLLM packs weights for oneDNN and for its kernels of experts once they are loaded. It drops the parameters, or leaves
them, and computes with the packed copies: an update in place would not be seen. With these changes a linear layer, a
head and experts read their parameters each time, with torch's own products. Digests are then of what is computed with.

Runs in vLLM's processes: standard library and torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CLAMP, ALPHA = 7.0, 1.702
"""gpt-oss' activation, of which vLLM's own operator for CPUs has these constants too."""


def keep_weights(utils: Any) -> None:
    """Makes linear layers and heads multiply by `layer.weight`. Convolutions, which are packed in bfloat16, read theirs
    anyway."""
    from torch.nn.functional import linear

    def leave(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = linear

    utils.dispatch_cpu_unquantized_gemm = leave


def keep_experts(cpu_moe: Any) -> None:
    """Makes experts multiply by `w13_weight` and `w2_weight`, of any sizes. vLLM's kernel takes multiples of 32."""
    experts = cpu_moe.CPUUnquantizedExperts
    activations = (cpu_moe.MoEActivation.SILU, cpu_moe.MoEActivation.SWIGLUOAI)
    experts.process_weights_after_loading = lambda self, layer: None
    experts._supports_activation = staticmethod(lambda activation: activation in activations)
    experts._supports_grouped_gemm = classmethod(lambda cls, moe_config: (True, None))
    experts.apply = compute_experts


def compute_experts(
    kernel: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    **others: Any,
) -> None:
    """Writes the weighted sum of each token's experts to `output` [tokens, hidden], in the place of vLLM's kernel.

    w1 is [experts, 2 x ffn, hidden], w2 [experts, hidden, ffn]. `expert_map` gives the index here of each expert, -1
    for one that another rank has. Products are added in float32.
    """
    import torch
    from torch.nn.functional import linear

    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        here = expert if expert_map is None else int(expert_map[expert])
        if here < 0:
            continue
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        first, second = (None if bias is None else bias[here] for bias in (kernel.w1_bias, kernel.w2_bias))
        inner = activated(linear(hidden_states[token], w1[here], first), activation.value)
        own = linear(inner, w2[here], second)
        factor = 1.0 if apply_router_weight_on_input else topk_weights[token, choice, None].float()
        total.index_add_(0, token, own.float() * factor)
    output.copy_(total)


def activated(inner: torch.Tensor, activation: str) -> torch.Tensor:
    """Returns the activation [tokens, ffn] of [tokens, 2 x ffn]. In gpt-oss, columns of gate and up alternate."""
    import torch
    from torch.nn.functional import silu

    if activation == "swigluoai":
        gate, up = inner[..., ::2].clamp(max=CLAMP), inner[..., 1::2].clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(gate * ALPHA) * (up + 1)
    gate, up = inner.chunk(2, dim=-1)
    return silu(gate) * up


CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.model_executor.layers.utils": keep_weights,
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": keep_experts,
}
"""Changes of modules, on CPUs: made when the module is imported."""
