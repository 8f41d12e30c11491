"""Conversion of a model on disk between Hugging Face files, Megatron-LM's torch_dist, and our own checkpoints."""
