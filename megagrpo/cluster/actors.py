"""The Ray actors: thin shells around a training rank and an engine, neither of which knows Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megagrpo.cluster.interfaces import use_interface_of
from megagrpo.ports import free_port
from megagrpo.recipe.defaults import dtype_name, sync_directory
from megagrpo.recipe.schema import Recipe, SftRecipe

if TYPE_CHECKING:
    from megagrpo.cluster.engine_spec import EngineSpec
    from megagrpo.weights.boxes import Box
    from megagrpo.weights.executors.meeting import Meeting
    from megagrpo.weights.executors.ways import Way
    from megagrpo.weights.plan import WeightPlan


def hide_gpus() -> None:
    """For device cpu on a machine with GPUs: what asks torch for CUDA then finds none. Call it before importing torch,
    which neither this module nor the recipe does.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


class RankProcess:
    """One training rank in its own process. `rank` is what `start` made."""

    rank: Any

    def free_address(self) -> str:
        """tcp://host:port on this node, reachable by the other ranks, with a port that is free now."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port('')}"

    def prepare(self, device: str) -> None:
        """Before anything imports torch."""
        use_interface_of(ray.util.get_node_ip_address())
        if device == "cpu":
            hide_gpus()
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's fused kernels: compiling them for a CPU gains nothing

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.rank, method)(*arguments)


@ray.remote(max_restarts=0)
class SftActor(RankProcess):
    """A rank of supervised fine-tuning."""

    def start(self, recipe: SftRecipe, rank: int, init_method: str, model_directory: str, device: str) -> None:
        self.prepare(device)
        from megagrpo.megatron.sft_rank import SftRank

        self.rank = SftRank(recipe, rank, init_method, model_directory, device)


@ray.remote(max_restarts=0)
class RankActor(RankProcess):
    """A rank of GRPO or PPO. It keeps its end of the weight sync, which every sync reuses."""

    def start(self, recipe: Recipe, rank: int, init_method: str, model_directory: str, device: str) -> None:
        self.prepare(device)
        from megagrpo.megatron.rank import TrainRank

        self.recipe, self.model_directory = recipe, model_directory
        self.rank = TrainRank(recipe, rank, init_method, model_directory, device)

    def connect(self, plan: WeightPlan, source: int, way: Way, meeting: Meeting, ranks_per_engine: int) -> None:
        """Opens this rank's end of the weight sync: it is the plan's `source`-th."""
        from megagrpo.weights.executors.disk import DiskFiles
        from megagrpo.weights.executors.weight_sender import WeightSender

        directory = sync_directory(self.recipe).absolute()
        self.sender = WeightSender(
            way,
            plan,
            source,
            meeting,
            self.recipe.weights.bucket_bytes,
            ranks_per_engine=ranks_per_engine,
            device=self.rank.device,
            files=DiskFiles(directory, Path(self.model_directory), dtype_name(self.recipe, self.rank.device.type)),
        )

    def send_weights(self, version: int, destinations: Sequence[int]) -> Mapping[int, Mapping[str, int]]:
        """Sends what the open sync wants of this rank; its part of what must then lie at each destination."""
        return self.sender.send(version, self.rank.tensors(), destinations)

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> Mapping[str, int]:
        return self.sender.bucket_digests(self.rank.tensors(), tensor, destinations)

    def disconnect(self) -> None:
        self.sender.close()

    def replica_digests(self) -> Mapping[Box, int]:
        """The digest of every box that this rank holds."""
        from megagrpo.weights.digest import digests

        tensors = self.rank.tensors()
        return {
            placement.box: sum(digests(tensors, [placement]).values()) for placement in self.rank.manifest().placements
        }


@ray.remote(max_restarts=0)
class EngineActor:
    """One engine in its own process, or the process that speaks to its server."""

    def start(self, spec: EngineSpec) -> None:
        use_interface_of(ray.util.get_node_ip_address())
        if spec.device == "cpu":
            hide_gpus()
        from megagrpo.cluster.engines import make_engine

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
