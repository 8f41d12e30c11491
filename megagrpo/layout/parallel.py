"""Parallel sizes and what follows from them: coordinates of ranks, layers of stages. No torch, no processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

Tokens = TypeVar("Tokens", int, np.ndarray)


@dataclass(frozen=True)
class ParallelLayout:
    """The split of the policy over training ranks.

    `tensor * pipeline * context * data` ranks hold the dense weights. Expert weights are split over the same ranks
    another way: `expert_tensor * expert * pipeline * expert_data`, where expert_data follows from the others.
    `virtual_pipeline` is the number of model chunks on each pipeline rank (1: not interleaved).
    `first_stage_layers` and `last_stage_layers` are the lengths of those pipeline stages; None: like the others.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_data(self) -> int:
        """Returns the number of ranks that hold the same expert shard. Exact only if `problems` is empty."""
        return self.ranks // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def sequence_parallel(self) -> bool:
        """Returns tensor > 1: sequence parallelism costs nothing then, and Megatron's experts need it."""
        return self.tensor > 1

    def problems(self) -> list[str]:
        """Returns the reasons why no model can be split this way; an empty list if there are none."""
        given = [*self.sizes(), *self.stage_lengths()]
        reasons = [f"{name} must be at least 1, not {size}" for name, size in given if size < 1]
        if reasons:
            return reasons
        group = self.ranks // self.pipeline
        if group % (self.expert * self.expert_tensor):
            reasons.append(
                f"expert x expert_tensor = {self.expert} x {self.expert_tensor} must divide "
                f"tensor x context x data = {group}"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            reasons.append(f"virtual_pipeline = {self.virtual_pipeline} needs pipeline of at least 2")
        lengths = dict(self.stage_lengths())
        if self.pipeline == 1:
            reasons += [f"{name} = {length} needs pipeline of at least 2" for name, length in lengths.items()]
        if len(lengths) == self.pipeline == 2 and self.virtual_pipeline > 1:
            # Megatron divides by the number of stages in between (get_transformer_layer_offset).
            reasons.append("last_stage_layers follows from first_stage_layers with 2 stages: give one of them")
        return reasons

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yields the parallel sizes by name."""
        lengths = ("first_stage_layers", "last_stage_layers")
        yield from ((name, size) for name, size in vars(self).items() if name not in lengths)

    def stage_lengths(self) -> Iterator[tuple[str, int]]:
        """Yields the given lengths of the first and the last pipeline stage, in layers, by name."""
        for name in ("first_stage_layers", "last_stage_layers"):
            length: int | None = getattr(self, name)
            if length is not None:
                yield name, length

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in self.sizes() if size > 1) or "1 rank"
        return ", ".join([sizes, *(f"{name} {length}" for name, length in self.stage_lengths())])


@dataclass(frozen=True)
class RankCoordinates:
    """The coordinates of one training rank on every axis."""

    rank: int
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int


@lru_cache(maxsize=64)
def rank_grid(layout: ParallelLayout) -> tuple[RankCoordinates, ...]:
    """Returns coordinates of every rank, in Megatron's default order: tensor fastest, then context, data, pipeline.

    Expert axes are laid over the same ranks: expert_tensor fastest, then expert, expert_data, pipeline
    (megatron.core.parallel_state.RankGenerator with order "tp-cp-ep-dp-pp"). A test compares it with Megatron's groups.
    """
    per_stage = layout.ranks // layout.pipeline
    grid = []
    for rank in range(layout.ranks):
        pipeline, within = divmod(rank, per_stage)
        rest, tensor = divmod(within, layout.tensor)
        data, context = divmod(rest, layout.context)
        rest, expert_tensor = divmod(within, layout.expert_tensor)
        expert_data, expert = divmod(rest, layout.expert)
        grid.append(RankCoordinates(rank, tensor, pipeline, context, data, expert, expert_tensor, expert_data))
    return tuple(grid)


def padded_length(tokens: Tokens, context: int) -> Tokens:
    """Returns the tokens that a sequence takes, or each of several: each context rank has two equal pieces of it."""
    multiple = 1 if context == 1 else 2 * context
    return -(-tokens // multiple) * multiple


def layers_of_chunk(layers: int, layout: ParallelLayout, stage: int, chunk: int) -> range:
    """Returns global indices (from 0) of the layers of model chunk `chunk` on pipeline rank `stage`.

    Interleaved as in Megatron (megatron.core.transformer: get_num_layers_to_build, get_transformer_layer_offset): the
    chunks of a stage are equally long, and the model passes through all stages once for each chunk. `stage_problems`
    must be empty.
    """
    counts = layers_of_stages(layers, layout)
    per_chunk = counts[stage] // layout.virtual_pipeline
    first = (chunk * layers + sum(counts[:stage])) // layout.virtual_pipeline
    return range(first, first + per_chunk)


def layers_of_stages(layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """Returns each pipeline stage's layer count, all chunks. Stages without a given length share the rest equally."""
    rest, stages = _rest(layers, layout)
    share = rest // stages if stages else 0
    counts = [share] * layout.pipeline
    if layout.first_stage_layers is not None:
        counts[0] = layout.first_stage_layers
    if layout.last_stage_layers is not None:
        counts[-1] = layout.last_stage_layers
    return tuple(counts)


def stage_problems(layers: int, layout: ParallelLayout) -> list[str]:
    """Returns reasons why stages cannot hold `layers` layers; [] if they can. `layout.problems()` must be empty."""
    rest, stages = _rest(layers, layout)
    if rest < stages or (rest and not stages):
        return [f"{rest} layers are left for the {stages} other pipeline stages"]
    if stages and rest % stages:
        return [f"{rest} layers cannot be shared out equally to {stages} pipeline stages"]
    chunks = layout.virtual_pipeline
    uneven = sorted({count for count in layers_of_stages(layers, layout) if count % chunks})
    return [f"{count} layers of a pipeline stage cannot be cut into {chunks} equal chunks" for count in uneven]


def _rest(layers: int, layout: ParallelLayout) -> tuple[int, int]:
    """Returns the number of layers left for the stages without a given length, and the number of these stages."""
    given = [count for count in (layout.first_stage_layers, layout.last_stage_layers) if count is not None]
    return layers - sum(given), layout.pipeline - len(given)
