"""Blocks of 128 x 128 that share a scale: the ranks that hold them, and those that quantise them (by quantizing.py).

A quantised tensor is two tensors in the common coordinates: NAME_fp8 has its shape, and NAME_scale_inv, the name that
published checkpoints use, has an element for each block.

The training ranks quantise before they send. The ranks that hold the first element of a block quantise it: one rank of
each replica, all with the same bits, so that every engine has a source nearby. If the block is cut between ranks, they
first fetch its missing elements from the others. Both follow from manifests alone:

    served = in_blocks(manifest, shapes)              # an engine rank
    sources, preparation = prepare(held, served)      # driver, before the plan from `sources` to `served`
    # Each training rank, at the same time: the storages of its source.
    Quantizer(own, preparation, rank).tensors(its, member, version)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import Box, Manifest, Place, Placement, Storage, Topology, classes_of
from megagrpo.weights.coverage import as_slice, uncovered
from megagrpo.weights.families import FAMILIES, tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Role
from megagrpo.weights.plan import WeightPlan, make_plan

BLOCK = 128
QUANTIZED: frozenset[Role] = frozenset([
    "q", "k", "v", "o", "q_down", "q_up", "kv_down", "kv_up", "gate", "up", "down",
    "expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down",
])  # fmt: skip
"""The roles in blocks of float8 in a quantised model: all linear layers but the router and the head."""
FLOAT8 = "float8_e4m3fn"
SCALE_SUFFIX = "_scale_inv"
"""The suffix of a tensor's scales, float32: one for each block."""
Shapes = Mapping[str, tuple[int, ...]]
"""[rows, columns] of the tensors that are quantised, by name."""


def float8_name(tensor: str) -> str:
    return f"{tensor}_fp8"


def scale_name(tensor: str) -> str:
    return tensor + SCALE_SUFFIX


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


# --- an engine rank ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def quantized_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, by name, of the tensors that a quantised model has in blocks."""
    return {tensor.name: tensor.shape for tensor in tensors_of(arch) if tensor.role in QUANTIZED}


def family_problems(arch: Architecture) -> list[Problem]:
    """Returns the reason why models of a family cannot be quantised."""
    if FAMILIES[arch.family].sglang.quantizes:
        return []
    needed = "null: its layers are not all in blocks"
    return [Problem("rollout.quantization", f"fp8, of {arch.family}", needed, "quantization: null")]


def in_blocks(manifest: Manifest, shapes: Shapes) -> Manifest:
    """Returns an engine rank's manifest with these tensors quantised: their storages are float8, with scales beside.

    Raises ModelError, naming tensors, if the engine cuts or fuses them within a block.
    """
    quantized = {its.storage for its in manifest.placements if its.box.tensor in shapes}
    problems: list[Problem] = []
    placements = []
    for placement in manifest.placements:
        box = placement.box
        if box.tensor not in shapes:
            placements.append(placement)
        elif error := _cut_within_blocks(placement, shapes[box.tensor]):
            where, needed = f"{box.tensor} in {manifest.holder}", f"whole blocks of {BLOCK} x {BLOCK}"
            problems.append(Problem(where, error, needed, "other sizes of rollout.layout, or quantization: null"))
        else:
            at = (low if axis is None else low // BLOCK for low, axis in zip(placement.at, placement.axes, strict=True))
            placements.append(replace(placement, box=values_of(box)))
            placements.append(Placement(scale_name(placement.storage), tuple(at), placement.axes, scales_of(box)))
    if problems:
        raise ModelError(problems)
    storages = {}
    for name, storage in manifest.storages.items():
        if name in quantized:
            storages[name] = replace(storage, dtype=FLOAT8)
            name = scale_name(name)
            storage = Storage(name, (*storage.shape[:-2], *scale_shape(storage.shape[-2:])), "float32")
        storages[name] = storage
    return replace(manifest, storages=storages, placements=tuple(placements))


def _cut_within_blocks(placement: Placement, shape: Sequence[int]) -> str:
    """Returns where a placement begins or ends within a block; empty if nowhere. A tensor's end is a block's end."""
    box = placement.box
    at = [low for low, axis in zip(placement.at, placement.axes, strict=True) if axis is not None]
    ends = (low + size for low, size in zip(box.start, box.shape, strict=True))
    if any(end % BLOCK for end, whole in zip(ends, shape, strict=True) if end != whole):
        return f"{as_slice(box)} of {list(shape)}"
    if any(low % BLOCK for low in (*box.start, *at)):
        return f"{as_slice(box)} of {list(shape)}, at {at} of {placement.storage}"
    return ""


def values_of(blocks: Box) -> Box:
    return replace(blocks, tensor=float8_name(blocks.tensor))


def scales_of(part: Box) -> Box:
    """Returns the box of the scales of all blocks that a part of a tensor touches: one element for each block."""
    start = tuple(low // BLOCK for low in part.start)
    ends = scale_shape([low + size for low, size in zip(part.start, part.shape, strict=True)])
    return Box(scale_name(part.tensor), start, tuple(end - low for low, end in zip(start, ends, strict=True)))


# --- the training ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """The work of the training ranks before they send: first they fetch the missing elements of their blocks from each
    other, by `fetches` (None: no block is cut between ranks). Then they quantise the tensors of `shapes`."""

    shapes: Shapes
    fetches: WeightPlan | None


def prepare(
    held: Sequence[Manifest], served: Iterable[Manifest], places: Sequence[Place] | None = None
) -> tuple[list[Manifest], Preparation | None]:
    """Returns the manifests that training ranks with `held` send to engines that ask for `served`, and the preparation.
    The preparation is None if no engine asks for blocks. `places` are the ranks'. Raises WeightPlanError."""
    wanted = {its.box.tensor for manifest in served for its in manifest.placements}
    shapes: dict[str, tuple[int, ...]] = {}
    for alike in classes_of(held):
        for box in (its.box for its in alike.manifest.placements):
            if float8_name(box.tensor) in wanted:
                ends = tuple(low + size for low, size in zip(box.start, box.shape, strict=True))
                shapes[box.tensor] = tuple(map(max, ends, shapes.get(box.tensor, ends)))
    if not shapes:
        return list(held), None
    sent, lacking = list(held), list(held)
    for alike in classes_of(held):
        of_class = sending_manifest(alike.manifest, shapes), lacking_manifest(alike.manifest, shapes)
        for rank in alike.members:
            sent[rank], lacking[rank] = (replace(its, holder=held[rank].holder) for its in of_class)
    if not any(its.storages for its in lacking):
        return sent, Preparation(shapes, None)
    topology = Topology(tuple(places), tuple(places)) if places else None
    return sent, Preparation(shapes, make_plan(held, lacking, topology))


@dataclass(frozen=True)
class Share:
    """The blocks that a rank quantises: one of its placements holds their first elements."""

    region: Box
    parts: tuple[Placement, ...]
    """The parts of `region` in the rank's placements."""
    lacks: tuple[Box, ...]
    """The parts of `region` that the rank does not hold."""
    dtype: str


def shares_of(held: Manifest, shapes: Shapes) -> Iterator[Share]:
    placements: dict[str, dict[Box, Placement]] = defaultdict(dict)
    for placement in held.placements:
        if placement.box.tensor in shapes:
            placements[placement.box.tensor][placement.box] = placement
    for tensor, of_tensor in placements.items():
        for box, placement in of_tensor.items():
            # The blocks whose first elements lie in `box`. Those at the tensor's edges may be smaller.
            start = tuple(-(-low // BLOCK) * BLOCK for low in box.start)
            ends = (-(-(low + size) // BLOCK) * BLOCK for low, size in zip(box.start, box.shape, strict=True))
            sizes = tuple(min(end, whole) - low for low, end, whole in zip(start, ends, shapes[tensor], strict=True))
            if min(sizes) <= 0:
                continue
            region = Box(tensor, start, sizes)
            parts = {
                part: its.part(part) for its in of_tensor.values() if (part := its.box.intersect(region)) is not None
            }
            if region in parts:
                parts = {region: parts[region]}
            dtype = held.storages[placement.storage].dtype
            yield Share(region, tuple(parts.values()), tuple(uncovered(region, parts)), dtype)


def sending_manifest(held: Manifest, shapes: Shapes) -> Manifest:
    """Returns the manifest that a training rank sends: its shares of the blocks, and the rest where it lies."""
    return _with_blocks(held, shapes, (share.region for share in shares_of(held, shapes)))


def manifest_of_whole(held: Manifest, shapes: Shapes) -> Manifest:
    """Returns the manifest that an engine receives which holds the whole model, as `held`, and computes with the values
    that blocks stand for: all blocks of each tensor, and the rest where it lies."""
    return _with_blocks(held, shapes, (Box(tensor, (0, 0), shape) for tensor, shape in shapes.items()))


def _with_blocks(held: Manifest, shapes: Shapes, regions: Iterable[Box]) -> Manifest:
    """Returns `held` without the tensors of `shapes`, and with the blocks of `regions`, in storages of their own."""
    placements = [its for its in held.placements if its.box.tensor not in shapes]
    storages = {its.storage: held.storages[its.storage] for its in placements}
    fills = tuple(fill for fill in held.fills if fill.storage in storages)
    for region in regions:
        for box, dtype in ((values_of(region), FLOAT8), (scales_of(region), "float32")):
            storages[storage_name(box)] = Storage(storage_name(box), box.shape, dtype)
            placements.append(_alone(box))
    return Manifest(held.holder, storages, tuple(placements), fills)


def lacking_manifest(held: Manifest, shapes: Shapes) -> Manifest:
    """Returns the manifest of the block elements that a training rank must fetch, each piece in its own storage."""
    boxes = {box: share.dtype for share in shares_of(held, shapes) for box in share.lacks}
    storages = {storage_name(box): Storage(storage_name(box), box.shape, dtype) for box, dtype in boxes.items()}
    return Manifest(held.holder, storages, tuple(map(_alone, boxes)))


def storage_name(box: Box) -> str:
    return f"{box.tensor}{as_slice(box)}"


def _alone(box: Box) -> Placement:
    """Returns the placement of a box in a storage that holds nothing else."""
    return Placement(storage_name(box), (0, 0), (0, 1), box)
