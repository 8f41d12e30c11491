"""Where a conversion reads: any checkpoint as boxes of its model's Hugging Face tensors, a part at a time."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement
from megagrpo.weights.coverage import check_sources
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.sides.torch_dist import common_dtype
from megagrpo.weights.views import box_view, torch_dtype

Kind = Literal["hugging face", "torch_dist", "training checkpoint"]
RegionReader = Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""(storage, start, shape) to the values of that part of it. Raises CheckpointError."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from. `model_directory` has the config.json that belongs to it, and the tokenizer."""

    kind: Kind
    directory: Path
    model_directory: Path
    architecture: Architecture
    dtypes: Mapping[str, str]
    left_out: tuple[str, ...]
    """Names of stored tensors that are not of the model."""
    files: tuple[Path, ...]
    _held: Mapping[str, Sequence[tuple[Placement, RegionReader]]]
    _forget: Callable[[], None]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tensors_of(self.architecture)

    def dtypes_as(self, dtype: str | None) -> dict[str, str]:
        """Of each tensor in a model of `dtype`; None: as stored."""
        if dtype is None:
            return dict(self.dtypes)
        return {tensor.name: tensor.stored_as(dtype) for tensor in self.tensors}

    def read(self, box: Box) -> torch.Tensor:
        """The values of `box`, in its shape and the dtype that dtypes[box.tensor] says.

        Raises CheckpointError if they cannot be read.
        """
        values = torch.empty(box.shape, dtype=torch_dtype(self.dtypes[box.tensor]))
        for placement, region in self._held[box.tensor]:
            common = placement.box.intersect(box)
            if common is None:
                continue
            part = placement.part(common)
            read = Placement(part.storage, (0,) * len(part.at), part.axes, common)
            found = box_view(region(part.storage, part.at, part.local_shape), read)
            if common == box and found.dtype == values.dtype:
                return found.contiguous()
            at = (slice(s - b, s - b + n) for s, b, n in zip(common.start, box.start, common.shape, strict=True))
            values[tuple(at)].copy_(found)
        return values

    def forget(self) -> None:
        """Frees what was kept because neighbouring tensors lie in the same place."""
        self._forget()


def make_source(
    kind: Kind,
    directory: Path,
    model_directory: Path,
    arch: Architecture,
    held: Sequence[tuple[Manifest, RegionReader]],
    left_out: Sequence[str],
    files: Sequence[Path],
    forget: Callable[[], None],
) -> Source:
    """Raises: ModelError for a dtype that is not known, WeightPlanError if parts of tensors are missing."""
    check_sources(tensors_of(arch), [manifest for manifest, _ in held])
    placements: dict[str, list[tuple[Placement, RegionReader]]] = defaultdict(list)
    found: dict[str, set[str]] = defaultdict(set)
    for manifest, region in held:
        for placement in manifest.placements:
            placements[placement.box.tensor].append((placement, region))
            found[placement.box.tensor].add(manifest.storages[placement.storage].dtype)
    if unknown := sorted({dtype for of_tensor in found.values() for dtype in of_tensor if dtype not in ITEM_BYTES}):
        given = f"tensors in {', '.join(unknown)}"
        raise ModelError(Problem(str(directory), given, f"one of {', '.join(ITEM_BYTES)}"))
    dtypes = {name: common_dtype(of_tensor) for name, of_tensor in found.items()}
    return Source(
        kind, directory, model_directory, arch, dtypes, tuple(sorted(left_out)), tuple(files), placements, forget
    )


def pieces(box: Box, item_bytes: int, limit_bytes: int) -> list[Box]:
    """The box as runs of rows of at most `limit_bytes` each, or of one row where a row is longer."""
    if not box.shape:
        return [box]
    step = max(1, limit_bytes // (math.prod(box.shape[1:]) * item_bytes))
    return [
        Box(box.tensor, (box.start[0] + low, *box.start[1:]), (min(step, box.shape[0] - low), *box.shape[1:]))
        for low in range(0, box.shape[0], step)
    ]


def whole(tensor: Tensor) -> Box:
    return Box(tensor.name, (0,) * len(tensor.shape), tensor.shape)


def fingerprint(source: Source) -> str:
    """Changes when any file of the source changes, as far as sizes and times tell."""
    described = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    return json.dumps([source.kind, str(source.directory), described])
