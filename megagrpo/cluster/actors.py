"""The actor of a training rank: a shell around a rank that does not know Ray; and what every actor does first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from megagrpo.ports import free_port
from megagrpo.recipe.defaults import dtype_name, sync_directory
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe

if TYPE_CHECKING:
    from megagrpo.weights.boxes import Box
    from megagrpo.weights.plan import WeightPlan
    from megagrpo.weights.transport.choice import TransportName
    from megagrpo.weights.transport.rendezvous import Rendezvous


def prepare_process(device: str) -> None:
    """Sets the network interface of the process groups of this process and its children, unless the user has set it,
    and hides the node's GPUs from an actor for device cpu.

    Without it, gloo takes the address that the host name resolves to, which on many machines is 127.0.1.1, and NCCL
    takes the first interface that it finds. An address that no interface has (an alias of loopback) changes nothing.
    Call it before torch is imported: torch asks CUDA for its devices only once. Neither this module nor the recipe
    imports torch.
    """
    if name := interface_of(ray.util.get_node_ip_address()):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


@ray.remote(max_restarts=0)
class RankActor:
    """One training rank in its own process. It keeps its end of the weight sync, which every sync reuses."""

    rank: Any

    def free_address(self) -> str:
        """tcp://host:port on this node, reachable by the other ranks, with a port that is free now."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port('')}"

    def start(self, recipe: AnyRecipe, rank: int, init_method: str, model_directory: str, device: str) -> None:
        """Makes the rank: a TrainRank for GRPO and PPO, a SftRank for supervised fine-tuning."""
        prepare_process(device)
        if device == "cpu":
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's fused kernels: compiling them for a CPU gains nothing
        self.model_directory = model_directory
        if isinstance(recipe, SftRecipe):
            from megagrpo.megatron.sft_rank import SftRank

            self.rank = SftRank(recipe, rank, init_method, model_directory, device)
        else:
            from megagrpo.megatron.rank import TrainRank

            self.rank = TrainRank(recipe, rank, init_method, model_directory, device)

    def call(self, method: str, *arguments: Any) -> Any:
        """What this method of the rank returns."""
        return getattr(self.rank, method)(*arguments)

    def connect(
        self, plan: WeightPlan, source: int, transport: TransportName, rendezvous: Rendezvous, ranks_per_engine: int
    ) -> None:
        """Opens this rank's end of the weight sync: it is the plan's `source`-th."""
        from megagrpo.weights.plan import require_own
        from megagrpo.weights.transport.choice import open_sender
        from megagrpo.weights.transport.disk import DiskFiles

        require_own(plan.sources[source], self.rank.manifest())
        recipe: Recipe = self.rank.recipe
        dtype = dtype_name(recipe, self.rank.device.type)
        self.source, self.part = source, plan.part_for_source(source)
        self.sender = open_sender(
            transport,
            plan,
            source,
            rendezvous,
            recipe.weights.bucket_bytes,
            ranks_per_engine=ranks_per_engine,
            files=DiskFiles(sync_directory(recipe).absolute(), Path(self.model_directory), dtype),
        )

    def send_weights(self, version: int, destinations: Sequence[int]) -> Mapping[int, Mapping[str, int]]:
        """Sends this rank's part of the open sync. Returns its part of the digests expected at each destination."""
        from megagrpo.weights.digest import sent_digests

        tensors = self.rank.tensors()
        self.sender.send(version, tensors)
        return sent_digests(self.part, self.source, tensors, destinations)

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> Mapping[str, int]:
        return self.sender.bucket_digests(self.rank.tensors(), tensor, frozenset(destinations))

    def disconnect(self) -> None:
        self.sender.close()

    def replica_digests(self) -> Mapping[Box, int]:
        """The digest of every box that this rank holds."""
        from megagrpo.weights.digest import digests

        tensors = self.rank.tensors()
        return {
            placement.box: sum(digests(tensors, [placement]).values()) for placement in self.rank.manifest().placements
        }
