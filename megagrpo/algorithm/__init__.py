"""What is the GRPO objective? Scores to advantages, logprobs to a loss, steps to a learning rate: pure functions."""
