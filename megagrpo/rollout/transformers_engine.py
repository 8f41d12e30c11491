"""The embedded engine: a transformers model in this process, for CPUs, tests and small models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megagrpo.errors import EngineError, ModelError, Problem
from megagrpo.rollout.decoding import Response, decode
from megagrpo.rollout.engine import MemoryTag, UpdateProtocol, check_prompts
from megagrpo.tokenizer import load_tokenizer, response_texts
from megagrpo.types import FinishReason, Request, Sample, SamplingParams
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.digest import digests
from megagrpo.weights.families import read_architecture
from megagrpo.weights.plan import WeightPlan, require_own
from megagrpo.weights.sides import transformers as transformers_side
from megagrpo.weights.transport.buckets import BucketReceiver
from megagrpo.weights.transport.choice import Channel, open_receiver
from megagrpo.weights.views import model_tensors, torch_dtype


class TransformersEngine:
    """Implements Engine (rollout/engine.py).

    `model_directory` holds config.json, safetensors and, unless `tokenizer_directory` is given, the tokenizer.
    `requests_at_once` responses are decoded in one batch, by `threads` CPU threads (a setting of the whole process).

    Raises ModelError if the model or the tokenizer cannot be loaded, or if the files lack any of its tensors.
    """

    def __init__(
        self,
        model_directory: str,
        *,
        device: str,
        dtype: str,
        requests_at_once: int,
        threads: int,
        tokenizer_directory: str | None = None,
        name: str = "transformers engine",
    ) -> None:
        torch.set_num_threads(threads)
        self._manifest = transformers_side.manifest(read_architecture(model_directory), dtype, holder=f"{name} rank 0")
        self._model: Any = _load_model(model_directory, device, dtype)
        self._tokenizer: Any = load_tokenizer(tokenizer_directory or model_directory)
        self._requests_at_once = requests_at_once
        self._protocol = UpdateProtocol(name)
        self._receiver: BucketReceiver | None = None

    def manifests(self) -> list[Manifest]:
        return [self._manifest]

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        self._disconnect()
        (destination,) = destinations
        require_own(plan.destinations[destination], self._manifest)
        self._receiver = open_receiver(channel, plan, destination, self._tensors())
        self._protocol.connect()

    def begin_update(self, version: int) -> None:
        self._protocol.begin(version)

    def receive(self, version: int) -> None:
        self._protocol.check_receiving()
        if self._receiver is None:
            raise EngineError(Problem(f"{self._protocol.name}: receive", given="no connection", needed="connect first"))
        self._receiver.receive(version)

    def end_update(self, version: int) -> list[Mapping[str, int]]:
        self._protocol.end(version)
        return [digests(self._tensors(), self._manifest.placements)]

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        return [] if self._receiver is None else [self._receiver.bucket_digests(tensor, frozenset(destinations))]

    def commit_update(self, version: int) -> None:
        self._protocol.commit(version)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        self._protocol.check_serving()
        check_prompts(requests, self._protocol.name)
        if not requests:
            return []
        responses: dict[int, Response] = {}
        for batch in _batches(requests, self._requests_at_once):
            with torch.inference_mode():
                responses |= zip(batch, self._decode([requests[i] for i in batch]), strict=True)
        return self._samples(requests, [responses[i] for i in range(len(requests))])

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Releases nothing: its memory is that of this process."""

    def close(self) -> None:
        self._protocol.close()
        self._disconnect()
        self._model = None

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        return model_tensors(self._model, self._manifest)

    def _decode(self, requests: Sequence[Request]) -> list[Response]:
        """One batch of requests with the same sampling parameters."""
        sampling = requests[0].sampling
        own = self._model.generation_config.eos_token_id  # one end-of-sequence token, several, or none
        distinct = {request.tokens: None for request in requests}
        place = {prompt: i for i, prompt in enumerate(distinct)}

        def name_of_row(row: int) -> str:
            at, version = requests[row], self._protocol.version
            return f"{self._protocol.name}: sample {at.index} of prompt {at.prompt_id}, by weights of version {version}"

        return decode(
            self._model,
            prompts=list(distinct),
            prompt_of_row=[place[request.tokens] for request in requests],
            seeds=[request.seed for request in requests],
            sampling=sampling,
            stop_tokens=frozenset(sampling.stop_tokens) | frozenset([own] if isinstance(own, int) else own or ()),
            name_of_row=name_of_row,
        )

    def _samples(self, requests: Sequence[Request], responses: Sequence[Response]) -> list[Sample]:
        finishes: list[FinishReason] = ["stop" if response.stopped else "length" for response in responses]
        ended = zip(responses, finishes, strict=True)
        texts = response_texts(self._tokenizer, [(response.tokens, finish) for response, finish in ended])
        return [
            Sample(
                prompt_id=request.prompt_id,
                index=request.index,
                tokens=response.tokens,
                logprobs=response.logprobs,
                versions=np.full(len(response.tokens), self._protocol.version, dtype=np.int32),
                finish=finish,
                text=text,
            )
            for request, response, finish, text in zip(requests, responses, finishes, texts, strict=True)
        ]


def _batches(requests: Sequence[Request], at_once: int) -> Iterator[list[int]]:
    """Indices of requests to decode together. They have the same sampling parameters; equal prompts are side by side,
    and prompts are ordered by length, so that little is padded."""
    by_sampling: dict[SamplingParams, dict[tuple[int, ...], list[int]]] = {}
    for index, request in enumerate(requests):
        by_sampling.setdefault(request.sampling, {}).setdefault(request.tokens, []).append(index)
    for by_prompt in by_sampling.values():
        ordered = [index for prompt in sorted(by_prompt, key=len) for index in by_prompt[prompt]]
        for start in range(0, len(ordered), at_once):
            yield ordered[start : start + at_once]


def _load_model(directory: str, device: str, dtype: str) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch_dtype(dtype), attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ModelError(Problem(f"{directory}: transformers cannot load the model", given=str(error))) from error
    model, report = loaded
    absent = sorted(report["missing_keys"]) + [key for key, *_ in report["mismatched_keys"]]
    if absent:
        given = f"{len(absent)} tensors are missing or have another shape: {', '.join(absent[:5])}"
        needed = "every tensor that config.json calls for"
        raise ModelError(Problem(f"{directory}: the files do not hold the whole model", given, needed))
    return model.to(device).eval().requires_grad_(False)
