"""Low-rank adapters (arXiv:2106.09685) in checkpoint coordinates: the tensors of a PEFT checkpoint, and their holders.

Every adapted matrix W [out, in] of the Hugging Face model has its own A [r, in] and B [out, r]; the adapted model has
W + alpha / r B A in its place. Where a rank fuses matrices into one linear layer, it stacks their A's, and cuts their
B's as it cuts the matrices. A rank's part of the adapters follows from its part of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megagrpo.weights.boxes import Box, Fill, Manifest, Placement, Storage
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Role, Tensor

if TYPE_CHECKING:  # plans count adapters without torch
    import torch

FUSED: tuple[tuple[Role, ...], ...] = (
    ("q", "k", "v"), ("o",), ("gate", "up"), ("down",), ("expert_gate", "expert_up"), ("expert_down",),
)  # fmt: skip
"""The matrices that Megatron fuses into one linear layer, in its order."""

TARGETS: Mapping[Role, str] = {role: f"{role.removeprefix('expert_')}_proj" for fused in FUSED for role in fused}
"""The names of these matrices in recipes, for every family."""

PREFIX, SUFFIX_A, SUFFIX_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def key_a(matrix: str) -> str:
    """Returns PEFT's name of the A of a checkpoint tensor."""
    return PREFIX + matrix.removesuffix(".weight") + SUFFIX_A


def key_b(matrix: str) -> str:
    return PREFIX + matrix.removesuffix(".weight") + SUFFIX_B


def adapted_matrices(arch: Architecture, targets: Collection[str]) -> tuple[Tensor, ...]:
    """Returns the model's matrices that have an adapter, in model order."""
    return tuple(tensor for tensor in tensors_of(arch) if TARGETS.get(tensor.role) in targets)


def adapter_tensors(matrices: Sequence[Tensor], rank: int) -> tuple[Tensor, ...]:
    """Returns A [rank, in] and B [out, rank] of each matrix, under PEFT's names."""
    return tuple(
        replace(matrix, name=name, shape=shape)
        for matrix in matrices
        for name, shape in (
            (key_a(matrix.name), (rank, matrix.shape[1])),
            (key_b(matrix.name), (matrix.shape[0], rank)),
        )
    )


@dataclass(frozen=True)
class MatrixRows:
    """Rows of a rank's linear layer that belong to one matrix: the `part`-th adapted one, None if it has no adapter."""

    at: int
    count: int
    part: int | None


@dataclass(frozen=True)
class FusedLinear:
    """A linear layer of one rank, with the adapters of the matrices fused in it.

    `weight` is its storage in the rank's manifest; `a` [parts x r, columns] and `b` [rows on this rank, r] are the
    storages of the adapters. Rows of `b` without an adapter are zeros. The rank holds columns
    column .. column + columns of the matrices.
    """

    weight: str
    parts: tuple[Tensor, ...]
    runs: tuple[MatrixRows, ...]
    column: int
    columns: int

    @property
    def a(self) -> str:
        return self.weight.removesuffix("weight") + "adapter.lora_A"

    @property
    def b(self) -> str:
        return self.weight.removesuffix("weight") + "adapter.lora_B"


def adapted_linears(arch: Architecture, base: Manifest, targets: Collection[str]) -> tuple[FusedLinear, ...]:
    """Returns the linear layers in a Megatron rank's manifest that have adapters.

    Each tensor rank holds the A's of all matrices of a fused layer, even of a matrix without rows on this rank.
    """
    tensors = {tensor.name: tensor for tensor in tensors_of(arch)}
    siblings = {(t.role, t.layer, t.expert): t for t in tensors.values()}
    linears = []
    for storage, placements in base.by_storage().items():
        first = tensors[placements[0].box.tensor]
        fused = next((roles for roles in FUSED if first.role in roles), ())
        of_linear = (siblings.get((role, first.layer, first.expert)) for role in fused if TARGETS[role] in targets)
        matrices = [matrix for matrix in of_linear if matrix is not None]  # not every MLP has a gate
        if not matrices:
            continue
        index = {matrix.name: number for number, matrix in enumerate(matrices)}
        runs = [MatrixRows(p.at[0], p.box.shape[0], index.get(p.box.tensor)) for p in placements]
        box = placements[0].box
        linears.append(FusedLinear(storage, tuple(matrices), tuple(runs), box.start[1], box.shape[1]))
    return tuple(linears)


def adapter_manifest(base: Manifest, linears: Sequence[FusedLinear], rank: int) -> Manifest:
    """Returns the manifest of the adapters on the holder of `base`, in coordinates of the PEFT checkpoint."""
    storages: dict[str, Storage] = {}
    placements: list[Placement] = []
    fills: list[Fill] = []
    starts = {(p.storage, p.at[0]): p.box.start[0] for p in base.placements}
    for linear in linears:
        held = base.storages[linear.weight]
        storages[linear.a] = Storage(linear.a, (len(linear.parts) * rank, linear.columns), held.dtype)
        storages[linear.b] = Storage(linear.b, (held.shape[0], rank), held.dtype)
        for index, matrix in enumerate(linear.parts):
            box = Box(key_a(matrix.name), (0, linear.column), (rank, linear.columns))
            placements.append(Placement(linear.a, (index * rank, 0), (0, 1), box))
        for run in linear.runs:
            if run.part is None:
                fills.append(Fill(linear.b, (run.at, 0), (run.count, rank)))
                continue
            start = starts[linear.weight, run.at]
            box = Box(key_b(linear.parts[run.part].name), (start, 0), (run.count, rank))
            placements.append(Placement(linear.b, (run.at, 0), (0, 1), box))
    return Manifest(base.holder, storages, tuple(placements), tuple(fills))


def initial_a(matrix: str, rank: int, inputs: int, seed: int) -> torch.Tensor:
    """Returns a matrix's whole A [rank, inputs] before training, float32: uniform within 1 / sqrt(inputs), as in PEFT.

    It depends on the name and the seed only, so that every layout begins with the same numbers.
    """
    import torch

    digest = hashlib.blake2b(f"{seed} {matrix}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return (2 * torch.rand(rank, inputs, generator=generator) - 1) / inputs**0.5


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns weight + scale B A for a block of a matrix, computed in float32 or wider, rounded once to weight's dtype.

    Two blocks that overlap may differ in the last bit of float32: kernels for B A sum in an order that depends on the
    machine and on the size of the block.
    """
    import torch

    exact = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(exact) + scale * (b.to(exact) @ a.to(exact))).to(weight.dtype)


def peft_config(matrices: Sequence[Tensor], rank: int, alpha: float, base_model: str) -> dict[str, Any]:
    """Returns the adapter_config.json of a PEFT checkpoint with these adapters."""
    modules = {matrix.name.removesuffix(".weight").rpartition(".")[2] for matrix in matrices}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,  # PEFT's is a whole number
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }
