"""A step's sequences as work for every data rank: packed into microbatches of a fixed size, evenly shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import lcm

import numpy as np

from megagrpo.batching.balance import share_over_ranks, split_to, spread_evenly
from megagrpo.batching.work import TOKENS, Work
from megagrpo.errors import Problem, RecipeError
from megagrpo.layout.parallel import ParallelLayout, padded_length
from megagrpo.routes import Routes
from megagrpo.types import KeptSets, TeacherTokens

MICROBATCHES_PER_STAGE = 2
"""A pipeline gets at least this many, even if fewer hold all tokens: with m microbatches, p stages idle for
(p - 1) / (m + p - 1) of the time (arXiv:2104.04473).
"""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One prompt with one response, or one branch of an agent's rollout, as it is trained on.

    `loss_mask[t]` says whether the policy chose token t (prompt and tool tokens are given); these are its response
    tokens, with gaps between an agent's turns. `rollout_logprobs[t]` is the engine's logprob of token t, 0 where
    loss_mask is False, NaN in given responses. `routes` has a row for each token but the last.
    """

    tokens: np.ndarray  # int64 [tokens]
    loss_mask: np.ndarray  # bool [tokens]
    rollout_logprobs: np.ndarray  # float32 [tokens]
    row: int  # index of the sample in the step, which several branches may share
    first: int = 0  # response tokens of the row that come before this sequence's
    routes: Routes | None = None  # None: the trainer's routers choose the experts
    kept: KeptSets | None = None  # of its response tokens; None: the whole vocabulary
    name: str = ""  # of its sample, in errors
    teacher: int = -1  # the place of its teacher among the recipe's; -1: none
    taught: TeacherTokens | None = None  # of its response tokens, by a teacher that has been asked
    prompt_of_teacher: np.ndarray | None = None  # int64, what teachers read before the response; None: the same
    given: bool = False  # its response is of the data: it learns from its teacher alone
    data_rank: int = 0  # the one that trains on it, in a batch of teachers


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences for one forward pass of one data rank."""

    sequences: tuple[TrainSequence, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(s.row for s in self.sequences)

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)


IDLE = Microbatch(())
"""Keeps a rank in step with the others when there are fewer sequences than microbatches."""


@dataclass(frozen=True, slots=True)
class SplitRow:
    """A row with several sequences, which may lie in several microbatches and on several data ranks."""

    row: int
    tokens: int  # response tokens of all its sequences


@dataclass(frozen=True, slots=True)
class RankBatch:
    """A step's work for one data rank: minibatches[m] is a sequence of microbatches.

    Every data rank has the same number of microbatches in minibatch m. `tokens[m]` and `rows[m]` count response tokens
    (True in loss_mask) and rows with any of them in minibatch m over *all* data ranks: the loss's denominators.
    `split[m]` has the rows of minibatch m, on any data rank, with several sequences. `work[m]` estimates what this rank
    computes for minibatch m, in the units of batching/work.py.
    """

    minibatches: tuple[tuple[Microbatch, ...], ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    work: tuple[float, ...]
    split: tuple[tuple[SplitRow, ...], ...]


def sampled_sequences(batches: Sequence[RankBatch]) -> list[TrainSequence]:
    """Returns the sequences of all data ranks but given responses."""
    micros = [micro for batch in batches for minibatch in batch.minibatches for micro in minibatch]
    return [sequence for micro in micros for sequence in micro.sequences if not sequence.given]


def as_teachers_read(sequence: TrainSequence, data_rank: int) -> TrainSequence:
    """Returns a sequence of a data rank as its teacher on the ranks reads it: with the teacher's prompt if it has one,
    without what passes that train need."""
    own = replace(sequence, routes=None, kept=None, taught=None, data_rank=data_rank)
    if (prompt := sequence.prompt_of_teacher) is None:
        return own
    first = int(sequence.loss_mask.argmax())
    tokens, none = np.concatenate([prompt, sequence.tokens[first:]]), np.zeros(len(prompt))
    mask = np.concatenate([none.astype(bool), sequence.loss_mask[first:]])
    logprobs = np.concatenate([none.astype(np.float32), sequence.rollout_logprobs[first:]])
    return replace(own, tokens=tokens, loss_mask=mask, rollout_logprobs=logprobs)


def make_rank_batches(
    sequences: Sequence[TrainSequence],
    *,
    layout: ParallelLayout,
    minibatches: int,
    tokens_per_microbatch: int,
    seed: int,
    work: Work = TOKENS,
) -> list[RankBatch]:
    """Makes one RankBatch for each data rank. Every sequence is in exactly one microbatch of one rank.

    Minibatches are equal shares (sizes differ by at most 1) of the rows in a random order fixed by `seed`; they don't
    depend on the layout. All sequences of a row are in one minibatch, in any of its microbatches. A minibatch without
    rows (fewer rows than minibatches) has no microbatches. Ranks and microbatches get about equal amounts of `work`.
    Raises RecipeError if a sequence is longer than one microbatch.
    """
    capacity = tokens_per_microbatch * layout.context
    of_row: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        of_row.setdefault(sequence.row, []).append(sequence)
    rows = list(of_row.values())
    order = np.arange(len(rows)) if minibatches == 1 else np.random.default_rng(seed).permutation(len(rows))
    chosen = [[rows[i] for i in part] for part in np.array_split(order, minibatches)]
    shares = [_share(list(chain(*part)), layout, capacity, work) for part in chosen]
    tokens = tuple(sum(map(count_response_tokens, part)) for part in chosen)
    trained = tuple(sum(count_response_tokens(row) > 0 for row in part) for part in chosen)
    split = tuple(
        tuple(SplitRow(row[0].row, count_response_tokens(row)) for row in part if len(row) > 1) for part in chosen
    )
    return [
        RankBatch(
            minibatches=tuple(share[rank] for share in shares),
            tokens=tokens,
            rows=trained,
            work=tuple(_work_in(share[rank], work) for share in shares),
            split=split,
        )
        for rank in range(layout.data)
    ]


def count_response_tokens(sequences: Sequence[TrainSequence]) -> int:
    return sum(int(s.loss_mask.sum()) for s in sequences)


TOKENS_MULTIPLE = {"cpu": 1, "cuda": 128}
"""A microbatch's tokens on one rank are a multiple of it. GPUs multiply tiles of 128 rows, and allocate memory anew for
each new size."""
ONE_SIZE_SHARE = 0.03
"""Most padding that makes all microbatches of a pass through a pipeline equally long. Its stages then need not tell
each other how long they are, for which Megatron waits until the device is idle."""


def padded_tokens(microbatches: Sequence[Microbatch], layout: ParallelLayout, device: str) -> list[int]:
    """Returns tokens on each context rank, padding included, of microbatches that pass one after the other on `device`.

    Tensor ranks cut them evenly; context ranks have two pieces of every sequence. Multiples are of 128 in all, not for
    each tensor rank: with 8 of them and 5,000 tokens that would add a tenth.
    """
    multiple = lcm(layout.tensor, 2 if layout.context > 1 else 1)
    if TOKENS_MULTIPLE[device] > 1:
        multiple = lcm(multiple, TOKENS_MULTIPLE[device])
    sizes = []
    for micro in microbatches:
        lengths = padded_length(np.array([len(s.tokens) for s in micro.sequences], dtype=np.int64), layout.context)
        sizes.append(max(1, -(-(int(lengths.sum()) // layout.context) // multiple)) * multiple)
    if layout.pipeline > 1 and sizes and max(sizes) * len(sizes) <= (1 + ONE_SIZE_SHARE) * sum(sizes):
        return [max(sizes)] * len(sizes)
    return sizes


def padding_share(batches: Sequence[RankBatch], layout: ParallelLayout, device: str) -> float:
    """Returns the share of padding in the tokens of passes with gradients."""
    passes = [minibatch for batch in batches for minibatch in batch.minibatches]
    padded = sum(sum(padded_tokens(micros, layout, device)) for micros in passes) * layout.context
    return 1 - sum(micro.tokens for micros in passes for micro in micros) / padded if padded else 0.0


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs sequences into bins of at most `capacity` tokens. Returns the indices of the sequences in each bin.

    Longest first, each into the first bin with room: at most 11/9 of the fewest possible bins, plus 6/9
    (Dosa, 2007). No length may exceed `capacity`.
    """
    bins: list[list[int]] = []
    room = np.full(len(lengths), capacity, dtype=np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    for index, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        first = int((room[: len(bins) + 1] >= length).argmax())  # the last of these is empty
        if first == len(bins):
            bins.append([])
        bins[first].append(index)
        room[first] -= length
    return bins


def joined_microbatches(count: int, at_once: int, layout: ParallelLayout) -> list[range]:
    """Joins `count` consecutive microbatches to fewer, larger ones for a pass without gradients.

    Returns which are joined: at most `at_once` each, in parts of about equal size. All ranks with the same count join
    the same ones. A pipeline keeps its stages busy: it gets as many parts as training's microbatches would be at least,
    and a multiple of what the interleaved schedule takes.
    """
    multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
    full_pipeline = MICROBATCHES_PER_STAGE * layout.pipeline if layout.pipeline > 1 else 1
    parts = max(-(-count // at_once), full_pipeline)
    parts = min(-(-parts // multiple) * multiple, count)
    bounds = np.linspace(0, count, parts + 1).round().astype(int).tolist()
    return [range(a, b) for a, b in pairwise(bounds)]


def packing_efficiency(batches: Sequence[RankBatch], layout: ParallelLayout, tokens_per_microbatch: int) -> float:
    """Returns the share of the microbatches' capacity that holds tokens, over all data ranks: between 0 and 1."""
    microbatches = [micro for batch in batches for minibatch in batch.minibatches for micro in minibatch]
    capacity = len(microbatches) * tokens_per_microbatch * layout.context
    return sum(micro.tokens for micro in microbatches) / capacity if capacity else 0.0


def imbalance(batches: Sequence[RankBatch]) -> float:
    """Returns the added share of compute time against equal work: each minibatch ends when the busiest rank is done.

    0 at best, the number of data ranks less 1 at worst.
    """
    of_minibatches = list(zip(*(batch.work for batch in batches), strict=True))
    mean = sum(sum(of_ranks) / len(of_ranks) for of_ranks in of_minibatches)
    return sum(map(max, of_minibatches)) / mean - 1 if mean else 0.0


def _share(
    sequences: Sequence[TrainSequence], layout: ParallelLayout, capacity: int, work: Work
) -> list[tuple[Microbatch, ...]]:
    """Makes one minibatch's microbatches for each data rank."""
    if not sequences:
        return [() for _ in range(layout.data)]
    lengths = padded_length(np.array([len(s.tokens) for s in sequences]), layout.context)
    if lengths.max() > capacity:
        given = f"{capacity // layout.context} per context rank, and a sequence of {lengths.max()} tokens"
        needed = f"at least {-(-lengths.max() // layout.context)}"
        fix = "raise it, or lower data.prompt_tokens_max, rollout.response_tokens_max or agent.tokens_max"
        raise RecipeError(Problem("train.tokens_per_microbatch", given, needed, fix))
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
