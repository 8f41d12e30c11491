"""The training state of a rank at one moment, in host memory: from there files are written while training goes on.

    snapshot.take(state)                               # every rank; training waits for it
    files, parts = snapshot.write(root, place)         # every rank, in any thread; no rank waits for another
    files = snapshot.finish(root, place, all_parts)    # rank 0, when all have written

Ranks that hold the same box share the work: torch's plan has one of them write it, balanced by size, and refuses boxes
that overlap or leave gaps. The plan is made, together, for the first snapshot; every later one is the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper

from megagrpo.checkpoint.store import SavedFile, describe
from megagrpo.checkpoint.torch_dist import MEGATRON, METADATA, Stored, TorchFile, write_metadata
from megagrpo.errors import CheckpointError, Problem
from megagrpo.megatron.offload import HostMemory
from megagrpo.megatron.state import FORMAT, TrainingState, adam_steps, generators, generators_key, views
from megagrpo.weights.boxes import Storage
from megagrpo.weights.files import sync_directories

ALIGNMENT = 64
"""Bytes between the starts of copies in host memory are a multiple of it."""
Key = tuple[str, tuple[int, ...]]
"""A tensor of the checkpoint, and where in it a box starts."""


@dataclass(frozen=True)
class Contents:
    """The contents of one rank's file: the tensors of the checkpoint that it has parts of, and where these lie."""

    tensors: Mapping[str, Storage]
    written: Sequence[Stored]


class Snapshot:
    """One rank's part of a training state in host memory. The memory is kept: pinning takes longer than copying."""

    def __init__(self) -> None:
        self._planned: frozenset[Key] | None = None
        self._memory: HostMemory | None = None
        self._copies: list[tuple[Key, torch.Tensor]] = []
        self._generators: dict[str, Any] = {}
        self._tensors: dict[str, Storage] = {}
        self._common: dict[str, Any] = {}
        self._writing = Lock()

    @property
    def host_bytes(self) -> int:
        return len(self._memory.bytes) if self._memory else 0

    @torch.no_grad()
    def take(self, state: TrainingState) -> None:
        """Copies this rank's part. Every rank calls it. Waits until the snapshot before is written.

        Raises CheckpointError, on every rank if the plan cannot be made.
        """
        steps = adam_steps(state.optimizer)
        if len(steps) > 1:
            raise ValueError(f"parameters have taken different numbers of Adam steps: {sorted(steps)}")
        with self._writing:
            if self._planned is None:
                self._planned = _plan(state)
            self._common = {"format": FORMAT, "layout": asdict(state.layout), "optimizer": state.kind}
            self._common["adam_step"] = max(steps, default=0)
            self._generators = generators()
            boxes = [(key, box, view) for key, box, view in views(state) if (key, box.start) in self._planned]
            self._tensors = {
                key: Storage(key, state.shapes[box.tensor], str(view.dtype).removeprefix("torch."))
                for key, box, view in boxes
            }
            self._copy([((key, box.start), view) for key, box, view in boxes])

    def _copy(self, parts: Sequence[tuple[Key, torch.Tensor]]) -> None:
        sizes = [-(-view.nbytes // ALIGNMENT) * ALIGNMENT for _, view in parts]
        if self._memory is None:
            try:
                self._memory = HostMemory(max(sum(sizes), 1), pinned=torch.cuda.is_available())
            except OSError as error:
                problem = Problem("host memory for a checkpoint", str(error), f"{sum(sizes)} bytes on this rank")
                raise CheckpointError(problem) from error
        self._copies, start = [], 0
        for (key, view), size in zip(parts, sizes, strict=True):
            copy = self._memory.bytes[start : start + view.nbytes].view(view.dtype).view(view.shape)
            copy.copy_(view, non_blocking=True)
            self._copies.append((key, copy))
            start += size
        torch.cuda.synchronize()

    def write(self, root: Path, place: str) -> tuple[SavedFile, Contents]:
        """Writes this rank's file into directory `place` of `root`. Returns the file, and its contents for `finish`.

        Raises CheckpointError; what the directory then holds is worthless.
        """
        directory = root / place
        path = directory / f"__{dist.get_rank()}_0.distcp"
        try:
            with self._writing:
                directory.mkdir(exist_ok=True)
                with TorchFile(path) as file:
                    written = [file.add(generators_key(), None, self._generators)]
                    for (key, start), copy in self._copies:
                        written.append(file.add(key, start, copy.clone()))  # torch saves all memory that a view is of
                return describe(root, path), Contents(self._tensors, written)
        except OSError as error:
            raise CheckpointError(_not_written(directory, error)) from error

    def finish(self, root: Path, place: str, of_ranks: Sequence[Contents]) -> list[SavedFile]:
        """Writes the list of contents and what is common to all ranks. Raises CheckpointError."""
        directory = root / place
        try:
            tensors = dict(item for of_rank in of_ranks for item in of_rank.tensors.items())
            write_metadata(directory, tensors, [part for of_rank in of_ranks for part in of_rank.written])
            with (directory / COMMON_STATE_FNAME).open("wb") as stream:
                torch.save(self._common, stream)
                stream.flush()
                os.fsync(stream.fileno())
            sync_directories([directory])
            names = (METADATA, COMMON_STATE_FNAME, MEGATRON)
            return [describe(root, directory / name) for name in names]
        except OSError as error:
            raise CheckpointError(_not_written(directory, error)) from error


def _plan(state: TrainingState) -> frozenset[Key]:
    """Returns key and start of each box that this rank writes. Collective."""
    ranks = _DistWrapper(None, True, 0)

    def held() -> SavePlan:
        """Lists this rank's boxes: of any size and place, not a regular grid."""
        items = {}
        for key, box, view in views(state):
            start, size = torch.Size(box.start), torch.Size(state.shapes[box.tensor])
            chunk = ChunkStorageMetadata(start, torch.Size(box.shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=view.dtype), size)
            items[key, box.start] = WriteItem(MetadataIndex(key, start), WriteItemType.SHARD, tensor_data=data)
        return SavePlan(list(items.values()))

    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        plan = ranks.reduce_scatter("plan", held, lambda plans: planner.create_global_plan(plans)[0])
    except CheckpointException as error:
        causes = dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        raise CheckpointError(Problem("plan of a checkpoint", cause.splitlines()[0]) for cause in causes) from error
    return frozenset((item.index.fqn, tuple(item.index.offset or ())) for item in plan.items)


def _not_written(directory: Path, error: OSError) -> Problem:
    return Problem(f"{directory} cannot be written", given=f"{type(error).__name__}: {error}".splitlines()[0])
