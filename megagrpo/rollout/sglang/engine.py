"""One SGLang server as an engine: samples by HTTP, weight updates while it is paused. The server is one that megagrpo
started, or one that runs already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.rollout.engine import EngineSpec, MemoryTag
from megagrpo.rollout.kinds import CACHES_ELSEWHERE
from megagrpo.rollout.served import ServedEngine, require_arguments
from megagrpo.rollout.server import Server
from megagrpo.rollout.sglang.arguments import ARGUMENTS
from megagrpo.rollout.sglang.client import ServedRoutes, SglangAnswer, SglangClient, generate_body
from megagrpo.types import Request
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.sides import sglang as sglang_side
from megagrpo.weights.transport.choice import Channel
from megagrpo.weights.transport.sglang import ServerWeights

NOTHING_OPEN = "no weight-update session is open"  # how SGLang refuses /end_weight_update


AS_STARTED = {
    "attn_cp_size": 1, "moe_dp_size": 1, "dcp_size": 1, "moe_dense_tp_size": None, "enable_eplb": False,
    "ep_num_redundant_experts": 0, "speculative_algorithm": None,
}  # fmt: skip
"""Arguments that change what a server's ranks hold: values of servers that megagrpo starts."""


def check_server(info: Mapping[str, Any], spec: EngineSpec, architecture: Architecture) -> None:
    """Checks that the ranks of the server of this /server_info hold what the plan of a sync expects. Raises
    EngineError, naming all arguments that differ."""
    layout = spec.recipe.rollout.layout
    wanted: dict[str, object] = AS_STARTED | {"dp_size": 1, "dtype": spec.dtype}
    wanted |= {"tp_size": layout.tensor, "ep_size": layout.expert, "pp_size": layout.pipeline}
    wanted |= {"attn_dp_size": layout.attention_data}
    if layout.attention_data > 1:
        wanted |= {"enable_dp_lm_head": True}
    wanted |= {} if spec.quantization else {"quantization": None}  # ours is in config.json: SGLang may name it or not
    if architecture.experts and info.get("device") != "cpu":
        wanted |= {"moe_runner_backend": "triton"}
    if spec.routes is not None and not info.get("enable_return_routed_experts"):
        fix = "start the server with --enable-return-routed-experts, or set algorithm.routing: own"
        needed = "routes of tokens, which the recipe replays"
        raise EngineError(Problem(f"{spec.name}: the server", "enable_return_routed_experts False", needed, fix))
    if spec.routes is not None and (stores := [name for name in CACHES_ELSEWHERE if info.get(name)]):
        needed, fix = "a cache on the device alone: routes are not moved with it", "start it without, or routing: own"
        raise EngineError(Problem(f"{spec.name}: the server", f"{stores[0]} True", needed, fix))
    if "shared_experts" in architecture.recomputes:
        wanted |= {"disable_shared_experts_fusion": True}
    require_arguments(spec.name, info, wanted, ARGUMENTS.owned)


class SglangEngine(ServedEngine):
    """An engine over an SGLang server.

    Raises EngineError if a server's layout or dtype is another, ModelError if SGLang cannot hold the model so, or if
    there is no tokenizer. A server of others that keeps its weights is asked for nothing but /generate, and not
    changed: it may be of any layout.
    """

    def __init__(self, spec: EngineSpec, server: Server | None = None) -> None:
        rollout, keeps_weights = spec.recipe.rollout, spec.keeps_weights
        architecture = read_architecture(spec.model_directory)
        held = spec.dtype, spec.device, spec.index, spec.quantization
        ranks = range(rollout.layout.ranks)
        manifests = [sglang_side.manifest(architecture, rollout.layout, rank, *held) for rank in ranks]
        super().__init__(spec, server, manifests, SglangClient)
        self._update_open = False
        self._routes: ServedRoutes | None = None
        if sizes := spec.routes:
            self._routes = ServedRoutes(sizes, len(architecture.layers), architecture.expert_layers)
        try:
            self._info = self._client.get("/server_info")
            self._streams = bool(self._info.get("incremental_streaming_output"))
            if server or not keeps_weights:
                check_server(self._info, spec, architecture)
            if not (server or keeps_weights):
                # SGLang begins no update while one is open, which an earlier run may have left. A server that is paused
                # stays so until the first commit, because its weights may be a mixture of two versions.
                try:
                    self._end_update()
                except EngineError as error:
                    if NOTHING_OPEN not in str(error):
                        raise
        except MegagrpoError:
            self._client.close()
            raise
        self._weights = ServerWeights(self._client.post, spec.name, self._manifests, self._info)
        if not keeps_weights and (not server or self._info.get("load_format") == "dummy"):
            self.lose_weights()

    # --- samples ------------------------------------------------------------------------------------------------------

    def body(self, request: Request, request_id: str) -> dict[str, Any]:
        given = request_id, self.version, self._stops
        return generate_body(
            request, *given, streams=self._streams, routes=bool(request.sampling.routes and self._routes)
        )

    def answer(self, request: Request) -> SglangAnswer:
        routes = self._routes.read if request.sampling.routes and self._routes else None
        return SglangAnswer(request, self._fixed_version, routes)

    # --- weights ------------------------------------------------------------------------------------------------------

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        was_open = self._update_open
        self._open_update()
        super().connect(plan, destinations, channel)
        if not was_open:
            self._end_update()

    def pause_server(self) -> None:
        self._client.post("/pause_generation", {"mode": "in_place" if self._pause == "finish" else self._pause})

    def open_update(self) -> None:
        super().open_update()
        self._open_update()

    def close_update(self) -> list[Mapping[str, int]]:
        arrived = super().close_update()
        self._end_update()
        return arrived

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        self._open_update()
        by_rank = super().bucket_digests(tensor, destinations)
        self._end_update()
        return by_rank

    def label_weights(self, version: int) -> None:
        self._client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        # In place, running requests use the cache. Others do not take keys and values of other versions from it.
        if self._pause != "in_place" and "kv_cache" not in self._released:
            self._client.post("/flush_cache", {})
        self._client.post("/continue_generation", {})
        self._paused = False

    def _open_update(self) -> None:
        if not self._update_open:
            self._client.post("/begin_weight_update", {})
            self._update_open = True

    def _end_update(self) -> None:
        self._client.post("/end_weight_update", {})
        self._update_open = False

    # --- memory -------------------------------------------------------------------------------------------------------

    def can_release(self) -> bool:
        return bool(self._info.get("enable_memory_saver"))  # without it, SGLang only pretends to, or ends

    def release_of_server(self, tags: Sequence[MemoryTag]) -> None:
        self._client.post("/release_memory_occupation", {"tags": list(tags)})

    def resume_of_server(self, tags: Sequence[MemoryTag]) -> None:
        self._client.post("/resume_memory_occupation", {"tags": list(tags)})


ENGINE = SglangEngine
