"""The training ranks of the weight sync benchmark: processes that hold what Megatron ranks hold, and send it."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gather_everything import GatherEverything

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.processes.ports import free_port
from megagrpo.rollout.client import Endpoint
from megagrpo.weights.digest import sent_digests
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.disk import DiskFiles
from megagrpo.weights.transport.rendezvous import Rendezvous
from megagrpo.weights.views import torch_dtype

GATHER = "gather everything"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_CUMEM_ENABLE": "0",  # as in SGLang's servers, with which NCCL joins the ranks
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass(frozen=True)
class Sync:
    """Facts about the syncs to come for every training rank. `transport` is a TransportName's value or GATHER."""

    transport: str
    layout: ParallelLayout
    plan: WeightPlan
    rendezvous: Rendezvous
    bucket_bytes: int
    files: DiskFiles
    server: Endpoint


class TrainingRank:
    """One process's part, in the memory of `device`."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._sender: Any = None

    def hold(self, plan: WeightPlan, directory: Path) -> None:
        """The tensors of this rank's manifest, with the values of the model in `directory`."""
        manifest = plan.sources[self._rank]
        self._tensors = {
            storage.name: torch.empty(storage.shape, dtype=torch_dtype(storage.dtype), device=self._device)
            for storage in manifest.storages.values()
        }
        load_files(directory, manifest, self._tensors)

    def connect(self, sync: Sync) -> None:
        """Opens the sender that a training rank of a run opens, or the one to compare with."""
        self._plan, rank = sync.plan, self._rank
        if sync.transport == GATHER:
            timeout = sync.rendezvous.timeout_seconds
            self._sender = GatherEverything(
                sync.layout, rank, sync.plan.sources, sync.plan.destinations, sync.bucket_bytes, sync.server, timeout
            )
        else:
            channel = Channel(TransportName(sync.transport), sync.rendezvous, sync.bucket_bytes)
            self._sender = open_sender(channel, sync.plan, rank, sync.files)

    def train(self) -> None:
        """Changes every element, in the same way on every rank that holds it."""
        for tensor in self._tensors.values():
            tensor.neg_()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def send(self, version: int) -> None:
        self._sender.send(version, self._tensors)

    def digests(self) -> tuple[float, dict[int, dict[str, int]]]:
        """Seconds, and what the destinations must have from this rank."""
        began = time.monotonic()
        parts = sent_digests(self._plan, self._rank, self._tensors)
        return time.monotonic() - began, parts

    def gathered_bytes(self) -> int:
        return self._sender.moved_bytes

    def disconnect(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None


class TrainingRanks:
    """All of them, as processes joined by gloo, on one of these devices each. Ended by `close`, or when this process
    ends."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        os.environ.update(ENVIRONMENT)
        ranks = len(devices)
        address = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(ranks)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            spawn.Process(target=serve, args=(rank, ranks, devices[rank], address, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        """Calls a method of every TrainingRank, without waiting."""
        for connection in self._connections:
            connection.send((method, arguments))

    def finish(self) -> list[Any]:
        """Returns the results by rank. Raises RuntimeError with the tracebacks of ranks that failed."""
        answers = [connection.recv() for connection in self._connections]
        if failed := [value for ok, value in answers if not ok]:
            raise RuntimeError("\n".join(failed))
        return [value for _, value in answers]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.start(method, *arguments)
        return self.finish()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def serve(rank: int, ranks: int, device: torch.device, address: str, connection: Connection) -> None:
    """Runs in each process until the connection closes."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    owner = TrainingRank(rank, device)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            answer = True, getattr(owner, method)(*arguments)
        except Exception:  # noqa: BLE001  whatever it is, the benchmark must end with it
            answer = False, traceback.format_exc()
        connection.send(answer)
    owner.disconnect()  # after a failure it is still there
    dist.destroy_process_group()
