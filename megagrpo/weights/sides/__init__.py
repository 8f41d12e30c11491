"""Sides: manifests that place each tensor in the ranks of Megatron, SGLang or vLLM, in Transformers or a checkpoint."""
