"""The embedded engine: a transformers model in this process, for CPUs, tests and small models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.errors import EngineError, ModelError, Problem
from megagrpo.rollout.decoding import Response, decode
from megagrpo.rollout.engine import UpdateProtocol
from megagrpo.types import Request, Sample, SamplingParams
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.digest import digests
from megagrpo.weights.executors.buckets import Bucket, unpack
from megagrpo.weights.families import read_architecture
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.sides import transformers as transformers_side
from megagrpo.weights.views import torch_dtype


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
        self._manifest = transformers_side.manifest(read_architecture(model_directory), dtype, holder=name)
        self._model: Any = _load_model(model_directory, device, dtype)
        self._tokenizer: Any = _load_tokenizer(tokenizer_directory or model_directory)
        self._requests_at_once = requests_at_once
        self._protocol = UpdateProtocol(name)

    def manifest(self) -> Manifest:
        return self._manifest

    def begin_update(self, version: int) -> None:
        self._protocol.begin(version)

    def receive(self, buckets: Sequence[Bucket], plan: WeightPlan, destination_index: int) -> None:
        self._protocol.check_receiving()
        for bucket in buckets:
            unpack(bucket, plan, destination_index, self._tensors())

    def end_update(self, version: int) -> Mapping[str, int]:
        self._protocol.end(version)
        return digests(self._tensors(), self._manifest.placements)

    def commit_update(self, version: int) -> None:
        self._protocol.commit(version)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        self._protocol.check_serving()
        empty = [request for request in requests if not request.tokens]
        if empty:
            raise EngineError(
                Problem(
                    where=f"{self._protocol.name}: prompt {empty[0].prompt_id}",
                    given="no tokens",
                    needed="at least one",
                )
            )
        if not requests:
            return []
        responses: dict[int, Response] = {}
        for batch in _batches(requests, self._requests_at_once):
            with torch.inference_mode():
                responses |= zip(batch, self._decode([requests[i] for i in batch]), strict=True)
        return self._samples(requests, [responses[i] for i in range(len(requests))])

    def close(self) -> None:
        self._protocol.close()
        self._model = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def _decode(self, requests: Sequence[Request]) -> list[Response]:
        """One batch of requests with the same sampling parameters."""
        sampling = requests[0].sampling
        distinct = {request.tokens: None for request in requests}
        place = {prompt: i for i, prompt in enumerate(distinct)}
        return decode(
            self._model,
            prompts=list(distinct),
            prompt_of_row=[place[request.tokens] for request in requests],
            seeds=[request.seed for request in requests],
            sampling=sampling,
            stop_tokens=self._stop_tokens(sampling),
        )

    def _stop_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        """The model's own end-of-sequence tokens and those asked for."""
        own = self._model.generation_config.eos_token_id
        return frozenset(sampling.stop_tokens) | frozenset([own] if isinstance(own, int) else own or ())

    def _samples(self, requests: Sequence[Request], responses: Sequence[Response]) -> list[Sample]:
        bodies = [response.tokens[: len(response.tokens) - response.stopped].tolist() for response in responses]
        texts = self._tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [
            Sample(
                prompt_id=request.prompt_id,
                index=request.index,
                tokens=response.tokens,
                logprobs=response.logprobs,
                versions=np.full(len(response.tokens), self._protocol.version, dtype=np.int32),
                finish="stop" if response.stopped else "length",
                text=text,
            )
            for request, response, text in zip(requests, responses, texts, strict=True)
        ]


def _batches(requests: Sequence[Request], at_once: int) -> Iterator[list[int]]:
    """Indices of requests to decode together: of one set of sampling parameters, equal prompts side by side, and
    prompts of like length, so that little is padded."""
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
        raise ModelError(
            Problem(
                f"{directory}: the files do not hold the whole model",
                given=f"{len(absent)} tensors are missing or have another shape: {', '.join(absent[:5])}",
                needed="every tensor that config.json calls for",
            )
        )
    return model.to(device).eval().requires_grad_(False)


def _load_tokenizer(directory: str) -> Any:
    fix = "check model.path, or set model.tokenizer"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ModelError(Problem(f"{directory}: no usable tokenizer", given=str(error), fix=fix)) from error
    # Without tokenizer files, transformers makes up an empty tokenizer for a model type that it knows.
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ModelError(Problem(f"{directory}: the tokenizer has no vocabulary", needed="tokenizer files", fix=fix))
    return tokenizer
