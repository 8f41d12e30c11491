"""Loads Hugging Face safetensors files into the local tensors of a rank: reads only the bytes that the rank owns.

Whole rows are read, parts of rows are copied from a mapping that ends with the copy. While a file stays mapped, as the
safetensors library leaves it, pages that were read once count as the process's own.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from megagrpo.errors import CheckpointError, ModelError, Problem, WeightPlanError
from megagrpo.weights.blocks import BLOCK, SCALE_SUFFIX, scale_shape
from megagrpo.weights.boxes import Box, Fill, Manifest, Placement
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides.checkpoint import DTYPES, FP8, Entry, manifests, read_header, weight_files
from megagrpo.weights.views import box_view, fill_padding, stored_tensors, torch_dtype


class ModelFiles:
    """The weights of a model directory: a manifest of each file, and the values of any part of a tensor."""

    def __init__(self, directory: str | Path, arch: Architecture | None = None) -> None:
        """Looks for the tensors of `arch`, by default config.json's. Raises ModelError with every problem."""
        directory = Path(directory)
        self.manifests: tuple[Manifest, ...] = manifests(directory, arch)
        self.paths = weight_files(directory)
        self._entries = {name: (path, entry) for path in self.paths for name, entry in read_header(path).items()}

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Returns elements start[i] .. start[i] + shape[i] of a stored tensor; fp8 is dequantised to bfloat16."""
        values = read_region(*self._entries[name], start, shape)
        if values.dtype != torch.float8_e4m3fn:
            return values
        first = tuple(low // BLOCK for low in start)
        last = scale_shape(tuple(low + size for low, size in zip(start, shape, strict=True)))
        covering = tuple(end - begin for begin, end in zip(first, last, strict=True))
        scales = read_region(*self._entries[name + SCALE_SUFFIX], first, covering)
        # Rounded to bfloat16 once, as the conversion published with DeepSeek-V3 does.
        wide = values.float()
        for axis, (low, size) in enumerate(zip(start, shape, strict=True)):
            block_of_element = torch.arange(low, low + size) // BLOCK - low // BLOCK
            scales = scales.index_select(axis, block_of_element)
        return (wide * scales).bfloat16()


@torch.no_grad()
def load_files(
    directory: str | Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor], arch: Architecture | None = None
) -> None:
    """Fills `tensors` (by storage name, as in the manifest) from the model in `directory`, cast to their dtype.

    `arch` is the architecture of the manifest where config.json describes another one: a critic starts from a language
    model, or from a model with a value head. Optional tensors (Tensor.optional) that the files lack become zeros.
    Raises ModelError with every problem, before anything is written; CheckpointError if a file cannot be read.
    """
    storages = stored_tensors(manifest, tensors)
    files = ModelFiles(directory, arch)
    if arch is not None:
        held = {placement.box.tensor for file in files.manifests for placement in file.placements}
        missing = {tensor.name for tensor in tensors_of(arch) if tensor.optional and tensor.name not in held}
        zeros = [placement for placement in manifest.placements if placement.box.tensor in missing]
        manifest = replace(
            manifest,
            placements=tuple(placement for placement in manifest.placements if placement.box.tensor not in missing),
            fills=(*manifest.fills, *(Fill(zero.storage, zero.at, zero.local_shape) for zero in zeros)),
        )
    try:
        plan = make_plan(files.manifests, [manifest])
    except WeightPlanError as error:
        raise ModelError(error.problems) from error
    for index in range(len(files.manifests)):
        for transfer in plan.direct(index, 0):
            origin, into = transfer.source_placement, transfer.destination_placement
            part = files.read(origin.storage, origin.at, origin.local_shape)
            values = part.reshape(origin.box.shape) if None in origin.axes else part
            box_view(storages[into.storage], into).copy_(values)
    fill_padding(manifest, storages)


def read_region(path: Path, entry: Entry, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Returns elements start[i] .. start[i] + shape[i] of a stored tensor. Raises CheckpointError."""
    dtype = torch.float8_e4m3fn if entry.dtype == FP8 else torch_dtype(DTYPES[entry.dtype])
    cut = next((axis for axis, size in enumerate(shape) if size > 1), len(shape))
    try:
        with path.open("rb", buffering=0) as file:
            if shape[cut + 1 :] != entry.shape[cut + 1 :]:  # parts of rows: as many reads would take ten times as long
                return _mapped_part(file, entry, start, shape, dtype)
            values = torch.empty(shape, dtype=dtype)
            _, (offset,) = entry.runs(start, shape, dtype.itemsize)
            into, at = memoryview(values.view(-1).view(torch.uint8).numpy()), entry.begin + offset
            while into:
                if not (count := os.preadv(file.fileno(), [into], at)):
                    raise OSError(f"it ends before byte {at + len(into)}")
                into, at = into[count:], at + count
    except OSError as error:
        raise CheckpointError(Problem(str(path), error.strerror or str(error), "a file that can be read")) from error
    return values


def _mapped_part(
    file: IO[bytes], entry: Entry, start: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Returns a copy of a region, from memory that is mapped until this returns. Raises OSError."""
    first_page = entry.begin - entry.begin % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(file.fileno(), entry.end - first_page, access=mmap.ACCESS_COPY, offset=first_page)
    except ValueError as error:
        raise OSError(f"it ends before byte {entry.end}: {error}") from error
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    stored = torch.frombuffer(mapped, dtype=torch.uint8, offset=entry.begin - first_page)
    rows = stored.view(*entry.shape[:-1], entry.shape[-1] * dtype.itemsize)  # as bytes, which need no alignment
    in_bytes = Box("", (*start[:-1], start[-1] * dtype.itemsize), (*shape[:-1], shape[-1] * dtype.itemsize))
    return box_view(rows, Placement.whole(in_bytes)).contiguous().view(dtype)
