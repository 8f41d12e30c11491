"""A placement as a view of a local torch tensor: the one place where slices, axes and dtypes meet."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import Manifest, Placement


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a Storage names: float32, bfloat16, …"""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a torch dtype: {name}")
    return dtype


def box_view(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The elements of `placement` in its storage's `tensor`, as a view with the axes and the shape of the box."""
    view = tensor[
        tuple(
            slice(start, start + placement.box.shape[axis]) if axis is not None else start
            for start, axis in zip(placement.at, placement.axes, strict=True)
        )
    ]
    order = [axis for axis in placement.axes if axis is not None]
    return view if order == sorted(order) else view.permute([order.index(axis) for axis in range(len(order))])


@torch.no_grad()
def fill_padding(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the stated value into every local element that no box describes."""
    for fill in manifest.fills:
        index = tuple(slice(start, start + size) for start, size in zip(fill.at, fill.shape, strict=True))
        tensors[fill.storage][index].fill_(fill.value)


def stored_tensors(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the manifest's storages, detached, after checking that they are what the manifest says.

    Raises: ModelError naming every storage that is missing, is not in the manifest, or has another shape or dtype.
    """
    problems = []
    for name in manifest.storages.keys() - tensors.keys():
        problems.append(Problem(f"{manifest.holder}: {name}", "no such tensor", "a tensor for every storage"))
    for name in tensors.keys() - manifest.storages.keys():
        problems.append(Problem(f"{manifest.holder}: {name}", "a tensor", "nothing: no storage has this name"))
    found = {}
    for name, storage in manifest.storages.items():
        if name in tensors:
            found[name] = tensors[name].detach()
            given = f"{list(found[name].shape)} {str(found[name].dtype).removeprefix('torch.')}"
            if given != (needed := f"{list(storage.shape)} {storage.dtype}"):
                problems.append(Problem(f"{manifest.holder}: {name}", given, needed))
    if problems:
        raise ModelError(sorted(problems, key=str))
    return found
