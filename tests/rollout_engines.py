"""Tiny embedded engines for tests: a random model of a family beside a tokenizer with one word for every token id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megagrpo.rollout.transformers_engine import TransformersEngine
from megagrpo.types import Request, SamplingParams
from tests.tiny_models import DIMENSIONS, make_model

END = 7
"""The end-of-sequence token of these models."""


def model_directory(family: str, directory: Path, **changes: Any) -> Path:
    path = make_model(family, directory, **({"eos_token_id": END} | changes))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(DIMENSIONS["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}").save_pretrained(path)
    return path


def start_engine(path: Path, requests_at_once: int = 256, dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(str(path), device="cpu", dtype=dtype, requests_at_once=requests_at_once, threads=1)


def request(
    tokens: Sequence[int], sampling: SamplingParams, *, seed: int = 0, prompt_id: str = "p", index: int = 0
) -> Request:
    return Request(prompt_id, index, tuple(tokens), seed, sampling)
