"""The engine that a recipe asks for, made in the process that holds it or speaks to its server: the engine's actor.

Each kind is imported where it is made: an import takes seconds, and must follow prepare_process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from megagrpo.cluster.actors import prepare_process
from megagrpo.cluster.engine_spec import EngineSpec
from megagrpo.errors import MegagrpoError
from megagrpo.recipe.defaults import dtype_name, run_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.engine import Engine
from megagrpo.rollout.sglang.arguments import server_arguments, server_environment

if TYPE_CHECKING:
    from megagrpo.rollout.sglang.client import Endpoint
    from megagrpo.rollout.sglang.engine import SglangEngine
    from megagrpo.rollout.sglang.server import Server
    from megagrpo.rollout.transformers_engine import TransformersEngine
    from megagrpo.weights.executors.meeting import Meeting
    from megagrpo.weights.executors.ways import Way
    from megagrpo.weights.plan import WeightPlan


@ray.remote(max_restarts=0)
class EngineActor:
    """One engine in its own process, or the process that speaks to its server."""

    def start(self, spec: EngineSpec) -> None:
        prepare_process(spec.device)
        self.engine = make_engine(spec)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.engine, method)(*arguments)

    def connect(
        self, plan: WeightPlan, destinations: Sequence[int], way: Way, meeting: Meeting, bucket_bytes: int
    ) -> None:
        self.engine.connect(plan, destinations, way, meeting, bucket_bytes)

    def update(self, version: int) -> Sequence[Mapping[str, int]]:
        """Receives a whole update; the digests of what arrived, by engine rank. Uncommitted until the driver agrees."""
        self.engine.begin_update(version)
        self.engine.receive(version)
        return self.engine.end_update(version)


def make_engine(spec: EngineSpec) -> Engine:
    """Ready to generate once it returns. Raises ModelError or EngineError."""
    match spec.recipe.rollout.engine:
        case "transformers":
            return _transformers(spec)
        case "sglang":
            return _sglang(spec)
        case "external":
            from megagrpo.rollout.sglang.client import Endpoint

            return _over(Endpoint(spec.recipe.rollout.urls[spec.index], spec.api_key), spec)


def _transformers(spec: EngineSpec) -> TransformersEngine:
    from megagrpo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(
        spec.model_directory,
        device=spec.device,
        dtype=dtype_name(spec.recipe, spec.device),
        requests_at_once=spec.recipe.rollout.requests_at_once,
        threads=spec.threads,
        tokenizer_directory=spec.tokenizer_directory,
        name=spec.name,
    )


def _sglang(spec: EngineSpec) -> SglangEngine:
    from megagrpo.rollout.sglang.server import Server

    recipe, rollout = spec.recipe, spec.recipe.rollout
    arguments = server_arguments(
        model_directory=spec.model_directory,
        layout=rollout.layout,
        dtype=dtype_name(recipe, spec.device),
        device=spec.device,
        requests_at_once=rollout.requests_at_once,
        tokens_per_request=recipe.data.prompt_tokens_max + longest_response(recipe),
        longest_pause_seconds=recipe.weights.timeout_seconds,
        options=rollout.sglang.model_extra or {},
    )
    environment = server_environment(spec.device, rollout.layout.tensor, spec.threads, spec.index)
    if spec.gpus:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, spec.gpus))}
    server = Server(
        arguments,
        name=spec.name,
        log=(run_directory(recipe) / "logs" / f"{spec.name.replace(' ', '_')}.log").absolute(),
        python=rollout.sglang.python,
        environment=environment,
    )
    try:
        server.wait_until_ready(recipe.cluster.start_timeout_seconds)
        return _over(server, spec)
    except MegagrpoError:
        server.close()
        raise


def longest_response(recipe: Recipe) -> int:
    """Of training rollouts and evaluations."""
    return max(recipe.rollout.response_tokens_max, recipe.eval.response_tokens_max or 0)


def _over(server: Server | Endpoint, spec: EngineSpec) -> SglangEngine:
    from megagrpo.rollout.sglang.engine import SglangEngine

    recipe = spec.recipe
    return SglangEngine(
        server,
        name=spec.name,
        engine=spec.index,
        model_directory=spec.model_directory,
        layout=recipe.rollout.layout,
        dtype=dtype_name(recipe, spec.device),
        device=spec.device,
        requests_at_once=recipe.rollout.requests_at_once,
        timeout_seconds=recipe.rollout.timeout_seconds,
        control_timeout_seconds=recipe.weights.timeout_seconds,
        pause=recipe.weights.pause,
        tokenizer_directory=spec.tokenizer_directory,
    )
