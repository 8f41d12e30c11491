"""Views of local torch tensors by placement: the only code that combines slices, axes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import Manifest, Placement


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype that a Storage names: float32, bfloat16, …"""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a torch dtype: {name}")
    return dtype


def box_view(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Returns the elements of `placement` in its storage's `tensor`, as a view with the box's axes and shape."""
    view = tensor[
        tuple(
            slice(start, start + placement.box.shape[axis]) if axis is not None else start
            for start, axis in zip(placement.at, placement.axes, strict=True)
        )
    ]
    order = [axis for axis in placement.axes if axis is not None]
    return view if order == sorted(order) else view.permute([order.index(axis) for axis in range(len(order))])


def in_storage(values: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Returns a box's values with the axes of its storage, of the placement's local_shape: undoes `box_view`."""
    order = [axis for axis in placement.axes if axis is not None]
    return values.permute(order).reshape(placement.local_shape)


@torch.no_grad()
def fill_padding(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the stated value into every local element that no box describes."""
    for fill in manifest.fills:
        index = tuple(slice(start, start + size) for start, size in zip(fill.at, fill.shape, strict=True))
        tensors[fill.storage][index].fill_(fill.value)


def model_tensors(model: torch.nn.Module, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Returns a model's parameters by name, and the buffers that are weights: those that the manifest names."""
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in manifest.storages}
    folded = {name: storage.shape for name, storage in manifest.storages.items() if storage.folded}
    return tensors | {name: tensors[name].view(shape) for name, shape in folded.items() if name in tensors}


def stored_tensors(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of all the manifest's storages, detached. Raises ModelError, naming every storage that is
    missing, is not in the manifest, or has another shape or dtype than the manifest says."""
    wanted = {name: f"{list(storage.shape)} {storage.dtype}" for name, storage in manifest.storages.items()}
    given = {name: f"{list(its.shape)} {str(its.dtype).removeprefix('torch.')}" for name, its in tensors.items()}
    if wanted != given:
        raise ModelError(
            Problem(
                f"{manifest.holder}: {name}", given.get(name, "no such tensor"), wanted.get(name, "no such storage")
            )
            for name in sorted(wanted.keys() | given.keys())
            if wanted.get(name) != given.get(name)
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}
