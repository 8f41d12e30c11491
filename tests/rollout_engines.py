"""Tiny embedded engines for tests: a random model of a family beside a tokenizer with one word for every token id."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megagrpo.errors import MegagrpoError
from megagrpo.rollout.engine import Engine, EngineSpec
from megagrpo.rollout.transformers_engine import TransformersEngine, load_model
from megagrpo.types import Request, Sample, SamplingParams
from tests.tiny_models import DIMENSIONS, make_model
from tests.tiny_run import recipe_with

END = 7
"""The end-of-sequence token of these models."""


def model_directory(family: str, directory: Path, eos_token_id: int | None = END, **changes: Any) -> Path:
    path = make_model(family, directory, eos_token_id=eos_token_id, **changes)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(DIMENSIONS["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos_token_id and f"w{eos_token_id}").save_pretrained(path)
    return path


@torch.no_grad()
def routes_of(directory: Path, tokens: Sequence[int]) -> np.ndarray:
    """[tokens - 1, layers, experts per token], as transformers chooses them in one pass."""
    model = load_model(str(directory), "cpu", "float32")
    found: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args: found.append(args[1]))
    model(torch.tensor([tokens[:-1]]))
    return torch.stack(found, 1).numpy()


def start_engine(path: Path, *overrides: str) -> TransformersEngine:
    """On one thread."""
    recipe = recipe_with(f"rollout.engines={os.cpu_count()}", *overrides)
    return TransformersEngine(EngineSpec(recipe, 0, str(path), str(path), "cpu"))


def request(
    tokens: Sequence[int], sampling: SamplingParams, *, seed: int = 0, prompt_id: str = "p", index: int = 0
) -> Request:
    return Request(prompt_id, index, tuple(tokens), seed, sampling)


def generate(engine: Engine, requests: Sequence[Request], first: int = 0) -> list[Sample]:
    """One sample for each request, in their order. Raises the first error of one once the others are given back.
    Tickets count from `first`."""
    answers: SimpleQueue[tuple[int, Sample | MegagrpoError]] = SimpleQueue()
    engine.begin(dict(enumerate(requests, first)), lambda ticket, answer: answers.put((ticket, answer)))
    samples: dict[int, Sample] = {}
    failure: MegagrpoError | None = None
    for _ in requests:
        ticket, answer = answers.get()
        if isinstance(answer, Sample):
            samples[ticket] = answer
        elif failure is None:
            failure = answer
            engine.give_back(range(first, first + len(requests)))
    if failure is not None:
        raise failure
    return [samples[ticket] for ticket in range(first, first + len(requests))]
