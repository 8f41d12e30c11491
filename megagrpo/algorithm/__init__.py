"""The GRPO objective as pure functions: scores to advantages, logprobs to a loss, steps to a learning rate."""
