"""A step's sequences as work for every data rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megagrpo.batching.balance import share_over_ranks, split_to, spread_evenly
from megagrpo.batching.microbatch import Microbatch, RankBatch, TrainSequence, count_response_tokens
from megagrpo.batching.pack import first_fit_decreasing, padded_lengths
from megagrpo.batching.work import TOKENS, Work
from megagrpo.errors import Problem, RecipeError
from megagrpo.layout.parallel import ParallelLayout

IDLE = Microbatch(())
"""Keeps a rank in step with the others when there are fewer sequences than microbatches."""

MICROBATCHES_PER_STAGE = 2
"""Even if fewer would hold all tokens: with m microbatches, p stages idle for (p - 1) / (m + p - 1) of the time
(arXiv:2104.04473).
"""


def make_rank_batches(
    sequences: Sequence[TrainSequence],
    *,
    layout: ParallelLayout,
    minibatches: int,
    tokens_per_microbatch: int,
    seed: int,
    work: Work = TOKENS,
) -> list[RankBatch]:
    """One RankBatch for each data rank. Every sequence is in exactly one microbatch of one rank.

    Minibatches are equal shares (sizes differ by at most 1) of the sequences in a random order fixed by `seed`; they
    don't depend on the layout. A minibatch without sequences (fewer sequences than minibatches) has no microbatches.
    `work` is what ranks and microbatches are to have equal parts of.
    Raises RecipeError if a sequence is longer than one microbatch.
    """
    capacity = tokens_per_microbatch * layout.context
    order = np.arange(len(sequences)) if minibatches == 1 else np.random.default_rng(seed).permutation(len(sequences))
    chosen = [[sequences[i] for i in part] for part in np.array_split(order, minibatches)]
    shares = [_share(part, layout, capacity, work) for part in chosen]
    return [
        RankBatch(
            minibatches=tuple(share[rank] for share in shares),
            tokens=tuple(count_response_tokens(part) for part in chosen),
            sequences=tuple(sum(bool(s.loss_mask.any()) for s in part) for part in chosen),
            work=tuple(_work_in(share[rank], work) for share in shares),
        )
        for rank in range(layout.data)
    ]


def _share(
    sequences: Sequence[TrainSequence], layout: ParallelLayout, capacity: int, work: Work
) -> list[tuple[Microbatch, ...]]:
    """One minibatch's microbatches for each data rank."""
    if not sequences:
        return [() for _ in range(layout.data)]
    lengths = padded_lengths(np.array([len(s.tokens) for s in sequences]), layout.context)
    if lengths.max() > capacity:
        raise RecipeError(
            Problem(
                where="train.tokens_per_microbatch",
                given=f"{capacity // layout.context} per context rank, and a sequence of {lengths.max()} tokens",
                needed=f"at least {-(-lengths.max() // layout.context)}",
                fix="raise it, or lower data.prompt_tokens_max or rollout.response_tokens_max",
            )
        )
    packed = first_fit_decreasing(lengths, capacity)
    # Megatron's interleaved schedule takes microbatches in rounds of `pipeline`.
    multiple = layout.data * (layout.pipeline if layout.virtual_pipeline > 1 else 1)
    full_pipeline = layout.data * MICROBATCHES_PER_STAGE * layout.pipeline if layout.pipeline > 1 else 0
    least = max(len(packed), min(full_pipeline, len(sequences) // multiple * multiple))
    count = -(-least // multiple) * multiple
    cost = work.of(lengths)
    bins = spread_evenly(cost, count)
    if max(lengths[filled].sum() for filled in bins) > capacity:
        bins = split_to(packed, cost, count)
    micros = [Microbatch(tuple(sequences[i] for i in filled)) if filled else IDLE for filled in bins]
    micros += [IDLE] * (count - len(micros))
    bin_costs = [float(cost[filled].sum()) for filled in bins] + [0.0] * (count - len(bins))
    return [tuple(micros[i] for i in share) for share in share_over_ranks(bin_costs, layout.data)]


def _work_in(microbatches: Sequence[Microbatch], work: Work) -> float:
    return float(work.of(np.array([len(s.tokens) for micro in microbatches for s in micro.sequences])).sum())
