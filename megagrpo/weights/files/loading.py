"""Hugging Face safetensors files into the local tensors of a rank: only the bytes that the rank owns are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megagrpo.errors import ModelError, WeightPlanError
from megagrpo.weights.boxes import Fill, Manifest, Placement
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files import fp8_blocks
from megagrpo.weights.files.fp8_blocks import SCALE_SUFFIX
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.views import box_view, fill_padding, stored_tensors


@torch.no_grad()
def load_files(
    directory: str | Path,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    arch: Architecture | None = None,
) -> None:
    """Fills `tensors` (by storage name, as in the manifest) from the model in `directory`, cast to their dtype.

    `arch` is what the manifest is of, if not what config.json describes: a critic starts from a language model, or from
    one with a value head. Optional tensors (Tensor.optional) that the files lack become zeros. Weights in fp8 with
    scales are read as the bfloat16 that they stand for.

    Raises: ModelError listing everything that is missing or has another shape; nothing has been written then.
    """
    directory = Path(directory)
    storages = stored_tensors(manifest, tensors)
    files = checkpoint.manifests(directory, arch)
    if arch is not None:
        manifest = _without_missing(manifest, arch, files)
    try:
        plan = make_plan(files, [manifest])
    except WeightPlanError as error:
        raise ModelError(error.problems) from error
    scales = _Scales(directory)
    for index, file in enumerate(files):
        transfers = plan.between(index, 0)
        if not transfers:
            continue
        with safe_open(directory / file.holder, framework="pt") as opened:
            for transfer in transfers:
                come = transfer.source_placement
                part = _region(opened, come.storage, come.at, come.local_shape)
                if part.dtype == torch.float8_e4m3fn:
                    part = fp8_blocks.dequantized(part, come.at, scales.of(come, opened, file.holder))
                read = part if None not in come.axes else part.reshape(come.box.shape)
                into = transfer.destination_placement
                box_view(storages[into.storage], into).copy_(read)
    fill_padding(manifest, storages)


def _without_missing(manifest: Manifest, arch: Architecture, files: Sequence[Manifest]) -> Manifest:
    """The manifest with zeros in place of optional tensors that are in none of the files."""
    found = {placement.box.tensor for file in files for placement in file.placements}
    missing = {tensor.name for tensor in tensors_of(arch) if tensor.optional and tensor.name not in found}
    new = [placement for placement in manifest.placements if placement.box.tensor in missing]
    return replace(
        manifest,
        placements=tuple(placement for placement in manifest.placements if placement.box.tensor not in missing),
        fills=(*manifest.fills, *(Fill(placement.storage, placement.at, placement.local_shape) for placement in new)),
    )


def _region(opened: Any, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    region: torch.Tensor = opened.get_slice(name)[
        tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))
    ]
    return region


class _Scales:
    """The scales of weights in fp8. They may lie in another file than the weight."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def _files(self) -> dict[str, tuple[Path, checkpoint.Entry]]:
        return checkpoint.fp8_scales(self._directory)

    def of(self, part: Placement, opened: Any, holder: str) -> torch.Tensor:
        """Those that a part of a weight in the file `opened` needs."""
        path, _ = self._files[part.storage]
        name, region = part.storage + SCALE_SUFFIX, fp8_blocks.scale_region(part.at, part.local_shape)
        if path.name == holder:
            return _region(opened, name, *region)
        with safe_open(path, framework="pt") as other:
            return _region(other, name, *region)
