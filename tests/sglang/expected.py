"""transformers' logits and logprobs of tokens that a server sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@cache
def model_of(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], before each token of a response, in float32."""
    return model_of(directory)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def logprobs_of(directory: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """[tokens], of each token of a response."""
    log_p = (logits_of(directory, prompt, tokens) / temperature).log_softmax(-1)
    return log_p[torch.arange(len(tokens)), list(tokens)].numpy()
