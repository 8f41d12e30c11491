"""Memory released and restored between phases: really gone, and nothing to see in the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import RankError
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.state import shards_of
from tests.distributed.conftest import CaseOf
from tests.distributed.layouts import ROWS, soak
from tests.distributed.step_case import make_recipe
from tests.distributed.step_ranks import load_and_pass, on_ranks, save, states_of, update

PARTS = ("parameters", "gradients", "optimizer", "reference")


def three_steps(rank: TrainRank, batch: RankBatch, advantages: Any, release: bool) -> tuple[Any, ...]:
    """Metrics, states and reference, with everything released and restored before each step if asked."""
    policy, metrics = rank.policy, []
    for _ in range(3):
        if release:
            everything = [*named_tensors(policy.chunks).values(), *rank.policy.reference.tensors]
            for chunk in policy.chunks:
                everything += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            # Asked for its shards, an optimizer makes its moments: before the first step it has none.
            for shard in shards_of(policy.optimizer).values() if metrics else ():
                everything += shard.tensors.values()
            rank.release(PARTS)
            assert not any(tensor.untyped_storage().nbytes() for tensor in everything)
            rank.restore(("reference", "parameters", "optimizer", "gradients"))
        load_and_pass(rank, batch)
        metrics.append(update(rank, advantages))
    return metrics, states_of(policy), dict(enumerate(rank.policy.reference.tensors))


@pytest.mark.parametrize(
    "name",
    [pytest.param("expert, data", marks=pytest.mark.long), "three stages", *soak("tensor", "expert over tensor")],
)
def test_released_memory_is_gone_and_the_numbers_stay_bit_for_bit(name: str, case_of: CaseOf) -> None:
    row = ROWS[name]
    case = case_of(row.family)
    train = {"distributed_optimizer": row.distributed_optimizer}
    recipe = make_recipe(row.layout, model={"path": "unused", "dtype": row.dtype}, train=train)
    without, released = (
        on_ranks(three_steps, recipe, replace(case, sequences=case.sequences[:4]), release) for release in (False, True)
    )
    for (metrics, *tensors), (wanted_metrics, *wanted) in zip(released, without, strict=True):
        assert metrics == wanted_metrics
        for found, wanted_tensors in zip(tensors, wanted, strict=True):
            assert found.keys() == wanted_tensors.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, wanted_tensors[name]), name


def where_the_reference_is(rank: TrainRank, batch: RankBatch, advantages: Any, directory: Path | None) -> Any:
    """Metrics; the reference's bytes on the device after its pass, in the update and after a save; host bytes."""
    held, tensors = [], rank.policy.reference.tensors

    def count() -> None:
        held.append(sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors}))

    load_and_pass(rank, batch)
    count()
    metrics = update(rank, advantages)
    rank.update_reference()
    count()
    if directory:
        save(rank, directory)
        count()
    sizes = {t.untyped_storage(): t.numel() * t.element_size() for t in tensors}
    return metrics, held, rank.policy.offload.host_bytes, sum(sizes.values())


def test_the_reference_is_away_in_updates_if_it_is_offloaded(case_of: CaseOf, tmp_path: Path) -> None:
    kl = {"kl": {"coefficient": 0.1}, "reference": {"update_every_steps": 1, "share": 0.5}}
    found = {}
    for offload in (["reference"], []):
        recipe = make_recipe(ROWS["one rank"].layout, algorithm=kl, train={"offload": offload})
        (found[bool(offload)],) = on_ranks(
            where_the_reference_is, recipe, case_of("qwen2_tied"), tmp_path if offload else None
        )
    metrics, held, host_bytes, size = found[True]
    assert metrics == found[False][0]
    assert held == [0, 0, 0]
    assert all(found[False][1])
    assert host_bytes == size  # and no power of two


def update_while_released(rank: TrainRank, batch: RankBatch, advantages: Any) -> None:
    load_and_pass(rank, batch)
    rank.release(["gradients", "optimizer"])
    rank.release(["optimizer"])
    with pytest.raises(RankError, match="gradients, optimizer released"):
        update(rank, advantages)
    rank.restore(["parameters", "gradients"])
    with pytest.raises(RankError, match="given: optimizer released"):
        update(rank, advantages)


def test_use_of_a_released_part_is_refused_by_name(case_of: CaseOf) -> None:
    on_ranks(update_while_released, make_recipe(ROWS["one rank"].layout), case_of("qwen2_tied"))
