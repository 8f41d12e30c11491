"""The embedded engine: a transformers model in this process, for CPUs, tests and small models."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from megagrpo.errors import EngineError, MegagrpoError, ModelError, Problem, few
from megagrpo.rollout.decoding import Record, decode
from megagrpo.rollout.engine import Done, Engine, EngineSpec, EngineState, SoFar
from megagrpo.rollout.read_routes import ReadRoutes
from megagrpo.rollout.requests import nothing_sampled
from megagrpo.tokenizer import end_tokens, load_tokenizer, response_texts
from megagrpo.types import Request, Sample, SamplingParams
from megagrpo.weights.blocks import manifest_of_whole, quantized_shapes, scales_of, storage_name, values_of
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.digest import digests
from megagrpo.weights.families import FAMILIES, read_architecture
from megagrpo.weights.families.reading import read_json
from megagrpo.weights.plan import WeightPlan, require_own
from megagrpo.weights.quantizing import dequantize
from megagrpo.weights.sides.checkpoint import transformers_manifest
from megagrpo.weights.transport.choice import Channel, open_receiver
from megagrpo.weights.transport.ends import BucketReceiver
from megagrpo.weights.views import box_view, model_tensors, torch_dtype

CLOSE_SECONDS = 5.0
"""Time for a step of the model to end."""


class TransformersEngine(Engine):
    """An engine that samples in its own thread, batch after batch: the next batches take all requests that wait.

    The threads of a spec are a setting of the whole process. The recipe's `pause` decides what an update does to a
    batch. retract: it ends, and its responses are resumed in the next batch. Quantised, it keeps the blocks that it
    receives, and computes with the values that they stand for, in the model's dtype.

    Raises ModelError if the model or the tokenizer cannot be loaded, or if the files lack any of its tensors.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.name)
        torch.set_num_threads(spec.threads)
        architecture, dtype = read_architecture(spec.model_directory), spec.dtype
        self._held = transformers_manifest(architecture, dtype, holder=f"{spec.name} rank 0")
        self._quantized = quantized_shapes(architecture) if spec.quantization else {}
        self._manifest = manifest_of_whole(self._held, self._quantized)
        self._blocks = {
            name: torch.empty(its.shape, dtype=torch_dtype(its.dtype), device=spec.device)
            for name, its in self._manifest.storages.items()
            if name not in self._held.storages
        }
        self._model: Any = load_model(spec.model_directory, spec.device, dtype)
        self._tokenizer: Any = load_tokenizer(spec.tokenizer_directory)
        self._stops = end_tokens(spec.model_directory, self._tokenizer)
        self._routes = spec.routes
        self._requests_at_once = spec.recipe.rollout.kind.requests_at_once(spec.recipe)
        self._receiver: BucketReceiver | None = None
        self._threads, self._pause = spec.threads, spec.recipe.pause
        self._changed = threading.Condition()
        """Guards all that follows, and what the thread reads of the engine's state."""
        self._waiting: dict[int, tuple[Request, Done]] = {}
        self._running: dict[int, tuple[Request, Done]] = {}
        self._batch: tuple[Mapping[int, Request], Record] | None = None
        """The newest batch, by ticket, and the record of its tokens."""
        self._given_back: set[int] = set()
        self._samples = False
        """True while the thread uses the weights."""
        self._worker = threading.Thread(target=self._work, name=f"samples of {spec.name}", daemon=True)
        self._worker.start()

    def manifests(self) -> list[Manifest]:
        return [self._manifest]

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        self._disconnect()
        (destination,) = destinations
        require_own(plan.destinations[destination], self._manifest)
        self._receiver = open_receiver(channel, plan, destination, self._tensors())
        self.oldest = 0

    def pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._samples)

    def receive_weights(self, version: int) -> None:
        if self._receiver is None:
            raise EngineError(Problem(f"{self.name}: receive", given="no connection", needed="connect first"))
        self._receiver.receive(version)

    def close_update(self) -> list[Mapping[str, int]]:
        held = model_tensors(self._model, self._held)
        for placement in (its for its in self._held.placements if its.box.tensor in self._quantized):
            region, view = placement.box, box_view(held[placement.storage], placement)
            whole = replace(region, start=(0, 0), shape=self._quantized[region.tensor])
            values, scales = (self._blocks[storage_name(of(whole))] for of in (values_of, scales_of))
            ranges = (slice(low, low + size) for low, size in zip(region.start, region.shape, strict=True))
            view.copy_(dequantize(values, scales, view.dtype)[tuple(ranges)])
        return [digests(self._tensors(), self._manifest.placements)]

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        return [] if self._receiver is None else [self._receiver.bucket_digests(tensor, frozenset(destinations))]

    def resume(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- samples ------------------------------------------------------------------------------------------------------

    def begin(self, requests: Mapping[int, Request], done: Done) -> None:
        self.check_requests(requests.values())
        with self._changed:
            self._waiting |= {ticket: (request, done) for ticket, request in requests.items()}
            self._changed.notify_all()

    def give_back(self, tickets: Collection[int]) -> None:
        with self._changed:
            self._given_back |= self._running.keys() & tickets
            self._changed.notify_all()
            waiting = {ticket: self._waiting.pop(ticket) for ticket in tickets if ticket in self._waiting}
        for ticket, (request, done) in waiting.items():
            done(ticket, request.begun or nothing_sampled(request))

    def so_far(self) -> SoFar:
        with self._changed:
            known = self._waiting | self._running
            batch = self._batch
        samples = {ticket: request.begun for ticket, (request, _) in known.items() if request.begun is not None}
        if batch is not None:
            samples |= zip(batch[0], batch[1].samples(), strict=True)
        return SoFar.of(samples)

    def rests(self) -> bool:
        with self._changed:
            return not self._serves or not (self._running or self._waiting)

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # of this thread: OpenMP counts them for each
        while True:
            with self._changed:
                self._rest()
                self._changed.wait_for(lambda: self._closed or (self._serves and bool(self._waiting)))
                self._running, self._waiting = self._waiting, {}
                self._samples = True
                if self._closed:
                    return
            for batch in _batches(self._running, self._requests_at_once):
                try:
                    with torch.inference_mode():
                        samples = self._decode({ticket: self._running[ticket][0] for ticket in batch})
                except MegagrpoError as error:
                    self._answer(dict.fromkeys(batch, error))
                except RuntimeError as error:
                    problem = Problem(f"{self.name}: a batch failed", given=str(error))
                    self._answer(dict.fromkeys(batch, EngineError(problem)))
                else:
                    self._answer(dict(zip(batch, samples, strict=True)))

    def _answer(self, answers: Mapping[int, Sample | MegagrpoError]) -> None:
        """Hands answers to `done`. Queues a response again if an update ended it."""
        for ticket, answer in answers.items():
            with self._changed:
                request, done = self._running.pop(ticket)
                goes_on = ticket not in self._given_back and not self._closed
                if goes_on and isinstance(answer, Sample) and answer.finish == "abort":
                    self._waiting[ticket] = replace(request, begun=answer), done
                    continue
                self._given_back.discard(ticket)
            done(ticket, answer)

    def _before_step(self) -> int | None:
        """Returns the version of the weights for a step of the model; None if the batch is to end."""
        with self._changed:
            if self._closed or self._given_back:
                return None
            if not self._serves and self._pause == "retract":
                return None
            if not self._serves and self._pause == "in_place":
                self._rest()
                self._changed.wait_for(lambda: self._closed or self._serves or bool(self._given_back))
                if not self._serves:
                    return None
                self._samples = True
            return self.version

    def _rest(self) -> None:
        self._samples = False
        self._changed.notify_all()

    @property
    def _serves(self) -> bool:
        return self.state is EngineState.SERVING

    @property
    def _closed(self) -> bool:
        return self.state is EngineState.CLOSED

    def close(self) -> None:
        with self._changed:
            super().close()
            self._changed.notify_all()
        self._worker.join(CLOSE_SECONDS)
        self._disconnect()
        self._model = None

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the storages that syncs write."""
        held = model_tensors(self._model, self._held)
        return {name: its for name, its in held.items() if name in self._manifest.storages} | self._blocks

    def _decode(self, batch: Mapping[int, Request]) -> list[Sample]:
        """Decodes one batch of requests, by ticket, with the same sampling parameters but for max_tokens."""
        requests = list(batch.values())
        sampling = requests[0].sampling
        routes = ReadRoutes(self._routes) if self._routes and sampling.routes else None
        record = Record(requests, routes)
        with self._changed:
            self._batch = batch, record
        stops = self._stops.union(sampling.stop_tokens)
        with routes.reading(self._model) if routes else nullcontext():
            decode(self._model, record, stops, self._before_step, self.name)
        samples = record.samples(ended=True)
        texts = response_texts(self._tokenizer, [(sample.tokens, sample.finish) for sample in samples])
        return [replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)]


def _batches(requests: Mapping[int, tuple[Request, Done]], at_once: int) -> list[list[int]]:
    """Splits tickets into batches of requests to decode together. A batch has the same sampling parameters but for
    max_tokens; equal prompts are side by side, and prompts are ordered by length, so that little is padded."""
    by_sampling: dict[SamplingParams, dict[tuple[int, ...], list[int]]] = {}
    for ticket, (request, _) in requests.items():
        by_sampling.setdefault(replace(request.sampling, max_tokens=0), {}).setdefault(request.read, []).append(ticket)
    batches = []
    for by_prompt in by_sampling.values():
        ordered = [ticket for prompt in sorted(by_prompt, key=len) for ticket in by_prompt[prompt]]
        batches += [ordered[start : start + at_once] for start in range(0, len(ordered), at_once)]
    return batches


def load_model(directory: str, device: str, dtype: str) -> Any:
    """Loads a model with torch's attention, or transformers' own if that lacks what the model's has, such as sinks."""
    written = read_json(Path(directory) / "config.json")
    family = FAMILIES[written.pop("model_type")]
    try:
        if family.known_as is None:
            config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(family.known_as, **written)
        alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = AutoModelForCausalLM if alone else AutoModelForImageTextToText
        options = {"config": config, "dtype": torch_dtype(dtype), "trust_remote_code": False}
        loaded: Any = auto.from_pretrained(directory, output_loading_info=True, **options)
    except (OSError, ValueError) as error:
        raise ModelError(Problem(f"{directory}: transformers cannot load the model", given=str(error))) from error
    model, report = loaded
    absent = sorted(report["missing_keys"]) + [key for key, *_ in report["mismatched_keys"]]
    if absent:
        given = f"{len(absent)} tensors are missing or have another shape: {few(absent)}"
        needed = "every tensor that config.json calls for"
        raise ModelError(Problem(f"{directory}: the files do not hold the whole model", given, needed))
    for name in [name for name, _ in model.base_model.named_children() if re.fullmatch(family.carried, f"{name}.")]:
        delattr(model.base_model, name)  # a tower, which only pictures need
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # torch's knows no cap; some releases of transformers leave it out
    return model.to(device).eval().requires_grad_(False)
