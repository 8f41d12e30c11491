"""Hugging Face safetensors files into the local tensors of a rank: only the bytes that the rank owns are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from megagrpo.errors import ModelError, WeightPlanError
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.views import box_view, fill_padding, stored_tensors


@torch.no_grad()
def load(directory: str | Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills `tensors` (by storage name, as in the manifest) from the model in `directory`, cast to their dtype.

    Raises: ModelError listing everything that is missing or has another shape; nothing has been written then.
    """
    directory = Path(directory)
    storages = stored_tensors(manifest, tensors)
    files = checkpoint.manifests(directory)
    try:
        plan = make_plan(files, [manifest])
    except WeightPlanError as error:
        raise ModelError(error.problems) from error
    for index, file in enumerate(files):
        transfers = plan.between(index, 0)
        if not transfers:
            continue
        with safe_open(directory / file.holder, framework="pt") as opened:
            for transfer in transfers:
                come = transfer.source_placement
                part = opened.get_slice(come.storage)[
                    tuple(slice(start, start + size) for start, size in zip(come.at, come.local_shape, strict=True))
                ]
                read = part if None not in come.axes else part.reshape(come.box.shape)
                into = transfer.destination_placement
                box_view(storages[into.storage], into).copy_(read)
    fill_padding(manifest, storages)
