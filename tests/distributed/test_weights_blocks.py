"""Training ranks in processes of their own quantise blocks that are cut between them."""

from __future__ import annotations

import torch

from megagrpo.weights.blocks import Preparation
from megagrpo.weights.quantizing import Quantizer
from tests.rank_group import run_ranks
from tests.unit.test_weights_blocks import FOUR_RANKS, ROUTED, cut_by_four
from tests.weight_streams import manifests
from tests.weights_oracle import Tensors, held_by_ranks, random_checkpoint


def test_ranks_fetch_from_each_other_what_they_lack_of_a_block() -> None:
    sent = cut_by_four()
    of_ranks = run_ranks(4, quantized, sent.preparation)
    for found, wanted in zip(of_ranks, sent.ready, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], bits(its)) for name, its in wanted.items())


def quantized(preparation: Preparation) -> Tensors:
    rank = torch.distributed.get_rank()
    held = held_by_ranks(ROUTED, FOUR_RANKS, random_checkpoint(ROUTED, dtype=torch.bfloat16))[rank]
    quantizer = Quantizer(manifests(ROUTED, FOUR_RANKS, "bfloat16")[rank], preparation, rank)
    return {name: bits(tensor) for name, tensor in quantizer.tensors(held).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: float8 does not travel by pickle."""
    return tensor.contiguous().view(torch.uint8)
