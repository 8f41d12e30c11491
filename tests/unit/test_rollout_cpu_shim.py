"""The hash by which SGLang samples on CPUs, against MurmurHash3 written with Python's integers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.rollout.sglang.launch import murmur_hash32

WORD = (1 << 32) - 1


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole words (Appleby, smhasher/src/MurmurHash3.cpp)."""

    def rotate(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & WORD

    state = 0
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little")
        word = rotate(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = (rotate(state ^ word, 13) * 5 + 0xE6546B64) & WORD
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


def test_the_reference_gives_published_values() -> None:
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"") == 0


@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    position=st.integers(0, 2**31 - 1),
    columns=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
)
def test_the_hash_is_murmur3_of_seed_position_and_column(seeds: list[int], position: int, columns: list[int]) -> None:
    hashed = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).view(torch.uint64),
        torch.full((len(seeds),), position),
        torch.tensor(columns),
    )
    expected = [
        [murmur3(b"".join(part.to_bytes(size, "little") for part, size in ((seed, 8), (position, 4), (column, 4))))
         for column in columns]
        for seed in seeds
    ]  # fmt: skip
    assert hashed.tolist() == expected
