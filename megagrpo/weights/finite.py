"""Weights that are not finite, by name: a model that has one answers with NaN, whatever it is asked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megagrpo.weights.boxes import Manifest
from megagrpo.weights.views import box_view

LARGEST = 2.0**42
"""The product of three larger numbers, as in an MLP, overflows float32: such a weight counts as infinite."""


def broken_storages(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors with a value that is NaN, infinite or beyond LARGEST.

    One pass over each tensor, without a copy; one number of each goes to the host, all of them together.
    """
    named = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not named:
        return []
    extremes = torch.stack([torch.stack(torch.aminmax(tensor.detach())).float() for tensor in named.values()])
    found = zip(named, extremes.tolist(), strict=True)
    return [name for name, (low, high) in found if not -LARGEST <= low <= high <= LARGEST]


def broken_weights(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What is wrong, by name in the Hugging Face checkpoint, in the manifest's storages of these names."""
    found = {}
    for placement in manifest.placements:
        if placement.storage in tensors:
            view = box_view(tensors[placement.storage], placement).float()
            wrong = view[~(view.abs() <= LARGEST)]
            if wrong.numel():
                found[placement.box.tensor] = f"{wrong[0].item():g} in {wrong.numel():,} of {view.numel():,} elements"
    return found or dict.fromkeys(tensors, "a value that is not finite, outside of every box")
