"""A loss of a user's own, as docs/algorithms.md shows one, which also looks at whole responses."""


def squared(inputs, width):
    log_ratio = inputs.logprobs - inputs.old_logprobs
    own = inputs.sequences.of_tokens(inputs.sequences.mean(log_ratio)).to(log_ratio.dtype)
    return -inputs.advantages * log_ratio.exp() + (log_ratio - own).square() / width
