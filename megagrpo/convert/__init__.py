"""How does a model on disk change its format? Hugging Face files, Megatron-LM's torch_dist, and our own checkpoints."""
