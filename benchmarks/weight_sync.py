"""Weight sync into a real SGLang server on this machine: every transport, beside gathering everything.

    make benchmark-sync                             # installs SGLang for CPUs, runs this
    python benchmarks/weight_sync.py --small        # a quick look, with a model that is too small to say anything
    python benchmarks/weight_sync.py --device cuda  # one GPU or more, with SGLang for them: beside a copy on a GPU

A random dense Qwen2 in bfloat16; two training ranks, or one on a single GPU, are processes with what Megatron ranks
hold. Each has a GPU, and so has each engine rank where there are enough; else they share. For two_hops they always
share, and each GPU, or each training rank on CPUs, counts as a node of its own. Every sync is verified by digests of
every tensor, also those of the practice that is compared with; each brings other values than the one before. The phases
of a sync follow one another here so that each can be timed; in a training run the digests of the training ranks and of
the engine are taken at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from sync_ranks import GATHER, Sync, TrainingRanks

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig, SglangConfig
from megagrpo.rollout.client import Endpoint
from megagrpo.rollout.engine import ServerSpec
from megagrpo.rollout.server import Server
from megagrpo.rollout.sglang.arguments import PROGRAM, server_arguments, server_environment
from megagrpo.rollout.sglang.client import SglangClient
from megagrpo.weights.boxes import ITEM_BYTES, Place, Storage, Topology
from megagrpo.weights.digest import digest_problems, expected_digests
from megagrpo.weights.families import architecture_of, read_architecture, tensors_of
from megagrpo.weights.files.export import begin_export, finish_export, write_part
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.sides import checkpoint, sglang
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from megagrpo.weights.transport.choice import Channel, TransportName
from megagrpo.weights.transport.disk import DiskFiles, plan_for_files, remove_older
from megagrpo.weights.transport.rendezvous import RendezvousHost
from megagrpo.weights.transport.sglang import ServerWeights

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "weight_sync"
DTYPE = "bfloat16"
TIMEOUT_SECONDS = 120.0
START_SECONDS = 900.0
LAYOUTS = (ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(data=2))
RANKS = 2
CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 12, "hidden_size": 1024,
    "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": DTYPE,
}  # fmt: skip
GPU_SIZES = {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 8192}
SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}


def make_model(directory: Path, config: Mapping[str, Any]) -> None:
    """A model with these values in its config.json and random weights, unless it is there."""
    if (directory / "config.json").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    given = directory.with_name(f"{directory.name}-config")
    given.mkdir(parents=True, exist_ok=True)
    (given / "config.json").write_text(json.dumps(config))
    arch, generator = architecture_of(config), torch.Generator().manual_seed(1)
    values = {
        tensor.name: torch.randn(tensor.shape, generator=generator).mul_(0.02).to(torch.bfloat16)
        for tensor in tensors_of(arch)
    }
    export = begin_export(directory, given, arch, DTYPE)
    stored = [Storage(tensor.name, tensor.shape, DTYPE) for tensor in tensors_of(arch)]
    source = checkpoint.new_file(checkpoint.SINGLE, stored)
    write_part(export, make_plan([source], export.files), 0, values)
    finish_export(export)


@dataclass(frozen=True)
class Phases:
    """Seconds of one sync, and of plain copies of the same bytes made just before it, with all cores and with one."""

    copy: float
    one_core_copy: float
    begin: float
    move: float
    rank_digests: float
    engine_digests: float
    end: float
    moved_bytes: int

    @property
    def whole(self) -> float:
        return self.begin + self.move + self.rank_digests + self.engine_digests + self.end


@dataclass(frozen=True)
class Devices:
    """Places of training ranks and of the engine's ranks: the GPUs of each, by place in `names`, or none on CPUs."""

    kind: str
    names: Sequence[str]
    """The names of all GPUs, as CUDA_VISIBLE_DEVICES has them."""
    ranks: tuple[int, ...]
    engine: tuple[int, ...]

    @classmethod
    def of(cls, kind: str, names: Sequence[str], tensor: int) -> list[Devices]:
        """On GPUs of their own, if there are enough, and sharing GPUs. Raises ValueError if the engine has too few."""
        if kind == "cpu":
            return [cls(kind, (), (), ())]
        if len(names) < tensor:
            raise ValueError(f"{len(names)} GPUs for an engine of {tensor}")
        ranks = min(RANKS, len(names))
        firsts = (ranks, 0) if len(names) >= ranks + tensor else (0,)
        return [cls(kind, names, tuple(range(ranks)), tuple(range(first, first + tensor))) for first in firsts]

    @property
    def transports(self) -> tuple[TransportName, ...]:
        """Returns those of exact shards that can be had: NCCL wants a GPU for each process, and a second hop two nodes
        with a training rank beside each engine rank."""
        apart = not set(self.ranks) & set(self.engine)
        hops = len(self.torch_ranks) > 1 and set(self.engine) <= set(self.ranks)
        possible = {TransportName.PROCESS_GROUP: apart, TransportName.TWO_HOPS: hops}
        return (TransportName.SHARED_MEMORY, *(name for name, works in possible.items() if works))

    @property
    def torch_ranks(self) -> list[torch.device]:
        return [torch.device(self.kind, gpu) for gpu in self.ranks] or [torch.device("cpu")] * RANKS

    @property
    def environment(self) -> dict[str, str]:
        """The GPUs of the server: its own GPUs first, and those that send to it."""
        seen = dict.fromkeys((*self.engine, *self.ranks))
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.names[gpu] for gpu in seen)} if seen else {}

    def topology(self, ranks: int, tensor: int, transport: str) -> Topology:
        hops = transport == TransportName.TWO_HOPS
        gpus = self.ranks[:ranks] or (None,) * ranks, self.engine or (None,) * tensor

        def places(of: Sequence[int | None]) -> tuple[Place, ...]:
            nodes = (index % ranks if gpu is None else gpu for index, gpu in enumerate(of))
            return tuple(
                Place(f"node {node}" if hops else "this machine", gpu) for node, gpu in zip(nodes, of, strict=True)
            )

        sources, destinations = map(places, gpus)
        return Topology(sources, destinations, hops)


class Engine:
    """One server, and what is known of it. One for all measurements with its tensor size."""

    def __init__(self, directory: Path, tensor: int, devices: Devices) -> None:
        self.devices, kind = devices, devices.kind
        self.layout = EngineLayoutConfig(tensor=tensor)
        arch = read_architecture(directory)
        self.manifests = [sglang.manifest(arch, self.layout, rank, DTYPE, kind) for rank in range(tensor)]
        options: dict[str, Any] = {} if kind == "cpu" else {"mem_fraction_static": 0.4, "disable_cuda_graph": True}
        spec = ServerSpec(
            name="engine 0",
            log=CACHE / "server.log",
            settings=SglangConfig(**options),
            model_directory=str(directory),
            layout=self.layout,
            dtype=DTYPE,
            device=kind,
            requests_at_once=4,
            tokens_per_request=64,
            threads=os.cpu_count() or 1,
            pause_seconds=TIMEOUT_SECONDS,
        )
        environment = server_environment(kind, tensor, spec.threads) | devices.environment
        with ExitStack() as unready:
            self._server = Server(
                PROGRAM, server_arguments(spec), name=spec.name, log=spec.log, environment=environment
            )
            unready.callback(self._server.close)
            self._server.wait_until_ready(START_SECONDS)
            unready.pop_all()
        self.endpoint = Endpoint(self._server.url, self._server.api_key)
        self._client = SglangClient(self.endpoint, failure=self._server.problem, timeout_seconds=TIMEOUT_SECONDS)
        self.post = self._client.post
        info = self._client.get("/server_info")
        self.weights = ServerWeights(self.post, "engine 0", self.manifests, info)

    def close(self) -> None:
        self.weights.close()
        self._client.close()
        self._server.close()


class Copy:
    """A plain copy of so many bytes within the memory of a device, into pages that are there."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._source = torch.ones(size, dtype=torch.uint8, device=device)
        self._target = torch.ones(size, dtype=torch.uint8, device=device)

    def seconds(self, cores: int) -> float:
        torch.set_num_threads(cores)
        self._finish()
        began = time.monotonic()
        self._target.copy_(self._source)
        self._finish()
        return time.monotonic() - began

    def _finish(self) -> None:
        if self._source.is_cuda:
            torch.cuda.synchronize(self._source.device)


def needed_bytes(plan: WeightPlan) -> int:
    """The lower bound: all that the engine ranks hold of the model, each byte once on each rank that holds it."""
    return sum(
        placement.box.elements * ITEM_BYTES[manifest.storages[placement.storage].dtype]
        for manifest in plan.destinations
        for placement in manifest.placements
    )


def planned_bytes(plan: WeightPlan) -> int:
    """All that a plan's destinations receive, and training ranks that forward it to them."""
    total = 0
    for index in range(len(plan.destinations)):
        for transfer in plan.incoming(index):
            forwarded = transfer.via is None and plan.topology.forwarder(transfer.source, index) is not None
            total += plan.bytes_of(transfer) * (1 + forwarded)
    return total


def moved_bytes(transport: str, plan: WeightPlan, files: DiskFiles, ranks: TrainingRanks) -> int:
    """Bytes that leave a process for another one: into shared memory, a socket or a file."""
    if transport == GATHER:
        return sum(ranks.call("gathered_bytes"))
    return planned_bytes(
        plan_for_files(plan.sources, plan.destinations, files) if transport == TransportName.DISK else plan
    )


class Bench:
    """One layout of the training ranks, and one engine."""

    def __init__(
        self, layout: ParallelLayout, ranks: TrainingRanks, engine: Engine, directory: Path, bucket_bytes: int
    ) -> None:
        self._layout, self._ranks, self._engine, self._bucket_bytes = layout, ranks, engine, bucket_bytes
        arch = read_architecture(directory)
        sources = [LOCAL_SPEC.manifest(arch, layout, where, DTYPE) for where in rank_grid(layout)]
        devices, tensor = engine.devices, len(engine.manifests)
        self._sources = sources
        self._plan = self._plan_for(TransportName.SHARED_MEMORY)
        self._host = RendezvousHost("127.0.0.1", TIMEOUT_SECONDS)
        self._files = DiskFiles(CACHE / "versions", directory, DTYPE)
        shutil.rmtree(self._files.directory, ignore_errors=True)
        self._destinations = range(len(engine.manifests))
        self._version = 0
        # GPUs copy at the same time what their engine ranks hold.
        self.needed_bytes = needed_bytes(self._plan)
        copied = self.needed_bytes // tensor if devices.engine else self.needed_bytes
        self._copy = Copy(copied, torch.device(devices.kind))
        ranks.call("hold", self._plan, directory)

    def _plan_for(self, transport: str) -> WeightPlan:
        served = self._engine.manifests
        topology = self._engine.devices.topology(len(self._sources), len(served), transport)
        return make_plan(self._sources, served, topology)

    def measure(self, transport: str, repetitions: int) -> list[Phases]:
        """The syncs after the first one. Raises WeightSyncError if one of them brings anything but what was sent."""
        rendezvous, post = self._host.rendezvous, self._engine.post
        self._plan = self._plan_for(transport)
        self._ranks.call(
            "connect",
            Sync(
                transport, self._layout, self._plan, rendezvous, self._bucket_bytes, self._files, self._engine.endpoint
            ),
        )
        post("/begin_weight_update", {})
        # GatherEverything writes to the server itself; the engine's end only takes the digests.
        end = TransportName.DISK if transport == GATHER else TransportName(transport)
        channel = Channel(end, rendezvous, self._bucket_bytes)
        self._engine.weights.connect(self._plan, self._destinations, channel)
        post("/end_weight_update", {})
        found = [self._sync(transport) for _ in range(1 + repetitions)][1:]
        self._engine.weights.close()
        self._ranks.call("disconnect")
        shutil.rmtree(self._files.directory, ignore_errors=True)
        return found

    def _sync(self, transport: str) -> Phases:
        self._version += 1
        version, ranks, weights, post = self._version, self._ranks, self._engine.weights, self._engine.post
        ranks.call("train")
        copy, one_core_copy = self._copy.seconds(os.cpu_count() or 1), self._copy.seconds(1)
        times = [time.monotonic()]
        post("/pause_generation", {"mode": "retract"})
        post("/begin_weight_update", {})
        times.append(time.monotonic())
        self._host.open(version, self._destinations)
        ranks.start("send", version)
        if transport != GATHER:
            weights.receive(version)
        ranks.finish()
        times.append(time.monotonic())
        of_ranks = ranks.call("digests")
        times.append(time.monotonic())
        arrived = weights.digests()
        times.append(time.monotonic())
        self._check([digests for _, digests in of_ranks], arrived)
        ending = time.monotonic()
        post("/end_weight_update", {})
        post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        post("/flush_cache", {})
        post("/continue_generation", {})
        end = time.monotonic() - ending
        remove_older(self._files.directory, version)
        begin, move, _, engine_digests = (after - before for before, after in pairwise(times))
        return Phases(
            copy,
            one_core_copy,
            begin,
            move,
            max(seconds for seconds, _ in of_ranks),
            engine_digests,
            end,
            moved_bytes(transport, self._plan, self._files, ranks),
        )

    def _check(self, sent: Iterable[Mapping[int, Mapping[str, int]]], arrived: Sequence[Mapping[str, int]]) -> None:
        expected = expected_digests(sent)
        names = {tensor.name for tensor in tensors_of(read_architecture(self._files.model_directory))}
        problems: list[Problem] = []
        for index, held in zip(self._destinations, arrived, strict=True):
            problems += digest_problems(self._plan.destinations[index].holder, expected[index], held)
            if missing := sorted(names - held.keys()):
                problems.append(Problem(self._plan.destinations[index].holder, f"no digest of {missing[0]}", "one"))
        if problems:
            raise WeightSyncError(problems)


def transports_of(devices: Devices, tensor: int, chosen: Sequence[str]) -> list[str]:
    """Returns what is measured there: the chosen ones that can be; if none are chosen, all, but exact ones alone with
    several tensor ranks."""
    possible = [*([GATHER] if devices.kind == "cpu" else []), *devices.transports, TransportName.DISK]
    return [name for name in chosen if name in possible] if chosen else possible[: None if tensor == 1 else -1]


def rows(
    engine: Engine, ranks: TrainingRanks, directory: Path, transports: Collection[str], chosen: argparse.Namespace
) -> Iterator[list[str]]:
    tensor, devices = engine.layout.tensor, engine.devices
    for layout in LAYOUTS if len(devices.torch_ranks) == RANKS else (ParallelLayout(),):
        bench = Bench(layout, ranks, engine, directory, chosen.bucket_bytes)
        bound = bench.needed_bytes
        for transport in transports:
            found = bench.measure(transport, chosen.repetitions)
            middle = {name: statistics.median(getattr(phases, name) for phases in found) for name in vars(found[0])}
            least = {name: min(getattr(phases, name) for phases in found) for name in vars(found[0])}
            yield [
                str(layout),
                str(tensor),
                str(transport),
                f"{middle['move']:.3f}",
                f"{least['move']:.3f}",
                f"{least['copy']:.3f}",
                f"{least['one_core_copy']:.3f}",
                f"{least['move'] / least['copy']:.1f}",
                f"{bound / least['move'] / 1e9:.1f}",
                f"{bound / least['copy'] / 1e9:.1f}",
                f"{middle['moved_bytes'] / 1e6:.0f}",
                f"{middle['moved_bytes'] / bound:.2f}",
                f"{middle['rank_digests']:.3f}",
                f"{middle['engine_digests']:.3f}",
                f"{middle['begin'] + middle['end']:.3f}",
                f"{statistics.median(phases.whole for phases in found):.3f}",
            ]


HEADER = [
    "training", "engine tensor", "transport", "moving s", "least", "least copy s", "by one core", "least / copy",
    "GB/s", "copy GB/s", "MB moved", "x needed", "digests: ranks s", "engine s", "begin and end s", "all phases s",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model and one repetition: does it run?")
    parser.add_argument("--repetitions", type=int, default=5, help="measured syncs of each kind, after one that is not")
    parser.add_argument("--engines", type=int, nargs="+", default=[1], metavar="TENSOR", help="an engine of each size")
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=[GATHER, *TransportName],
        help="only these; all, but exact ones if TENSOR > 1",
    )
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20, help="largest bucket, of every way")
    chosen = parser.parse_args()
    gpus = torch.cuda.device_count() if chosen.device == "cuda" else 0
    if chosen.device == "cuda" and not gpus:
        parser.error("--device cuda: torch sees no GPU")
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")[:gpus]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    machines = {tensor: Devices.of(chosen.device, names, tensor) for tensor in chosen.engines}
    name, config = ("gpu-model", CONFIG | GPU_SIZES) if gpus else ("model", CONFIG)
    directory = CACHE / ("small" if chosen.small else name)
    if chosen.small:
        chosen.repetitions, chosen.bucket_bytes = 1, 1 << 18
    make_model(directory, CONFIG | SMALL if chosen.small else config)
    cards = f"{gpus} x {torch.cuda.get_device_name()}, " if gpus else ""
    size = sum(prod(tensor.shape) for tensor in tensors_of(read_architecture(directory))) * ITEM_BYTES[DTYPE]
    print(
        f"{size / 1e6:.0f} MB in {DTYPE}, buckets of {chosen.bucket_bytes / (1 << 20):g} MiB, {os.cpu_count()} cores, "
        f"{cards}load average {os.getloadavg()[0]:.1f} before. Medians of {chosen.repetitions} syncs, each verified.\n"
    )
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    with closing(TrainingRanks(machines[chosen.engines[0]][0].torch_ranks)) as ranks:
        for tensor, placements in machines.items():
            measured: set[str] = set()
            for devices in placements:
                possible = transports_of(devices, tensor, chosen.transports or [])
                if not (transports := [name for name in possible if name not in measured]):
                    continue
                measured.update(transports)
                with closing(Engine(directory, tensor, devices)) as engine:
                    for row in rows(engine, ranks, directory, transports, chosen):
                        print("| " + " | ".join(row) + " |", flush=True)
            if missing := [name for name in chosen.transports or [] if name not in measured]:
                print(f"\nNot possible here with an engine of {tensor}: {', '.join(missing)}.")
    print(f"\nLoad average {os.getloadavg()[0]:.1f} afterwards.")


if __name__ == "__main__":
    main()
