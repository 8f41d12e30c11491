"""One vLLM server as an engine: samples by HTTP, weight updates while it is paused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megagrpo.errors import EngineError, Problem, brief
from megagrpo.rollout.engine import EngineSpec, MemoryTag
from megagrpo.rollout.served import ServedEngine, require_arguments
from megagrpo.rollout.server import Server
from megagrpo.rollout.vllm.arguments import ARGUMENTS, context_problems
from megagrpo.rollout.vllm.client import VllmAnswer, VllmClient, generate_body
from megagrpo.types import Request
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides import vllm as vllm_side
from megagrpo.weights.transport import WORKER_EXTENSION
from megagrpo.weights.transport.vllm import VllmWeights

AS_STARTED = {
    "worker_extension_cls": WORKER_EXTENSION, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
    "pipeline_parallel_size": 1, "data_parallel_size": 1, "prefill_context_parallel_size": 1,
    "enable_expert_parallel": False, "enable_eplb": False, "quantization": None, "speculative_config": None,
}  # fmt: skip
"""Arguments that change what a server's ranks hold or answer: values of servers that megagrpo starts."""


def check_server(answer: Mapping[str, Any], spec: EngineSpec, architecture: Architecture) -> None:
    """Checks that the server of this /server_info is started as the recipe and the plan of a sync expect. Raises
    EngineError, naming all arguments that differ, or a context with other rotary embeddings than in training."""
    try:
        config = answer["vllm_config"]
        info = {**config, **config["model_config"], **config["parallel_config"]}
        info["dtype"] = info["dtype"].removeprefix("torch.")
    except (LookupError, TypeError, AttributeError):
        raise EngineError(Problem(f"{spec.name}: /server_info", brief(answer), "that of vLLM 0.32")) from None
    wanted = AS_STARTED | {"tensor_parallel_size": spec.recipe.rollout.layout.tensor, "dtype": spec.dtype}
    require_arguments(spec.name, info, wanted, ARGUMENTS.owned)
    if problems := context_problems(architecture, info.get("max_model_len")):
        fix = f"start the server with --max-model-len {architecture.sampled_max}"
        raise EngineError([replace(problem, where=f"{spec.name}: max_model_len", fix=fix) for problem in problems])


class VllmEngine(ServedEngine):
    """An engine over a vLLM server.

    Raises EngineError if a running server is started otherwise, ModelError if vLLM cannot hold the model so, or if
    there is no tokenizer. A server of others that keeps its weights is asked for nothing but GENERATE.
    """

    def __init__(self, spec: EngineSpec, server: Server | None = None) -> None:
        layout, architecture = spec.recipe.rollout.layout, read_architecture(spec.model_directory)
        held = spec.dtype, spec.device, spec.index, spec.quantization
        manifests = [vllm_side.manifest(architecture, layout, rank, *held) for rank in range(layout.ranks)]
        super().__init__(spec, server, manifests, VllmClient)
        try:
            if not (server or spec.keeps_weights):
                check_server(self._client.get("/server_info?config_format=json"), spec, architecture)
        except EngineError:
            self._client.close()
            raise
        self._weights = VllmWeights(self._client.post, spec.name, manifests)
        options = spec.recipe.rollout.vllm.model_extra or {}
        self._sleeps = spec.device != "cpu" and bool(options.get("enable_sleep_mode"))
        if not spec.keeps_weights:
            self.lose_weights()

    def body(self, request: Request, request_id: str) -> dict[str, Any]:
        return generate_body(request, request_id, self.version, self._stops)

    def answer(self, request: Request) -> VllmAnswer:
        return VllmAnswer(request, self._fixed_version)

    # --- weights ------------------------------------------------------------------------------------------------------

    def pause_server(self) -> None:
        self._client.post("/pause?mode=keep&clear_cache=false", {})

    def label_weights(self, version: int) -> None:
        self._client.post("/update_weight_version", {"new_version": str(version)})
        # In place, running requests use the cache. Otherwise their tokens are read anew, by the new weights.
        if self._pause != "in_place" and "kv_cache" not in self._released:
            self._client.post("/reset_prefix_cache?reset_running_requests=true", {})
        self._client.post("/resume", {})
        self._paused = False

    # --- memory -------------------------------------------------------------------------------------------------------

    def can_release(self) -> bool:
        return self._sleeps  # on CPUs vLLM's sleep does nothing

    def release_of_server(self, tags: Sequence[MemoryTag]) -> None:
        if not self._paused:
            self.pause_server()
            self._paused = True
        self._client.post("/sleep?level=2&mode=keep" if "weights" in tags else "/release_kv_cache_memory", {})

    def resume_of_server(self, tags: Sequence[MemoryTag]) -> None:
        self._client.post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags), {})
        if not self._released - set(tags):
            self._paused = False  # vLLM resumes once all memory is back


ENGINE = VllmEngine
