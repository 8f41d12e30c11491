"""Loads Hugging Face safetensors files into the local tensors of a rank: reads only the bytes that the rank owns.

Whole rows are read, parts of rows are copied from a mapping that ends with the copy. While a file stays mapped, as the
safetensors library leaves it, pages that were read once count as the process's own.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch

from megagrpo.errors import CheckpointError, ModelError, Problem, WeightPlanError
from megagrpo.weights.blocks import BLOCK, SCALE_SUFFIX, scale_shape
from megagrpo.weights.boxes import Box, Fill, Manifest, Placement
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides.checkpoint import (
    DTYPES,
    FP8,
    MXFP4,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    MXFP4_VALUES,
    Entry,
    file_tensors,
    manifests,
    weight_files,
)
from megagrpo.weights.views import box_view, fill_padding, stored_tensors, torch_dtype

STORED = DTYPES | {FP8: "float8_e4m3fn", MXFP4: "uint8"}
"""torch's names of the dtypes in files."""
MXFP4_BIAS = 127


class ModelFiles:
    """The weights of a model directory: a manifest of each file, and the values of any part of a tensor."""

    def __init__(self, directory: str | Path, arch: Architecture | None = None) -> None:
        """Looks for the tensors of `arch`, by default config.json's. Raises ModelError with every problem."""
        directory = Path(directory)
        self.manifests: tuple[Manifest, ...] = manifests(directory, arch)
        self.paths = weight_files(directory)
        self.entries = dict(file_tensors(directory))
        storages = [its for manifest in self.manifests for its in manifest.storages.values()]
        self._columns = {its.name: its.shape[-1] for its in storages if its.folded}
        self._packed = {its.name for its in storages if its.name not in self.entries}
        for storage in (its for its in storages if its.folded and its.name not in self._packed):
            path, entry = self.entries[storage.name]
            self.entries[storage.name] = path, replace(entry, shape=storage.shape)
        self._latest: tuple[Any, torch.Tensor] | None = None

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Returns elements start[i] .. start[i] + shape[i] of a stored tensor; fp8 and MXFP4 are dequantised to
        bfloat16. Columns that alternate are read together, and kept for the next call, which mostly asks for others."""
        if name not in self._columns:
            return self._read(name, start, shape)
        region = name, (*start[:-1], 0), (*shape[:-1], self._columns[name])
        if (latest := self._latest) is None or latest[0] != region:
            latest = self._latest = region, self._read(*region)
        values = latest[1][..., start[-1] : start[-1] + shape[-1]]
        # One after another, which transposes fast. Those of MXFP4 are not transposed.
        return values if name in self._packed else values.contiguous()

    def _read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        if name in self._packed:
            return self._dequantized(name, start, shape)
        values = read_region(*self.entries[name], start, shape)
        if values.dtype != torch.float8_e4m3fn:
            return values
        file, scale = self.entries[name + SCALE_SUFFIX]
        if len(scale.shape) < 2:  # one for the whole matrix
            factor = read_region(file, scale, (0,) * len(scale.shape), scale.shape)
            return (values.float() * factor.float()).bfloat16()
        first = tuple(low // BLOCK for low in start)
        last = scale_shape(tuple(low + size for low, size in zip(start, shape, strict=True)))
        covering = tuple(end - begin for begin, end in zip(first, last, strict=True))
        scales = read_region(file, scale, first, covering)
        # Rounded to bfloat16 once, as the conversion published with DeepSeek-V3 does.
        wide = values.float()
        for axis, (low, size) in enumerate(zip(start, shape, strict=True)):
            block_of_element = torch.arange(low, low + size) // BLOCK - low // BLOCK
            scales = scales.index_select(axis, block_of_element)
        return (wide * scales).bfloat16()

    def _dequantized(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a region of what blocks [experts, columns, rows / 32, 16] stand for: [experts, rows, columns]."""
        columns = self._columns[name]
        (expert, row, column), (experts, rows) = start[:3], shape[:2]
        first, end = row // MXFP4_VALUES, -(-(row + rows) // MXFP4_VALUES)
        at, size = (expert, column * columns, first), (experts, shape[2] * columns, end - first)
        blocks = read_region(*self.entries[name + MXFP4_BLOCKS], (*at, 0), (*size, MXFP4_VALUES // 2))
        scales = read_region(*self.entries[name + MXFP4_SCALES], at, size)
        values = dequantized(blocks, scales).narrow(-1, row - first * MXFP4_VALUES, rows)
        return values.transpose(1, 2).view(shape)


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns values of MXFP4, float4 (e2m1) in blocks of 32 with a power of two each (OCP MX 1.0, 5.2).

    Bfloat16 [..., 32 blocks] are made of uint8 [..., blocks, 16] and the blocks' exponents, uint8 [..., blocks]. A byte
    has two values, the first in its lower half. transformers takes a scale of 255, not a number, as 2^128.
    """
    pair = scales.int().unsqueeze(-1) * 256 + blocks
    return _pairs().index_select(0, pair.flatten()).view(torch.bfloat16).view(*scales.shape[:-1], -1)


@cache
def _pairs() -> torch.Tensor:
    """Returns both values of each scale and byte: two bfloat16 as an int32, [256 scales x 256 bytes]."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes]).double()
    byte, factors = torch.arange(256), 2.0 ** (torch.arange(256).double() - MXFP4_BIAS)
    scaled = (factors[:, None] * values).bfloat16()
    return torch.stack([scaled[:, byte % 16], scaled[:, byte // 16]], -1).view(torch.int32).flatten()


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
            alone = replace(origin, at=(0,) * len(origin.at))
            box_view(storages[into.storage], into).copy_(box_view(part, alone))
    fill_padding(manifest, storages)


def read_region(path: Path, entry: Entry, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Returns elements start[i] .. start[i] + shape[i] of a stored tensor. Raises CheckpointError."""
    dtype = torch_dtype(STORED[entry.dtype])
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
