"""The model's tokenizer: loaded in one way everywhere, texts to token ids and back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megagrpo.errors import ModelError, first_line
from megagrpo.section import problem
from megagrpo.types import FinishReason
from megagrpo.weights.families.reading import read_json

CLOCK = re.compile(r"""\bstrftime_now\s*\(\s*(?:format\s*=\s*)?(["'])((?:(?!\1)[^\\\n])*)\1\s*,?\s*\)""")
DATE = datetime(2024, 7, 26)
"""Today, to a chat template: a prompt is the same tomorrow. Llama 3's templates write it where none is known."""
TEMPLATE_ERRORS = (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError)
"""Errors of a chat template: it raises at a message that it does not expect, or misreads a value's type."""
NAMED, END_OF_NAME = "\ue000", "\ue001"
"""Private characters around the number of a special token that a message's text names."""


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. Raises ModelError if there is none, one that needs code, or one without a vocabulary."""
    if files := _code(Path(directory)):
        raise ModelError(problem("tokenizer_of_code", directory=directory, files=", ".join(files)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        tokenizer("")  # a model_max_length that is no number fails where it is used
    except Exception as error:  # noqa: BLE001  the Rust tokenizers raise plain Exception for a bad tokenizer.json
        raise ModelError(problem("no_usable_tokenizer", directory=directory, reason=first_line(error))) from None
    # Without tokenizer files, transformers makes up an empty tokenizer for a model type that it knows.
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ModelError(problem("tokenizer_without_vocabulary", directory=directory))
    return tokenizer


def _code(directory: Path) -> list[str]:
    """Returns what a directory has in place of a tokenizer.json: transformers would ask for its code, or convert a
    vocabulary without the rule that splits texts into words, which the code has."""
    if (directory / "tokenizer.json").is_file():
        return []
    config = directory / "tokenizer_config.json"
    auto_map = (read_json(config).get("auto_map") if config.is_file() else None) or {}
    named = isinstance(auto_map, list) or "AutoTokenizer" in auto_map  # a list: of older releases
    files = [path.name for pattern in ("tokenization_*.py", "tiktoken.model") for path in directory.glob(pattern)]
    return ["auto_map.AutoTokenizer in tokenizer_config.json"] * named + sorted(files)


def end_tokens(directory: str | Path, tokenizer: Any) -> set[int]:
    """Returns the end-of-sequence tokens, at which engines stop: of config.json, generation_config.json and the
    tokenizer."""
    tokens = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = Path(directory) / name
        config = read_json(path) if path.is_file() else {}
        for part in (config, config.get("text_config") or {}):
            given = part.get("eos_token_id")
            tokens.update(given if isinstance(given, list) else (given,))
    return tokens - {None}


def load_chat_tokenizer(directory: str | Path, template_file: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer with a chat template: that of `template_file` (Jinja) if given, else its own. It writes DATE
    for today.

    Raises ModelError if there is no tokenizer or no template, or one whose date has a computed format. A template is
    parsed when it is first used.
    """
    tokenizer = load_tokenizer(directory)
    if template_file is not None:
        try:
            tokenizer.chat_template = Path(template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(problem("unreadable_template", file=template_file, reason=first_line(error))) from None
    if not tokenizer.chat_template:
        raise ModelError(problem("tokenizer_without_template", directory=directory))

    def of_one_day(template: Any) -> Any:  # one, or several by name
        if isinstance(template, dict):
            return {name: of_one_day(text) for name, text in template.items()}
        dated = CLOCK.sub(lambda call: repr(DATE.strftime(call[2])), template)
        if call := re.search(r"\bstrftime_now\b(?!\s+is\b).{0,40}", dated):
            raise ModelError(problem("date_of_a_template", directory=directory, call=call[0]))
        return dated

    tokenizer.chat_template = of_one_day(tokenizer.chat_template)
    return tokenizer


def identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest that differs for tokenizers that differ in a token, a rule or the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else f"{tokenizer.init_kwargs}"
    facts = [type(tokenizer).__name__, tokenizer.chat_template, sorted(tokenizer.get_vocab().items()), rules]
    return hashlib.blake2b(repr(facts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Returns token ids of rendered texts: the chat template has written the special tokens already."""
    if not texts:
        return []
    encoded: Any = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return list(encoded["input_ids"])


def encode_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns token ids of messages by the chat template, which alone writes special tokens: a special token that a
    message's text names, such as <|im_end|>, is text. Raises what the template raises."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    named = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            plain = value.replace(NAMED, "").replace(END_OF_NAME, "")
            return named.sub(lambda name: f"{NAMED}{special.index(name[0])}{END_OF_NAME}", plain)
        if isinstance(value, Mapping):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list | tuple) else value

    text = str(tokenizer.apply_chat_template([marked(message) for message in messages], tokenize=False))
    ids: list[int] = []
    for place, piece in enumerate(re.split(f"{NAMED}(\\d+){END_OF_NAME}", text)):
        if place % 2:
            ids += tokenizer(special[int(piece)], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        else:
            ids += encode(tokenizer, [piece])[0]
    return ids


def response_texts(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[tuple[np.ndarray, FinishReason]]
) -> list[str]:
    """Returns the text of each response, without the stop token that ended it."""
    bodies = [tokens[: len(tokens) - (finish == "stop")].tolist() for tokens, finish in responses]
    return list(tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False))
