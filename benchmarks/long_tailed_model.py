"""A model whose responses end after a random number of tokens: most soon, a few late."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from megagrpo.demo.model import make_model, make_tokenizer

CONSTANT = 8.0
"""First entry of each token's embedding; the others are near 0.02."""


def make_long_tailed_model(directory: Path, mean_tokens: float, positions: int) -> None:
    """Saves an untrained model of the demo's shape that stops after each token with a probability of 1 / mean_tokens.

    The first hidden entry is nearly the same for every token, and the end token's logit reads it alone.
    """
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = positions
    model = make_model(tokenizer, seed=0)
    vocabulary, hidden = model.lm_head.weight.shape
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = CONSTANT
        model.lm_head.weight[:, 0] = 0.0
        end = model.lm_head.weight[tokenizer.eos_token_id]
        end.zero_()
        # Other tokens' logits are near 0. RMSNorm makes the first entry about the root of the hidden size.
        end[0] = math.log((vocabulary - 1) / (mean_tokens - 1)) / math.sqrt(hidden)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
