"""Fused routers, for moe_router_fusion, which the stub lacks; Megatron imports the names."""

from typing import Any


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stub has no fused router")


fused_topk_with_score_function = fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = _absent
