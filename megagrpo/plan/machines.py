"""The machines of a plan: kinds of GPUs, by their makers' data sheets, and how many are in a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megagrpo.plan.assumptions import Assumptions
from megagrpo.recipe.schema import AnyRecipe


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. `flops` are dense bfloat16 matrix products a second, at the data sheet's best.

    `memory_bytes` is what its driver reports as total. `node_bytes_per_second` is to the other GPUs of a node, in each
    direction: NVLink, or PCIe where there is none.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bytes_per_second: float
    node_bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Machines:
    """Nodes that are all alike. `network_bytes_per_second` is of each GPU's share of its node's links, each way."""

    gpu: Gpu
    gpus_per_node: int
    network_bytes_per_second: float


H100 = Gpu("H100", 79 * 2**30, 989e12, 3.35e12, 450e9, "NVIDIA H100 Tensor Core GPU data sheet, SXM5, without sparsity")
GPUS: Mapping[str, Gpu] = {"H100": H100}

A_CPU = Machines(Gpu("CPU", 16 * 2**30, 1e11, 2e10, 5e9, "placeholders, for calibration by a run to scale"), 8, 1e9)
"""For recipes that run on CPUs: what is predicted with it means nothing until it is calibrated."""


def gpu(name: str) -> Gpu:
    """The kind of GPU of that name. Raises RecipeError with the nearest known name."""
    raise NotImplementedError


def machines_of(recipe: AnyRecipe, assumptions: Assumptions) -> Machines | None:
    """The machines that the recipe's cluster names; None if it has no cluster.gpu. Raises RecipeError as `gpu`."""
    raise NotImplementedError
