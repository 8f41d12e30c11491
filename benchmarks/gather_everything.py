"""Today's practice of weight sync, for comparison: every training rank gathers every full tensor, one hands them over.

As slime and verl do it, with gloo in place of NCCL: bucket by bucket, parameters are broadcast over the pipeline ranks
and gathered over the tensor ranks, every rank turns them into whole checkpoint tensors, and the first one has the
server load them as a flattened bucket. In its favour: the bucket lies in shared memory and, like all buffers, is kept
from sync to sync; gathers of a bucket run at the same time; nothing is verified in it.
"""

from __future__ import annotations

import base64
import mmap
import pickle
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from megagrpo.errors import Problem
from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, rank_grid
from megagrpo.rollout.client import Endpoint
from megagrpo.rollout.sglang.client import SglangClient
from megagrpo.weights.boxes import ITEM_BYTES, Manifest, Placement, Storage
from megagrpo.weights.transport.disk import Post
from megagrpo.weights.transport.shared_memory import FileArea
from megagrpo.weights.views import box_view, torch_dtype

HEADER = mmap.PAGESIZE
"""Bytes before the bucket in shared memory, where torch keeps its count of users (aten/src/ATen/MapAllocator)."""
TORCH_HEADER_BYTES = 64
NEVER_LAST = 1 << 30
"""A count of users that no server brings to 0: the last user would remove the file."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a pipeline stage: a shard on each of its tensor ranks, and the checkpoint tensors in it."""

    stage: int
    name: str
    wholes: tuple[Storage, ...]
    cut: bool

    @property
    def bytes(self) -> int:
        return sum(map(storage_bytes, self.wholes))


class GatherEverything:
    """One training rank's end; `sources` and `destinations` are the manifests of all training and engine ranks."""

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        sources: Sequence[Manifest],
        destinations: Sequence[Manifest],
        bucket_bytes: int,
        server: Endpoint,
        timeout_seconds: float,
    ) -> None:
        grid = rank_grid(layout)
        self._here, self._sources, self._engine_ranks = grid[rank], sources, len(destinations)
        self._at = {(where.pipeline, where.tensor): where.rank for where in grid if where.data == self._here.data}
        self._tensor_group = _group(grid, rank, lambda where: (where.data, where.pipeline))
        self._pipeline_group = _group(grid, rank, lambda where: (where.data, where.tensor))
        whole = whole_tensors(destinations)
        self._buckets = list(_buckets(self._parameters(layout, whole), bucket_bytes))
        self._placements: dict[tuple[int, str, str], list[Placement]] = defaultdict(list)
        for source, manifest in enumerate(sources):
            for placement in manifest.placements:
                self._placements[source, placement.storage, placement.box.tensor].append(placement)
        self._received: dict[tuple[int, int, str], torch.Tensor] = {}
        largest = max(sum(parameter.bytes for parameter in bucket) for bucket in self._buckets)
        self._client: SglangClient | None = None
        self._area: FileArea | None = None
        if rank == 0:
            self._client = SglangClient(
                server, failure=lambda asked, given: Problem(asked, given), timeout_seconds=timeout_seconds
            )
            self._area = FileArea(f"megagrpo-gathered-{secrets.token_hex(8)}", HEADER + largest)
            self._area.flat[:4].view(torch.int32).fill_(NEVER_LAST)
            self._flat = self._area.flat[HEADER:]
        else:
            self._flat = torch.zeros(largest, dtype=torch.uint8)
        self.moved_bytes = 0
        """In the last sync: what this rank received from others, and what it handed over."""

    @torch.no_grad()
    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The server has an update open. All ranks call it at the same time."""
        self.moved_bytes = 0
        for bucket in self._buckets:
            self._spread_over_stages(bucket, tensors)
            self._gather_shards(bucket, tensors)
            end, entries = 0, []
            for parameter in bucket:
                for whole in parameter.wholes:
                    begin, end = end, end + storage_bytes(whole)
                    entries.append((whole.name, whole.shape, torch_dtype(whole.dtype), begin, end))
                    self._put_together(parameter, whole, view_in(self._flat, begin, whole), tensors)
            if self._client is not None:
                self._hand_over(self._client.post, end, entries)
            dist.barrier()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._area is not None:
            self._area.close()

    def _spread_over_stages(self, bucket: Sequence[Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
        """Every pipeline rank gets the shards of the others that have its tensor rank."""
        if self._pipeline_group is None:
            return
        works = []
        for parameter in bucket:
            shard = self._shard(parameter, self._here.tensor, tensors)
            owner = self._at[parameter.stage, self._here.tensor]
            works.append(dist.broadcast(shard, owner, group=self._pipeline_group, async_op=True))
            self._count(shard, received=parameter.stage != self._here.pipeline)
        _finish(works)

    def _gather_shards(self, bucket: Sequence[Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
        """Every tensor rank gets those of the others."""
        if self._tensor_group is None:
            return
        works = []
        for parameter in bucket:
            if not parameter.cut:
                continue
            ranks = range(dist.get_world_size(self._tensor_group))
            shards = [self._shard(parameter, tensor, tensors) for tensor in ranks]
            own = shards[self._here.tensor]
            works.append(dist.all_gather(shards, own, group=self._tensor_group, async_op=True))
            for tensor in ranks:
                self._count(own, received=tensor != self._here.tensor)
        _finish(works)

    def _put_together(
        self, parameter: Parameter, whole: Storage, target: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        ranks = dist.get_world_size(self._tensor_group) if self._tensor_group is not None and parameter.cut else 1
        for tensor in range(ranks) if ranks > 1 else [self._here.tensor]:
            shard = self._shard(parameter, tensor, tensors)
            for placement in self._placements[self._at[parameter.stage, tensor], parameter.name, whole.name]:
                box = placement.box
                region = (slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))
                target[tuple(region)].copy_(box_view(shard, placement))

    def _hand_over(self, post: Post, end: int, entries: Sequence[Any]) -> None:
        area = self._area
        if area is None:
            raise RuntimeError("only the first rank hands over")
        payload = flattened_bucket(area, end, entries)
        body = {"load_format": "flattened_bucket", "flush_cache": False}
        post("/update_weights_from_tensor", body | {"serialized_named_tensors": [payload] * self._engine_ranks})
        self.moved_bytes += end

    def _shard(self, parameter: Parameter, tensor: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if (parameter.stage, tensor) == (self._here.pipeline, self._here.tensor):
            return tensors[parameter.name].detach()
        key = parameter.stage, tensor, parameter.name
        if key not in self._received:
            storage = self._sources[self._at[parameter.stage, tensor]].storages[parameter.name]
            self._received[key] = torch.zeros(storage.shape, dtype=torch_dtype(storage.dtype))
        return self._received[key]

    def _count(self, shard: torch.Tensor, received: bool) -> None:
        self.moved_bytes += shard.nbytes if received else 0

    def _parameters(self, layout: ParallelLayout, whole: Mapping[str, Storage]) -> Iterator[Parameter]:
        seen: set[str] = set()
        for stage in range(layout.pipeline):
            first, last = (self._sources[self._at[stage, tensor]] for tensor in (0, layout.tensor - 1))
            boxes = [{placement.box for placement in manifest.placements} for manifest in (first, last)]
            by_storage = sorted(first.placements, key=lambda placement: placement.storage)
            for name, placements in groupby(by_storage, key=lambda placement: placement.storage):
                held = {placement.box for placement in placements}
                names = sorted({box.tensor for box in held} - seen)  # tied embeddings are on two stages
                seen |= set(names)
                if names:
                    yield Parameter(stage, name, tuple(whole[of] for of in names), cut=not held <= boxes[1])


def _buckets(parameters: Iterator[Parameter], bucket_bytes: int) -> Iterator[list[Parameter]]:
    bucket: list[Parameter] = []
    for parameter in parameters:
        if bucket and sum(of.bytes for of in bucket) + parameter.bytes > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def _group(grid: Sequence[RankCoordinates], rank: int, key: Callable[[RankCoordinates], Any]) -> Any:
    """The process group of the ranks that have this rank's key; None if it is alone. Every rank makes every group."""
    own = None
    for value in sorted({key(where) for where in grid}):
        members = [where.rank for where in grid if key(where) == value]
        if len(members) > 1:
            group = dist.new_group(members)
            own = group if rank in members else own
    return own


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def whole_tensors(destinations: Sequence[Manifest]) -> dict[str, Storage]:
    """By name: every checkpoint tensor of which these destinations hold a part, whole, in their dtype.

    Tensors with larger elements come first: each then begins at a multiple of its element's size, without gaps.
    """
    ends: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for manifest in destinations:
        for placement in manifest.placements:
            box = placement.box
            end = tuple(start + size for start, size in zip(box.start, box.shape, strict=True))
            ends[box.tensor] = tuple(map(max, ends.get(box.tensor, end), end))
            dtypes.setdefault(box.tensor, manifest.storages[placement.storage].dtype)
    return {
        name: Storage(name, ends[name], dtypes[name])
        for name in sorted(ends, key=lambda name: -ITEM_BYTES[dtypes[name]])
    }


def storage_bytes(storage: Storage) -> int:
    return prod(storage.shape) * ITEM_BYTES[storage.dtype]


def view_in(flat: torch.Tensor, begin: int, storage: Storage) -> torch.Tensor:
    """The storage that begins at this byte of `flat`, in its dtype and shape."""
    return flat[begin : begin + storage_bytes(storage)].view(torch_dtype(storage.dtype)).view(storage.shape)


# --- what SGLang is given: a pickle of torch's own functions for mapping shared memory, with our arguments ------------


def flattened_bucket(
    area: FileArea, size: int, entries: Sequence[tuple[str, tuple[int, ...], torch.dtype, int, int]]
) -> str:
    """serialized_named_tensors of load_format "flattened_bucket", whose `size` bytes begin at HEADER of the area.

    `entries` are name, shape, dtype, first byte and end of each tensor. SGLang unpickles with a short list of permitted
    names (SafeUnpickler in sglang/srt/utils/common.py, 0.5.23).
    """
    metadata = [
        SimpleNamespace(
            name=name, shape=torch.Size(shape), dtype=dtype, start_idx=begin, end_idx=end, numel=end - begin
        )
        for name, shape, dtype, begin, end in entries
    ]
    flat = _FileTensor(_Bytes(_MappedFile(area.ticket(0), area.flat.numel() - TORCH_HEADER_BYTES)), size)
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata}, protocol=4)).decode()


@dataclass(frozen=True, eq=False)
class _MappedFile:
    name: str
    bytes: int

    def __reduce__(self) -> tuple[Any, ...]:
        # No manager's address: the server's torch starts its own helper, which ends with the server.
        arguments = (torch.UntypedStorage, b"", f"/{self.name}".encode(), self.bytes)
        return reductions.rebuild_storage_filename, arguments


@dataclass(frozen=True, eq=False)
class _Bytes:
    storage: _MappedFile

    def __reduce__(self) -> tuple[Any, ...]:
        return reductions.rebuild_typed_storage, (self.storage, torch.uint8)


@dataclass(frozen=True, eq=False)
class _FileTensor:
    bytes: _Bytes
    size: int

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor, (self.bytes, HEADER - TORCH_HEADER_BYTES, (self.size,), (1,))
