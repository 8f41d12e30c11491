"""Training ranks in processes of their own quantise blocks that are cut between them."""

from __future__ import annotations

import time

import pytest
import torch

from megagrpo.errors import MegagrpoError, Problem, RankError, WeightSyncError
from megagrpo.weights.blocks import Preparation
from megagrpo.weights.quantizing import Quantizer
from megagrpo.weights.transport.rendezvous import Rendezvous, RendezvousHost
from tests.rank_group import run_ranks
from tests.unit.test_weights_blocks import FOUR_RANKS, ROUTED, cut_by_four
from tests.weight_streams import manifests
from tests.weights_oracle import Tensors, held_by_ranks, random_checkpoint

ABSENT, SILENT, DEAD, GOOD = "does not come", "does not send", "dies", ""
SECONDS = 3.0


@pytest.fixture(scope="module")
def preparation() -> Preparation:
    return cut_by_four().preparation


@pytest.fixture
def host() -> RendezvousHost:
    return RendezvousHost("127.0.0.1", SECONDS)


def test_ranks_fetch_from_each_other_what_they_lack_of_a_block() -> None:
    sent, host = cut_by_four(), RendezvousHost("127.0.0.1", 60.0)
    host.open(1, [])
    of_ranks = run_ranks(4, quantized, sent.preparation, host.rendezvous)
    for found, wanted in zip(of_ranks, sent.ready, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], bits(its)) for name, its in wanted.items())


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (ABSENT, WeightSyncError, "train rank 3 did not begin to exchange them within 3 s"),
        (SILENT, RankError, "train rank 3"),  # it may notice itself, before the others do
        (DEAD, RankError, "while train rank 3 should have sent them"),
    ],
)
def test_a_fetch_ends_in_time_and_names_the_rank_that_is_missing(
    preparation: Preparation, host: RendezvousHost, fault: str, error: type[MegagrpoError], says: str
) -> None:
    host.open(1, [])
    told = [answer for answer in run_ranks(4, fetch_beside, preparation, host.rendezvous, fault) if answer]
    assert all(seconds < SECONDS + 5 for seconds, _, _ in told)
    assert (error.__name__, True) in [(kind, says in text) for _, kind, text in told], told


def test_an_abort_ends_the_wait_for_a_fetch_to_begin(preparation: Preparation) -> None:
    host = RendezvousHost("127.0.0.1", 60.0)
    host.open(1, [])
    told = run_ranks(4, fetch_beside, preparation, host.rendezvous, "aborts")
    assert [(kind, "engine 0 died" in text) for _, kind, text in told[:3]] == [("WeightSyncError", True)] * 3


def fetch_beside(preparation: Preparation, rendezvous: Rendezvous, fault: str) -> tuple[float, str, str] | None:
    """Seconds and error of a rank that fetches beside rank 3, which has the fault."""
    rank, began = torch.distributed.get_rank(), time.monotonic()
    held = held_by_ranks(ROUTED, FOUR_RANKS, random_checkpoint(ROUTED, dtype=torch.bfloat16))[rank]
    quantizer = Quantizer(manifests(ROUTED, FOUR_RANKS, "bfloat16")[rank], preparation, rank)
    member = rendezvous.join(f"train rank {rank}")
    if rank == 3:
        if fault == ABSENT:
            return None
        if fault == "aborts":
            with pytest.raises(WeightSyncError), member.attend(1):
                raise WeightSyncError(Problem("engine 0", "engine 0 died"))
            return None

        def faulty(*_: object) -> Tensors:
            if fault == SILENT:
                time.sleep(SECONDS + 1)
            else:  # as far as its peers can see
                torch.distributed.destroy_process_group()
            return {}

        quantizer._exchanged = faulty  # type: ignore[method-assign]
    try:
        quantizer.tensors(held, member, 1)
    except (WeightSyncError, RankError) as error:
        return time.monotonic() - began, type(error).__name__, str(error)
    except KeyError:  # rank 3 has fetched nothing
        pass
    return None


def quantized(preparation: Preparation, rendezvous: Rendezvous) -> Tensors:
    rank = torch.distributed.get_rank()
    held = held_by_ranks(ROUTED, FOUR_RANKS, random_checkpoint(ROUTED, dtype=torch.bfloat16))[rank]
    quantizer = Quantizer(manifests(ROUTED, FOUR_RANKS, "bfloat16")[rank], preparation, rank)
    member = rendezvous.join(f"train rank {rank}")
    return {name: bits(tensor) for name, tensor in quantizer.tensors(held, member, 1).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as bytes, since float8 cannot be pickled."""
    return tensor.contiguous().view(torch.uint8)
