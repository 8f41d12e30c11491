"""QUIRK: it has no get_workspace any more, so Megatron 0.16.1's general_gemm for routers is None."""

from transformer_engine.pytorch.module import get_dummy_wgrad

__all__ = ["get_dummy_wgrad"]
