"""The choice of experts, for moe_router_fusion. Megatron also imports names of balancing losses, which it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: str = "bytemap",
) -> tuple[Tensor, Tensor]:
    """Weights [tokens, experts], zero for those that are not chosen, and which are chosen."""
    if logits.dtype == torch.float64:
        raise ValueError("Current TE does not support float64 router type.")
    if expert_bias is not None and score_function == "softmax":
        raise RuntimeError("score_function must be sigmoid or sqrtsoftplus when expert_bias is not None")
    if expert_bias is not None and expert_bias.dtype != torch.float32:
        raise RuntimeError("expert_bias must be a float32 tensor")
    assert routing_map_format == "bytemap", "the stub has no other"
    scores = logits.float()
    if score_function == "sigmoid":
        scores = scores.sigmoid()
    elif score_function == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(scores).sqrt()
    elif use_pre_softmax:
        scores = scores.softmax(-1)
    ranked = scores if expert_bias is None else scores + expert_bias
    if group_topk:
        grouped = ranked.view(len(ranked), num_groups, -1)
        of_group = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, of_group.topk(group_topk).indices, True)
        ranked = grouped.masked_fill(~kept[..., None], -torch.inf).view_as(ranked)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ranked.topk(topk).indices, True)
    if score_function == "softmax" and not use_pre_softmax:
        weights = scores.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        weights = scores * chosen
        if score_function != "softmax" and topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * (scaling_factor or 1.0)).type_as(logits), chosen


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stub has no balancing loss")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = _absent
