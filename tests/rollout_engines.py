"""Tiny embedded engines for tests: a random model of a family beside a tokenizer with one word for every token id."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megagrpo.errors import MegagrpoError
from megagrpo.rollout.engine import Engine, EngineSpec
from megagrpo.rollout.transformers_engine import TransformersEngine, load_model
from megagrpo.types import Request, Sample, SamplingParams
from megagrpo.weights.blocks import prepare
from megagrpo.weights.digest import digests
from megagrpo.weights.plan import make_plan
from megagrpo.weights.quantizing import Quantizer
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.ends import BucketSender
from megagrpo.weights.transport.rendezvous import RendezvousHost
from tests.tiny_models import DIMENSIONS, make_model
from tests.tiny_run import recipe_with
from tests.weights_oracle import Tensors

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


def receive(engine: Engine, directory: Path, version: int = 3) -> tuple[BucketSender, Tensors]:
    """Brings the weights of a directory with one file into the engine, quantised if it is; verifies and commits them.
    Returns the sender, open, and the tensors that it has sent."""
    held, tensors = checkpoint.manifests(directory), load_file(directory / "model.safetensors")
    (source,), preparation = prepare(held, engine.manifests())
    if preparation:
        tensors = Quantizer(held[0], preparation, 0).quantized(tensors, {})
    plan = make_plan([source], engine.manifests())
    host = RendezvousHost("127.0.0.1", timeout_seconds=200)
    channel = Channel(TransportName.SHARED_MEMORY, host.rendezvous, bucket_bytes=4096)
    sender = open_sender(channel, plan, 0)
    assert isinstance(sender, BucketSender)
    engine.connect(plan, [0], channel)
    host.open(version, [0])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, version, tensors)
        engine.begin_update(version)
        engine.receive(version)
        sending.result()
    assert engine.end_update(version) == [digests(tensors, source.placements)]
    engine.commit_update(version)
    return sender, tensors


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
