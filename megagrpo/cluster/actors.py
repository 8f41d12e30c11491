"""The actors of training ranks, which keep Ray out of the ranks; and the preparation of every actor's process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from megagrpo.cluster import lost_ranks
from megagrpo.errors import RecipeError
from megagrpo.processes import importing
from megagrpo.processes.lifetime import end_with_parent
from megagrpo.recipe.defaults import allocator_problem, dtype_name, maps_gpu_memory, sync_directory
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe

if TYPE_CHECKING:
    import torch

    from megagrpo.processes.store import StoreAddress
    from megagrpo.weights.blocks import Preparation
    from megagrpo.weights.boxes import Box
    from megagrpo.weights.plan import WeightPlan
    from megagrpo.weights.transport.choice import Channel

FILES = "files"
"""The thread of a rank's process that writes files while the rank trains. It runs nothing collective."""


def prepare_process(device: str, recipe: AnyRecipe, gpus: Sequence[int | str] = ()) -> None:
    """Sets the network interface of the process groups of this process and its children, and NCCL's shared variables
    (nccl_environment), unless the user has set them. Hides the node's GPUs from an actor for device cpu, and from one
    with `gpus` all others.

    Without the interface, gloo takes the address that the host name resolves to, which on many machines is 127.0.1.1,
    and NCCL takes the first interface that it finds. An address that no interface has (an alias of loopback) changes
    nothing. Call it before torch is imported: torch asks CUDA for its devices only once. Neither this module nor the
    recipe imports torch.
    """
    end_with_parent()
    if name := interface_of(ray.util.get_node_ip_address()):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)
    for variable, value in nccl_environment(recipe).items():
        os.environ.setdefault(variable, value)
    if device == "cpu" or gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def nccl_environment(recipe: AnyRecipe) -> dict[str, str]:
    """Returns the NCCL variables that training ranks and engines must share where NCCL joins them. Colocated ranks are
    never joined, and keep NCCL's defaults."""
    if not isinstance(recipe, Recipe) or recipe.cluster.placement == "colocated":
        return {}
    return recipe.rollout.kind.nccl_environment(recipe.rollout)


def allocator_environment(recipe: AnyRecipe) -> dict[str, str]:
    """Returns the allocator setting of training ranks: torch maps memory where needed, so that microbatches of several
    sizes leave no holes. Empty where an engine maps that memory. Not for engines: SGLang's memory saver refuses it."""
    return {} if maps_gpu_memory(recipe) else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def ask(actor: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Calls a method of a RankActor's rank. Ray shows the method's name in process titles, task lists and errors.
    options: of Ray, such as the thread; num_returns gives a list of results."""
    return actor.call.options(name=f"RankActor.{method}", **options).remote(method, *arguments)


@ray.remote(max_restarts=0, concurrency_groups={FILES: 1})
class RankActor:
    """One training rank in its own process: `start` makes `rank`, `call` calls it. Its end of the weight sync is kept
    for all syncs."""

    rank: Any

    def begin_log(self, log: Path) -> lost_ranks.ProcessAt:
        return lost_ranks.begin_log(log)

    def prepare(self, device: str, recipe: AnyRecipe) -> None:
        """Runs before torch is imported. Raises RecipeError if this node's settings forbid the weights' transport."""
        prepare_process(device, recipe)
        if device == "cuda" and (problem := allocator_problem(recipe, os.environ)):
            raise RecipeError(problem)
        for variable, value in allocator_environment(recipe).items():
            os.environ.setdefault(variable, value)
        if recipe.deterministic:  # NCCL sums in one order; Megatron's deterministic_mode does the rest
            os.environ.setdefault("NCCL_ALGO", "^NVLS")
        if device == "cpu":
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's fused kernels: compiling them for a CPU gains nothing

    def start(self, recipe: AnyRecipe, rank: int, store: StoreAddress, model_directory: str, device: str) -> None:
        self.prepare(device, recipe)
        with importing():
            from megagrpo.megatron.model_rank import SftRank
            from megagrpo.megatron.rank import TrainRank

        self.model_directory = model_directory
        if isinstance(recipe, SftRecipe):
            self.rank = SftRank(recipe, rank, store, model_directory, device)
        else:
            self.rank = TrainRank(recipe, rank, store, model_directory, device)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the rank (megatron/rank.py, megatron/model_rank.py) and returns its answer."""
        return getattr(self.rank, method)(*arguments)

    def begin_memory_peak(self) -> None:
        """Resets `memory_peak`."""
        import torch

        torch.cuda.reset_peak_memory_stats()

    def memory_peak(self) -> int:
        """Returns the most bytes of tensors that torch has held at a time on this rank's GPU."""
        import torch

        return torch.cuda.max_memory_allocated()

    def begin_profile(self, memory: bool) -> None:
        from megagrpo.megatron.process import Profiler

        self.profiler = Profiler(memory)

    def end_profile(self, directory: Path) -> str:
        """Writes the profile since `begin_profile`. Returns the reason if it could not, or ""."""
        return self.profiler.end(directory, self.rank.where.rank)

    # --- this rank's end of the weight sync ---------------------------------------------------------------------------

    def connect(self, plan: WeightPlan, source: int, channel: Channel, preparation: Preparation | None = None) -> None:
        """Opens this rank's end of the weight sync, as source `source` of the plan. Every sync runs the preparation."""
        from megagrpo.weights.plan import require_own
        from megagrpo.weights.quantizing import Quantizer
        from megagrpo.weights.transport.choice import open_sender
        from megagrpo.weights.transport.disk import DiskFiles

        held = self.rank.manifest()
        self.quantizer = Quantizer(held, preparation, source) if preparation else None
        if self.quantizer:
            self.fetching = channel.rendezvous.join(plan.sources[source].holder)
        require_own(plan.sources[source], self.quantizer.manifest if self.quantizer else held)
        directory = sync_directory(self.rank.recipe).absolute()
        dtype = dtype_name(self.rank.recipe, self.rank.device.type)
        self.sender = open_sender(channel, plan, source, DiskFiles(directory, Path(self.model_directory), dtype))

    def send_weights(self, version: int, destinations: Sequence[int]) -> Mapping[int, Mapping[str, int]]:
        """Sends this rank's part of the open sync. Returns its part of the digests expected at each destination."""
        self.version = version
        tensors = self._sent_tensors()
        self.sender.send(version, tensors)
        return self.sender.digests(tensors, destinations)

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> Mapping[str, int]:
        return self.sender.bucket_digests(self._sent_tensors(), tensor, frozenset(destinations))

    def _sent_tensors(self) -> Mapping[str, torch.Tensor]:
        """Returns the tensors to send. Collective if quantised blocks are cut between ranks."""
        held = self.rank.tensors()
        return self.quantizer.tensors(held, self.fetching, self.version) if self.quantizer else held

    def disconnect(self) -> None:
        self.sender.close()

    def replica_digests(self) -> Mapping[Box, int]:
        """Returns the digest of every box that this rank holds."""
        from megagrpo.weights.digest import digests

        tensors = self.rank.tensors()
        return {
            placement.box: sum(digests(tensors, [placement]).values()) for placement in self.rank.manifest().placements
        }
