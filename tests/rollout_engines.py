"""Tiny embedded engines for tests: a random model of a family beside a tokenizer with one word for every token id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megagrpo.errors import MegagrpoError
from megagrpo.recipe.schema.run import Pause
from megagrpo.rollout.engine import Engine
from megagrpo.rollout.transformers_engine import TransformersEngine
from megagrpo.types import Request, Sample, SamplingParams
from tests.tiny_models import DIMENSIONS, make_model

END = 7
"""The end-of-sequence token of these models."""


def model_directory(family: str, directory: Path, **changes: Any) -> Path:
    path = make_model(family, directory, **({"eos_token_id": END} | changes))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(DIMENSIONS["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}").save_pretrained(path)
    return path


def start_engine(
    path: Path, requests_at_once: int = 256, dtype: str = "float32", pause: Pause = "retract"
) -> TransformersEngine:
    return TransformersEngine(
        str(path), device="cpu", dtype=dtype, requests_at_once=requests_at_once, threads=1, pause=pause
    )


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
