"""Digests do not depend on how tensors are cut over ranks, and see every change."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights import digest
from megagrpo.weights.boxes import Box, Placement
from megagrpo.weights.digest import digests, expected_digests, sent_digests
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import checkpoint as checkpoint_side
from tests.unit.test_weights_plan import architectures, layouts, whole_placements
from tests.weight_streams import manifests
from tests.weights_oracle import held_by_ranks, random_checkpoint

MASK = (1 << 64) - 1


def splitmix64(seed: int) -> int:
    """The generator as published, on Python's integers."""
    x = seed & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def slow_digest(tensor: torch.Tensor) -> int:
    """The definition in digest.py, one element at a time, on Python's integers."""
    weights = []
    for axis, size in enumerate(tensor.shape):
        offset = (0xD1B54A32D192ED03 - (1 << 64)) * (axis + 1) % (1 << 62)
        weights.append([splitmix64((index + 1) * 0x9E3779B97F4A7C15 + offset) | 1 for index in range(size)])
    places = tensor.contiguous().flatten().view(torch.int8).view(-1, tensor.element_size()).tolist()
    total = 0
    for index, its in zip(product(*weights), places, strict=True):
        mixed = 0x9E3779B97F4A7C15 + sum(byte * 511**place for place, byte in enumerate(its))
        total += mixed * prod(index)
    return total & MASK


def digest_of(tensor: torch.Tensor) -> int:
    return digests({"w": tensor}, [Placement.whole(Box("w", (0,) * tensor.dim(), tuple(tensor.shape)))])["w"]


@pytest.mark.parametrize("shape", [(), (9,), (1, 9), (7, 13), (13, 1), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_the_fast_digest_is_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if tensor.dim() == 2 and min(shape) > 3:
        tensor[0, 0], tensor[1, 1], tensor[2, 2] = 0.0, -0.0, torch.inf
    assert digest_of(tensor) == slow_digest(tensor)
    monkeypatch.setattr(digest, "PRODUCT_BYTES_MAX", 3)
    assert digest_of(tensor) == slow_digest(tensor)


def test_a_long_row_of_the_largest_bytes_overflows_no_product() -> None:
    for byte in (-128, 127):
        data = torch.full((2, digest.PRODUCT_BYTES_MAX + 64), byte, dtype=torch.int8)
        first, second = (digest._digest(data[row : row + 1], (row, 0), data.dtype) for row in range(2))
        assert digest._digest(data, (0, 0), data.dtype) == first + second


@settings(max_examples=15)
@given(arch=architectures(), layout=layouts())
def test_ranks_together_have_the_digests_of_the_checkpoint(arch: Architecture, layout: ParallelLayout) -> None:
    checkpoint = random_checkpoint(arch)
    held = held_by_ranks(arch, layout, checkpoint)
    plan = make_plan(manifests(arch, layout), checkpoint_side.new_files(arch, "float32"))
    parts = [sent_digests(plan, source, tensors) for source, tensors in enumerate(held)]
    assert expected_digests(parts) == {0: digests(checkpoint, whole_placements(arch))}


@settings(max_examples=50)
@given(rows=st.integers(2, 40), columns=st.integers(1, 40), data=st.data())
def test_a_change_of_one_bit_a_swap_of_rows_and_a_swap_of_elements_are_seen(
    rows: int, columns: int, data: st.DataObject
) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 41 + columns))
    before = digest_of(matrix)
    one, other = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
    i, j = data.draw(st.integers(0, columns - 1)), data.draw(st.integers(0, columns - 1))

    flipped = matrix.clone()
    flipped.view(torch.int32)[one, i] ^= 1 << data.draw(st.integers(0, 30))
    swapped_rows = matrix.clone()
    swapped_rows[[one, other]] = matrix[[other, one]]
    swapped = matrix.clone()
    swapped[one, i], swapped[other, j] = matrix[other, j], matrix[one, i]
    assert before not in (digest_of(flipped), digest_of(swapped_rows), digest_of(swapped))
    assert columns == 1 or rows == columns or digest_of(matrix.T.contiguous()) != before


def test_a_zero_counts_and_its_sign_too() -> None:
    assert len({digest_of(torch.zeros(2, size)) for size in (1, 2, 3)} | {digest_of(-torch.zeros(2, 2)), 0}) == 5


def test_chunks_and_strides_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(50, 33)
    before = digest_of(matrix)
    monkeypatch.setattr(digest, "CHUNK_BYTES", {"cpu": 300})
    assert digest_of(matrix) == before
    assert digest_of(matrix.T.contiguous().T) == before
    assert digest_of(torch.cat([matrix, matrix], 1)[:, :33]) == before
    deep = torch.randn(4, 5, 6)
    assert digest_of(deep.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == digest_of(deep)
