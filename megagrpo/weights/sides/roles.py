"""The checkpoint's tensors by what they are to the model: how every side that fuses and shards looks them up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture, Role, Tensor

Roles = Mapping[Role, Tensor]


@dataclass(frozen=True)
class LayerTensors:
    """One layer: the tensors that it has once, and those of each expert in order (none in a dense layer)."""

    roles: Roles
    experts: tuple[Roles, ...]


@dataclass(frozen=True)
class ModelTensors:
    """What is outside the layers (embedding, final norm, head), and the layers in order."""

    roles: Roles
    layers: tuple[LayerTensors, ...]


@lru_cache(maxsize=4)
def model_tensors(arch: Architecture) -> ModelTensors:
    """All of `tensors_of(arch)`. Kept, because every rank asks for it and a large model has a hundred thousand."""
    model: dict[Role, Tensor] = {}
    layers: list[dict[Role, Tensor]] = [{} for _ in range(arch.layers)]
    experts: list[dict[int, dict[Role, Tensor]]] = [defaultdict(dict) for _ in range(arch.layers)]
    for tensor in tensors_of(arch):
        if tensor.layer is None:
            model[tensor.role] = tensor
        elif tensor.expert is None:
            layers[tensor.layer][tensor.role] = tensor
        else:
            experts[tensor.layer][tensor.expert][tensor.role] = tensor
    return ModelTensors(
        model,
        tuple(
            LayerTensors(roles, tuple(of_layer[index] for index in sorted(of_layer)))
            for roles, of_layer in zip(layers, experts, strict=True)
        ),
    )
