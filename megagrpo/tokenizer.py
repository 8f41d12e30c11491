"""The model's tokenizer: loaded in one way everywhere, texts to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megagrpo.errors import ModelError, Problem, first_line
from megagrpo.types import FinishReason


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Raises ModelError if there is none, or one without a vocabulary."""
    fix = "check model.path, or set model.tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001  the Rust tokenizers raise plain Exception for a bad tokenizer.json
        needed = "a directory with tokenizer files (tokenizer.json, tokenizer_config.json)"
        raise ModelError(Problem(f"{directory}: no usable tokenizer", first_line(error), needed, fix)) from None
    # Without tokenizer files, transformers makes up an empty tokenizer for a model type that it knows.
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ModelError(Problem(f"{directory}: the tokenizer has no vocabulary", needed="tokenizer files", fix=fix))
    return tokenizer


def load_chat_tokenizer(directory: str | Path, template_file: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer with a chat template: that of `template_file` (Jinja) if given, else its own.

    Raises ModelError if there is no tokenizer or no template. A template is parsed when it is first used.
    """
    tokenizer = load_tokenizer(directory)
    if template_file is not None:
        try:
            tokenizer.chat_template = Path(template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            where = f"{template_file}: the chat template cannot be read"
            raise ModelError(Problem(where, given=first_line(error), needed="a Jinja file")) from None
    if not tokenizer.chat_template:
        where, needed = f"{directory}: the tokenizer has no chat template", "a Jinja template for messages"
        fix = "set model.chat_template to a Jinja file, or use the tokenizer of the instruction-tuned model"
        raise ModelError(Problem(where, needed=needed, fix=fix))
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered texts: the chat template has written the special tokens already."""
    encoded: Any = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return list(encoded["input_ids"])


def response_texts(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[tuple[np.ndarray, FinishReason]]
) -> list[str]:
    """The text of each response, without the stop token that ended it."""
    bodies = [tokens[: len(tokens) - (finish == "stop")].tolist() for tokens, finish in responses]
    return list(tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False))
