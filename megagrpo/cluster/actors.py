"""The Ray actors: thin shells around a training rank and an engine, neither of which knows Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from megagrpo.recipe.defaults import dtype_name
from megagrpo.recipe.schema import Recipe

if TYPE_CHECKING:
    from megagrpo.weights.boxes import Box, Placement
    from megagrpo.weights.executors.buckets import Bucket
    from megagrpo.weights.plan import WeightPlan


def hide_gpus() -> None:
    """For device cpu on a machine with GPUs: what asks torch for CUDA then finds none. Call it before importing torch,
    which neither this module nor the recipe does.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@ray.remote(max_restarts=0)
class RankActor:
    """One training rank in its own process. It keeps its part of the weight plan, which every sync reuses."""

    def free_address(self) -> str:
        """tcp://host:port on this node, reachable by the other ranks, with a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, recipe: Recipe, rank: int, init_method: str, model_directory: str, device: str) -> None:
        if device == "cpu":
            hide_gpus()
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's fused kernels: compiling them for a CPU gains nothing
        from megagrpo.megatron.rank import TrainRank

        self.rank = TrainRank(recipe, rank, init_method, model_directory, device)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.rank, method)(*arguments)

    def set_plan(self, plan: WeightPlan, source: int, primary: Sequence[Sequence[Placement]]) -> None:
        """`primary[source]` are the placements whose digests this rank contributes."""
        self.plan, self.source, self.primary = plan, source, primary[source]

    def pack_weights(self, engines: int) -> list[Bucket] | list[list[Bucket]]:
        """What each engine gets: one return value for each, so that no engine fetches another's bytes."""
        buckets = self.rank.pack_weights(self.plan, self.source)
        if engines == 1:
            return buckets
        return [[bucket for bucket in buckets if bucket.destination == engine] for engine in range(engines)]

    def replica_digests(self) -> Mapping[Box, int]:
        """The digest of every box that this rank holds."""
        return {
            placement.box: sum(self.rank.weight_digests([placement]).values())
            for placement in self.rank.manifest().placements
        }

    def weight_digests(self) -> Mapping[str, int]:
        return self.rank.weight_digests(self.primary)


@ray.remote(max_restarts=0)
class EngineActor:
    """One embedded engine in its own process."""

    def start(
        self, recipe: Recipe, engine: int, model_directory: str, tokenizer_directory: str, device: str, threads: int
    ) -> None:
        if device == "cpu":
            hide_gpus()
        from megagrpo.rollout.transformers_engine import TransformersEngine

        self.engine = TransformersEngine(
            model_directory,
            device=device,
            dtype=dtype_name(recipe, device),
            requests_at_once=recipe.rollout.requests_at_once,
            threads=threads,
            tokenizer_directory=tokenizer_directory,
            name=f"engine {engine}",
        )

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.engine, method)(*arguments)

    def set_plan(self, plan: WeightPlan, destination: int) -> None:
        self.plan, self.destination = plan, destination

    def update(self, version: int, *buckets: list[Bucket]) -> Mapping[str, int]:
        """Receives a whole update; the digests of what arrived. Uncommitted until the driver has compared them."""
        self.engine.begin_update(version)
        for received in buckets:
            self.engine.receive(received, self.plan, self.destination)
        return self.engine.end_update(version)
