"""Marks on parameters, collectives of tensor ranks, checkpoints of activations, and the tracker of random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

_MODEL_PARALLEL_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    for attribute in _MODEL_PARALLEL_ATTRIBUTES:
        if hasattr(tensor, attribute):
            raise RuntimeError(f"Tensor already has attribute '{attribute}' set.")
    for attribute, value in zip(_MODEL_PARALLEL_ATTRIBUTES, (is_parallel, dim, stride), strict=True):
        setattr(tensor, attribute, value)


def get_distributed_world_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def gather_along_first_dim(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if (size := get_distributed_world_size(group)) == 1:
        return part
    whole = part.new_empty((size * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def reduce_scatter_along_first_dim(whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if (size := get_distributed_world_size(group)) == 1:
        return whole
    if whole.shape[0] % size != 0:
        raise ValueError("First dimension of the tensor should be divisible by tensor parallel size")
    part = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


def allreduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if get_distributed_world_size(group) > 1:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
    return tensor


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    yield


def get_all_rng_states() -> dict[str, Tensor]:
    return _states


_states: dict[str, Tensor] = {}


class CudaRNGStatesTracker:
    """megagrpo uses Megatron's own; this one exists because Megatron derives a class from it."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states
