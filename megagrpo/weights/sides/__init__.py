"""Sides: manifests that place each tensor in Megatron's ranks, SGLang's ranks, Transformers or a checkpoint."""
