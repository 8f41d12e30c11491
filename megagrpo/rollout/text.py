"""From sampled tokens to text, with the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from megagrpo.errors import ModelError, Problem
from megagrpo.types import FinishReason


def load_tokenizer(directory: str) -> Any:
    """Raises ModelError if there is none, or one without a vocabulary."""
    fix = "check model.path, or set model.tokenizer"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ModelError(Problem(f"{directory}: no usable tokenizer", given=str(error), fix=fix)) from error
    # Without tokenizer files, transformers makes up an empty tokenizer for a model type that it knows.
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ModelError(Problem(f"{directory}: the tokenizer has no vocabulary", needed="tokenizer files", fix=fix))
    return tokenizer


def response_texts(tokenizer: Any, responses: Sequence[tuple[np.ndarray, FinishReason]]) -> list[str]:
    """What each response says, without the stop token that ended it."""
    bodies = [tokens[: len(tokens) - (finish == "stop")].tolist() for tokens, finish in responses]
    return list(tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False))
