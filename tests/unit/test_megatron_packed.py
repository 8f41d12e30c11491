"""Packing into tensors, and attention over buckets of packed sequences, without processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.ragged import Ragged
from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.attention import (
    PADDING_ALWAYS_ALLOWED,
    _attend_batch,
    attend,
)
from megagrpo.megatron.batch import Batch, Minibatch, Packed, of_tokens, pack, sampled_tokens
from megagrpo.megatron.rotary import cosine_and_sine, inverse_frequencies, rotate
from megagrpo.weights.families.parts import Rope
from tests.methods import rows_of

lengths_of_sequences = st.lists(st.integers(1, 90), max_size=20)
layouts = st.builds(ParallelLayout, tensor=st.sampled_from([1, 2, 3, 4]), context=st.sampled_from([1, 2, 4]))


def microbatch(lengths: list[int]) -> Microbatch:
    """Every token of every sequence is a number of its own; rows are 100, 101, …"""
    numbers = np.cumsum([0, *lengths])
    return Microbatch(
        tuple(
            TrainSequence(
                tokens=np.arange(first, first + length) + 1,
                loss_mask=np.arange(length) % 3 > 0,
                rollout_logprobs=np.where(np.arange(length) % 3 > 0, -np.arange(first, first + length) - 1.0, 0.0),
                row=100 + index,
            )
            for index, (first, length) in enumerate(zip(numbers, lengths, strict=False))
        )
    )


def all_ranks(lengths: list[int], layout: ParallelLayout) -> list[Packed]:
    return [pack(microbatch(lengths), layout=layout, context_rank=rank, device="cpu") for rank in range(layout.context)]


@pytest.mark.parametrize("lengths", [[900, 124], [1500, 548], [1024]])
def test_the_longest_length_is_never_that_of_all_tokens(lengths: list[int]) -> None:
    """Megatron's unfused rotary embedding would rotate the second sequence as if it went on where the first ends."""
    (part,) = all_ranks(lengths, ParallelLayout())
    assert part.sequences.max_seqlen_q > part.sequences.cu_seqlens_q[-1]


def test_tokens_of_given_responses_are_left_out_and_nothing_is_selected_without_any() -> None:
    sampled = microbatch([3, 4])
    mixed = Microbatch((sampled.sequences[0], replace(sampled.sequences[1], given=True)))
    first, second = (pack(one, layout=ParallelLayout(), context_rank=0, device="cpu") for one in (sampled, mixed))
    assert sampled_tokens([*first.responses, *first.responses]) == slice(None)
    found = sampled_tokens([*first.responses, *second.responses])
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [True] * 6 + [False] * 2


@given(lengths_of_sequences, layouts)
@settings(max_examples=60)
def test_every_token_is_on_one_rank_with_its_successor_as_label(lengths: list[int], layout: ParallelLayout) -> None:
    packed = all_ranks(lengths, layout)
    sequences = microbatch(lengths).sequences
    found = set()
    for part in packed:
        (response,) = part.responses
        of_response = (response.rows, response.numbers, response.labels, response.rollout_logprobs)
        predicted = dict(zip(response.positions.tolist(), torch.stack(of_response, 1).tolist(), strict=True))
        places = rows_of(part, sequences).tolist(), part.sequences.positions.tolist()
        for at, (token, row, position) in enumerate(zip(part.tokens[0].tolist(), *places, strict=True)):
            if row < 0:
                assert token == 0
                assert at not in predicted
                continue
            sequence = sequences[row - 100]
            assert token == sequence.tokens[position]
            following, wanted = position + 1, None
            if following < len(sequence.tokens) and sequence.loss_mask[following]:
                wanted = [row, following, sequence.tokens[following], sequence.rollout_logprobs[following]]
            assert predicted.get(at) == wanted
            assert (row, position) not in found
            found.add((row, position))
    assert len(found) == sum(lengths)


# What the engine saw in two branches of row 5 and one of row 2: True was sampled, and is trained.
BRANCHES = [(5, 0, "0011000110"), (2, 0, "011"), (5, 4, "00000101")]


def branch(row: int, first: int, mask: str) -> TrainSequence:
    trained = np.array([letter == "1" for letter in mask])
    return TrainSequence(np.arange(len(mask)) + 1, trained, np.where(trained, -1.0, 0.0), row, first)


@pytest.mark.parametrize("context", [1, 2])
def test_values_by_token_are_read_by_the_count_of_trained_tokens_over_gaps_and_branches(context: int) -> None:
    micro = Microbatch(tuple(branch(*each) for each in BRANCHES))
    values = Ragged(np.array([20.0, 21.0, *range(50, 56)]), np.array([0, 0, 0, 2, 2, 2, 8]))
    found = {}
    for rank in range(context):
        packed = pack(micro, layout=ParallelLayout(context=context), context_rank=rank, device="cpu")
        (response,) = packed.responses
        minibatch = Minibatch(0, [packed], tokens=8, rows=2, split=())
        (of_rank,) = of_tokens(Batch((minibatch,)), values, "cpu")
        of_sequences = response.sequences.index.tolist(), response.numbers.tolist()
        found |= dict(zip(zip(*of_sequences, strict=True), of_rank.tolist(), strict=True))
        index = list(zip(response.rows.tolist(), response.index.tolist(), strict=True))
        assert len(set(index)) == len(index), "two tokens would be drawn alike"
    places = [(0, 2), (0, 3), (0, 7), (0, 8), (2, 5), (2, 7)]
    assert found == dict(zip(places, range(50, 56), strict=True)) | {(1, 1): 20, (1, 2): 21}


@given(lengths_of_sequences, layouts)
@settings(max_examples=60)
def test_the_ranks_have_the_same_number_of_tokens_which_tensor_divides(
    lengths: list[int], layout: ParallelLayout
) -> None:
    packed = all_ranks(lengths, layout)
    sizes = {part.tokens.shape[1] for part in packed}
    assert len(sizes) == 1
    tokens = sizes.pop()
    assert tokens > 0
    assert tokens % layout.tensor == 0
    # Up to 2 x context - 1 in each sequence, and the dummy.
    padding = (2 * layout.context - 1) * len(lengths) + 2 * layout.tensor * layout.context
    assert tokens * layout.context <= sum(lengths) + padding
    for part in packed:
        offsets = part.sequences.cu_seqlens_q.tolist()
        assert offsets[0] == 0
        assert offsets[-1] == tokens * layout.context
        assert 0 <= part.sequences.max_seqlen_q - np.diff(offsets).max() < (2048 if offsets[-1] % 1024 == 0 else 1024)
        assert part.sequences.max_seqlen_q % 1024 == 0


@given(lengths_of_sequences.filter(bool), st.sampled_from([1, 2, 4]))
@settings(max_examples=40)
def test_attention_over_buckets_is_attention_of_each_sequence(lengths: list[int], context: int) -> None:
    torch.manual_seed(len(lengths))
    heads, groups, head_dim = 4, 2, 6
    packed = all_ranks(lengths, ParallelLayout(context=context))
    places = [(rows_of(part, microbatch(lengths).sequences), part.sequences.positions) for part in packed]
    whole = [[torch.randn(n, h, head_dim) for h in (heads, groups, groups)] for n in lengths]
    parts = []
    for part, of_part in zip(packed, places, strict=True):
        # Padding holds anything.
        local = [torch.randn(part.tokens.shape[1], h, head_dim) for h in (heads, groups, groups)]
        for token, (row, position) in enumerate(zip(*map(torch.Tensor.tolist, of_part), strict=True)):
            if row >= 0:
                for tensor, of_sequence in zip(local, whole[row - 100], strict=True):
                    tensor[token] = of_sequence[position]
        parts.append(local)
    key, value = (torch.cat([part[i] for part in parts]).requires_grad_() for i in (1, 2))
    for part, (rows, positions), (query, _, _) in zip(packed, places, parts, strict=True):
        query.requires_grad_()
        output = attend(query, key, value, part.sequences.plan, scale=None)
        for row in range(len(lengths)):
            q, k, v = (x.transpose(0, 1)[None] for x in whole[row])
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            of_row = rows == 100 + row
            torch.testing.assert_close(output[of_row], expected[positions[of_row]], rtol=1e-5, atol=1e-5)
        # Padding has no influence: neither on the output nor, through it, on the gradients.
        gradients = torch.autograd.grad(output[rows >= 0].sum(), [query, key, value])
        padding = torch.cat([of_rank for of_rank, _ in places]) < 0
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        assert gradients[1][padding].abs().sum() == 0
        assert gradients[2][padding].abs().sum() == 0


@pytest.mark.parametrize("lengths", [[15] * 256, [1, 2, 3, 17, 40], [1000, 999, 10, 9, 8], [64]])
def test_buckets_waste_little(lengths: list[int]) -> None:
    sequences = pack(microbatch(lengths), layout=ParallelLayout(), context_rank=0, device="cpu").sequences
    assert "plan" not in vars(sequences), "made before a layer asked for it"
    plan = sequences.plan
    assert sequences.plan is plan, "made for each layer"
    assert plan.queries <= 1.25 * sum(lengths) + PADDING_ALWAYS_ALLOWED * len(lengths)
    assert len(plan.buckets) < len(lengths) or len(lengths) == 1
    if len(set(lengths)) == 1:
        assert plan.query_slots is None
        assert len(plan.buckets) == 1


@pytest.mark.parametrize("mask_of", [None, "each", "all"])
def test_heads_with_keys_of_their_own_attend_as_groups_do(mask_of: str | None) -> None:
    q, k, v = (torch.randn(2, heads, 9, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril() if mask_of else None
    mask = mask.expand(2, 1, 9, 9) if mask is not None and mask_of == "each" else mask
    found = []
    for groups in (True, False):
        output = _attend_batch(q, k, v, mask, None, groups)
        found.append([output, *torch.autograd.grad((output * output.detach().cos()).sum(), (q, k, v))])
    for of_groups, of_heads in zip(*found, strict=True):
        torch.testing.assert_close(of_groups, of_heads)


def test_rotation_is_rounded_once() -> None:
    positions, heads = torch.arange(0, 30_000, 997), torch.randn(31, 4, 64, dtype=torch.bfloat16)
    tables = cosine_and_sine(positions, inverse_frequencies(Rope(1e6), 64))
    first, second = heads.double().chunk(2, dim=-1)
    exact = heads.double() * tables[0] + torch.cat([-second, first], dim=-1) * tables[1]
    assert ((rotate(heads, *tables) - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def test_attention_gradients_are_exact() -> None:
    """Spread and Collect have gradients of their own; compare with finite differences."""
    part = pack(microbatch([3, 1, 30]), layout=ParallelLayout(), context_rank=0, device="cpu")
    torch.manual_seed(0)
    inputs = [torch.randn(34, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, part.sequences.plan, None), inputs)
