"""megagrpo: GRPO with Megatron-Core for training, SGLang or vLLM for rollouts and Ray for the cluster."""

__version__ = "0.1.0"
