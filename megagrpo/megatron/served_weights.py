"""The policy's weights as quantised engines hold them, for the passes that train it (train.quantization).

Each weight that engines have in blocks is replaced by the values that its blocks stand for, bit for bit. The gradients
of these values go to the weights themselves: a straight-through estimator (arXiv:1308.3432, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.megatron.model import named_tensors, other_weights
from megagrpo.megatron.state import parameters_of
from megagrpo.weights.blocks import quantized_shapes, scale_shape, scales_of
from megagrpo.weights.boxes import Box, Manifest, Placement
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.quantizing import largest_in_blocks, scales_for, through_float8
from megagrpo.weights.views import box_view


class ServedWeights:
    """The weights in `chunks`, of which `held` is this rank's manifest, through float8. Collective over all ranks."""

    def __init__(self, chunks: Sequence[torch.nn.Module], held: Manifest, arch: Architecture) -> None:
        self._chunks, shapes = chunks, quantized_shapes(arch)
        self._placements = [its for its in held.placements if its.box.tensor in shapes]
        experts = {tensor.name for tensor in tensors_of(arch) if tensor.expert is not None}
        mine = dict.fromkeys(its.box.tensor for its in self._placements)
        self._sharing: list[tuple[dist.ProcessGroup, dict[str, tuple[int, ...]]]] = []
        """Ranks that may hold parts of the same blocks, and the shapes of the scales of all tensors that they hold."""
        for group, of_group in (
            (parallel_state.get_tensor_model_parallel_group(), [name for name in mine if name not in experts]),
            (parallel_state.get_expert_tensor_parallel_group(), [name for name in mine if name in experts]),
        ):
            of_ranks: list[list[str]] = [[] for _ in range(group.size())]
            dist.all_gather_object(of_ranks, of_group, group)
            names = sorted({name for names in of_ranks for name in names})
            self._sharing.append((group, {name: scale_shape(shapes[name]) for name in names}))

    def in_place_of_policy(self) -> AbstractContextManager[None]:
        """Puts the served weights into the chunks inside the block: a copy of all weights that are quantised."""
        weights, parameters = self.weights(), parameters_of(self._chunks)
        return other_weights([parameters[name] for name in weights], weights.values())

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Returns copies of all parameters with quantised weights, which are the served ones there."""
        held = named_tensors(self._chunks)
        copies, largest = {its.storage: held[its.storage].clone() for its in self._placements}, self._largest(held)
        for placement in self._placements:
            view, box = box_view(copies[placement.storage], placement), placement.box
            view.copy_(through_float8(view, scales_for(_of_blocks(largest, box)), box.start))
        return copies

    def _largest(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the largest magnitude in each whole block of this rank's tensors, float32 [blocks, blocks]."""
        largest: dict[str, Tensor] = {}
        for group, shapes in self._sharing:
            together = torch.zeros(sum(map(prod, shapes.values())), device=next(iter(held.values())).device)
            parts = together.split([prod(shape) for shape in shapes.values()])
            of_group = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
            for placement in (its for its in self._placements if its.box.tensor in shapes):
                of_blocks, view = _of_blocks(of_group, placement.box), box_view(held[placement.storage], placement)
                of_blocks.copy_(of_blocks.maximum(largest_in_blocks(view, placement.box.start)))
            if group.size() > 1 and shapes:
                dist.all_reduce(together, dist.ReduceOp.MAX, group)
            largest |= of_group
        return largest


def _of_blocks(numbers: Mapping[str, Tensor], box: Box) -> Tensor:
    """Returns the numbers, by tensor, of the blocks that a box touches, as a view."""
    return box_view(numbers[box.tensor], Placement.whole(scales_of(box)))
