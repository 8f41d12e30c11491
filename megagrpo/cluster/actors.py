"""What every actor's process does before it imports torch, and the actors of training ranks: shells around ranks that
do not know Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from megagrpo.ports import free_port
from megagrpo.recipe.defaults import dtype_name, sync_directory
from megagrpo.recipe.schema import Recipe, SftRecipe

if TYPE_CHECKING:
    from megagrpo.weights.boxes import Box
    from megagrpo.weights.executors.meeting import Meeting
    from megagrpo.weights.executors.ways import Way
    from megagrpo.weights.plan import WeightPlan


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def prepare_process(device: str) -> None:
    """Sets this process's network interface, and hides the node's GPUs from an actor for device cpu.

    Call it before torch is imported: torch asks CUDA for its devices only once. Neither this module nor the recipe
    imports torch.
    """
    use_interface_of(ray.util.get_node_ip_address())
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def use_interface_of(address: str) -> None:
    """Sets the interface of the process groups of this process and its children, unless the user has set it.

    Without it, gloo takes the address that the host name resolves to, which on many machines is 127.0.1.1, and NCCL
    takes the first interface that it finds. An address that no interface has (an alias of loopback) changes nothing.
    """
    if name := interface_of(address):
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, name)


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


class RankProcess:
    """One training rank in its own process. `rank` is what `start` made."""

    rank: Any

    def free_address(self) -> str:
        """tcp://host:port on this node, reachable by the other ranks, with a port that is free now."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port('')}"

    def prepare(self, device: str) -> None:
        """Before anything imports torch."""
        prepare_process(device)
        if device == "cpu":
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
