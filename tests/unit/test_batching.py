"""Packing, balancing and joining: nothing lost, nothing too full, every rank in step and about equally busy."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.batching import balance
from megagrpo.batching.balance import share_over_ranks, spread_evenly
from megagrpo.batching.rank_batches import (
    Microbatch,
    RankBatch,
    SplitRow,
    TrainSequence,
    first_fit_decreasing,
    imbalance,
    joined_microbatches,
    make_rank_batches,
    packing_efficiency,
    padded_tokens,
    padding_share,
)
from megagrpo.batching.work import Work, work_of
from megagrpo.errors import RecipeError
from megagrpo.layout.parallel import ParallelLayout, padded_length
from megagrpo.weights.families import read_architecture, tensors_of
from tests.tiny_models import make_model

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(data=2),
    ParallelLayout(data=3, context=2),
    ParallelLayout(pipeline=2, virtual_pipeline=2, data=2),
    ParallelLayout(pipeline=3, virtual_pipeline=2),
]


def sequences_of(lengths, prompt=2):
    return [
        TrainSequence(
            tokens=np.arange(n, dtype=np.int64),
            loss_mask=np.arange(n) >= min(prompt, n - 1),
            rollout_logprobs=np.zeros(n, np.float32),
            row=row,
        )
        for row, n in enumerate(lengths)
    ]


def batches_of(lengths, layout, minibatches=1, capacity=64, seed=0, **work):
    return make_rank_batches(
        sequences_of(lengths),
        layout=layout,
        minibatches=minibatches,
        tokens_per_microbatch=capacity,
        seed=seed,
        **work,
    )


@settings(max_examples=150)
@given(
    st.lists(st.integers(2, 60), max_size=40),
    st.sampled_from(LAYOUTS),
    st.integers(1, 4),
    st.integers(64, 200),
    st.integers(0, 9),
)
def test_every_sequence_is_trained_on_once_and_all_ranks_keep_step(lengths, layout, minibatches, capacity, seed):
    batches = batches_of(lengths, layout, minibatches, capacity, seed)
    assert len(batches) == layout.data
    rows = Counter(row for b in batches for mini in b.minibatches for micro in mini for row in micro.rows)
    assert rows == Counter(range(len(lengths)))
    for m in range(minibatches):
        counts = {len(b.minibatches[m]) for b in batches}
        assert len(counts) == 1
        if layout.virtual_pipeline > 1:
            assert counts.pop() % layout.pipeline == 0
        members = [s for b in batches for micro in b.minibatches[m] for s in micro.sequences]
        assert {b.tokens[m] for b in batches} == {sum(int(s.loss_mask.sum()) for s in members)}
        assert {b.rows[m] for b in batches} == {sum(bool(s.loss_mask.any()) for s in members)}
    for batch in batches:
        for micro in (micro for mini in batch.minibatches for micro in mini):
            occupied = padded_length(np.array([len(s.tokens) for s in micro.sequences]), layout.context).sum()
            assert occupied <= capacity * layout.context


@settings(max_examples=50)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 9))
def test_minibatches_are_the_same_in_every_layout(lengths, minibatches, seed):
    members = {
        tuple(
            tuple(sorted(row for b in batches for micro in b.minibatches[m] for row in micro.rows))
            for m in range(minibatches)
        )
        for layout in LAYOUTS
        for batches in [batches_of(lengths, layout, minibatches, 80, seed)]
    }
    assert len(members) == 1
    sizes = [len(rows) for rows in members.pop()]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 120))
def test_first_fit_decreasing_respects_capacity_and_its_bound(lengths, capacity):
    lengths = np.array(lengths)
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert max(lengths[b].sum() for b in bins) <= capacity
    # Two bins that are both at most half full would have been one.
    assert sum(lengths[b].sum() <= capacity / 2 for b in bins) <= 1


def test_work_is_even_over_data_ranks():
    lengths = np.random.default_rng(0).integers(16, 2048, 512)
    layout, work = ParallelLayout(data=8), Work(linear=1.0, quadratic=1 / 4096)
    batches = batches_of(lengths, layout, 2, 8192, work=work)

    def load(minibatch):
        return sum(n + n * n / 4096 for micro in minibatch for n in (len(s.tokens) for s in micro.sequences))

    loads = np.array([[load(minibatch) for minibatch in batch.minibatches] for batch in batches])
    lost = loads.max(0).sum() / loads.mean(0).sum() - 1
    assert lost < 0.01
    assert imbalance(batches) == pytest.approx(lost, abs=1e-9)
    assert packing_efficiency(batches, layout, 8192) > 0.8


def test_many_short_sequences_are_batched_without_the_slower_way(monkeypatch):
    monkeypatch.setattr(balance, "_largest_differencing", lambda cost, bins: pytest.fail("differencing takes seconds"))
    batches = batches_of(np.random.default_rng(0).integers(9, 20, 256), ParallelLayout(data=2), capacity=8192)
    tokens = [b.minibatches[0][0].tokens for b in batches]
    assert len(batches[0].minibatches[0]) == 1
    assert abs(tokens[0] - tokens[1]) <= 20


def test_a_pipeline_gets_microbatches_enough_to_keep_its_stages_busy():
    def counts(sequences, **sizes):
        return [len(b.minibatches[0]) for b in batches_of([9] * sequences, ParallelLayout(**sizes), capacity=8192)]

    assert counts(64) == [1]
    assert counts(64, pipeline=3) == [6]
    assert counts(64, pipeline=2, data=2) == [4, 4]
    assert counts(3, pipeline=4) == [3]
    assert counts(3, pipeline=2, virtual_pipeline=2) == [2]


def test_a_sequence_longer_than_a_microbatch_is_refused_not_dropped():
    with pytest.raises(RecipeError, match="tokens_per_microbatch"):
        batches_of([65, 4], ParallelLayout())


def test_sequences_that_fit_only_when_packed_tightly_still_fit():
    # Evenly spread, one of the two would hold more than 10; first fit decreasing finds 5 + 5 and 4 + 3 + 3.
    lengths = np.array([5, 5, 4, 3, 3])
    work = Work(linear=0.0, quadratic=1.0)  # 25 + 16 against 25 + 9 + 9
    assert max(lengths[filled].sum() for filled in spread_evenly(work.of(lengths), 2)) > 10
    batches = batches_of(lengths, ParallelLayout(), capacity=10, work=work)
    assert [micro.tokens for micro in batches[0].minibatches[0]] == [10, 10]


COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


def most(cost, shares):
    return max(sum(cost[i] for i in share) for share in shares)


@settings(max_examples=200)
@given(COSTS, st.integers(1, 9))
def test_sequences_are_spread_at_least_as_evenly_as_longest_first(costs, bins):
    cost = np.array(costs, dtype=np.float64)
    loads = [0.0] * bins
    for value in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += value
    for spread in (spread_evenly(cost, bins), balance._largest_differencing(cost, bins)):
        assert sorted(i for filled in spread for i in filled) == list(range(len(costs)))
        assert len(spread) == bins
    assert most(costs, spread_evenly(cost, bins)) <= max(loads)


def test_differencing_finds_what_longest_first_misses():
    assert most([8, 7, 6, 5, 4], spread_evenly(np.array([8.0, 7, 6, 5, 4]), 2)) == 16  # longest first: 17


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(1, 9), st.randoms(use_true_random=False))
def test_ranks_differ_by_no_more_than_the_bins_of_some_round(ranks, rounds, random):
    costs = [random.randrange(1000) for _ in range(ranks * rounds)]
    shares = share_over_ranks(costs, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    ordered = sorted(costs, reverse=True)
    by_round = [ordered[first : first + ranks] for first in range(0, len(ordered), ranks)]
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(max(values) - min(values) for values in by_round)
    for k, values in enumerate(by_round):  # the k-th bins of all ranks are one round
        assert sorted((costs[share[k]] for share in shares), reverse=True) == values


# --- joining for passes without gradients -----------------------------------------------------------------------------


@given(st.integers(0, 12), st.integers(1, 12), st.booleans())
def test_every_microbatch_is_in_one_part_and_a_pipeline_gets_rounds_of_its_stages(rounds, at_once, pipeline):
    count, layout = 3 * rounds, ParallelLayout(pipeline=3, virtual_pipeline=2) if pipeline else ParallelLayout(data=2)
    parts = joined_microbatches(count, at_once, layout)
    assert [i for part in parts for i in part] == list(range(count))
    assert all(1 <= len(part) <= at_once for part in parts)
    if pipeline:
        assert len(parts) % 3 == 0
        assert len(parts) >= min(count, 6), "it is kept busy"
    else:
        assert len(parts) == -(-count // at_once)


# --- estimated work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_moe", "deepseek_v3"])
def test_every_matrix_that_a_token_meets_counts_twice(family, tmp_path):
    arch = read_architecture(make_model(family, tmp_path / family))
    weights = 0.0
    for tensor in tensors_of(arch):
        if len(tensor.shape) < 2 or tensor.role == "embedding":
            continue
        share = arch.layers[-1].mlp.per_token / arch.experts if tensor.expert is not None else 1
        weights += np.prod(tensor.shape) * share
    if arch.tied_embeddings:
        weights += arch.vocab * arch.hidden
    assert work_of(arch).linear == pytest.approx(2 * weights)


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=6), max_size=20),
    st.sampled_from(LAYOUTS),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_the_branches_of_a_row_are_in_one_minibatch_and_anywhere_in_it(rollouts, layout, minibatches, seed):
    of_row = [[replace(s, row=row) for s in sequences_of(lengths)] for row, lengths in enumerate(rollouts)]
    options = {"layout": layout, "minibatches": minibatches, "tokens_per_microbatch": 64, "seed": seed}
    batches = make_rank_batches([s for row in of_row for s in row], **options)
    whole = make_rank_batches([row[0] for row in of_row], **options)
    for m in range(minibatches):
        found = [s for b in batches for micro in b.minibatches[m] for s in micro.sequences]
        rows = {s.row for s in found}
        # The same rows as if each were one sequence: minibatches are equal shares of rows.
        assert rows == {s.row for b in whole for micro in b.minibatches[m] for s in micro.sequences}
        assert Counter(map(id, found)) == Counter(id(s) for row in rows for s in of_row[row])
        tokens = {row: sum(int(s.loss_mask.sum()) for s in of_row[row]) for row in rows}
        for batch in batches:
            assert (batch.rows[m], batch.tokens[m]) == (len(rows), sum(tokens.values()))
            several = {SplitRow(row, tokens[row]) for row in rows if len(of_row[row]) > 1}
            assert len(batch.split[m]) == len(several)
            assert set(batch.split[m]) == several


def test_microbatches_are_padded_to_few_sizes_and_a_pipelines_to_one():
    def sizes(lengths, device, **layout):
        micros = [Microbatch((sequence_of(length),)) for length in lengths]
        return padded_tokens(micros, ParallelLayout(**layout), device)

    assert sizes([1000, 129, 0], "cuda") == [1024, 256, 128]
    assert sizes([1000, 129, 0], "cpu") == [1000, 129, 1]
    assert sizes([1001], "cpu", tensor=2) == [1002]
    assert sizes([1001], "cpu", tensor=3, context=2) == [504]
    assert sizes([9000, 8900], "cuda", pipeline=2) == [9088, 9088]
    assert sizes([9000, 5000], "cuda", pipeline=2) == [9088, 5120]  # not for a fifth more tokens
    batch = RankBatch(((Microbatch((sequence_of(96),)),),), (1,), (1,), (1.0,), ((),))
    assert padding_share([batch], ParallelLayout(), "cuda") == 0.25


def sequence_of(length):
    return TrainSequence(np.zeros(length, np.int64), np.ones(length, bool), np.zeros(length, np.float32), 0)
