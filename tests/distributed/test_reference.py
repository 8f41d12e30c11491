"""A reference policy that follows the policy, and what a checkpoint remembers of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.rank import TrainRank
from tests.distributed.conftest import CaseOf
from tests.distributed.step_case import LR, assemble, make_recipe
from tests.distributed.step_ranks import Parts, on_ranks, save, trained_of, update

SHARE = 0.25


def reference(rank: TrainRank) -> Parts:
    """Returns the weights that compute the reference logprobs."""
    with rank.policy.reference.in_place_of_policy():
        return trained_of(rank.policy)


def follow_and_save(
    rank: TrainRank, batch: RankBatch, advantages: np.ndarray, directory: Path
) -> tuple[Parts, Parts, Parts]:
    """Weights at the start, after an update, and the reference after it has followed; all of it saved."""
    start = trained_of(rank.policy)
    rank.load_batch(batch)
    rank.compute_reference_logprobs()
    update(rank, advantages)
    rank.update_reference()
    rank.release(["reference"])
    assert not any(tensor.untyped_storage().nbytes() for tensor in rank.policy.reference.tensors)
    with pytest.raises(RankError, match="reference released"):
        save(rank, directory)
    rank.restore(["reference"])
    save(rank, directory)
    return start, trained_of(rank.policy), reference(rank)


def load_and_look(rank: TrainRank, batch: RankBatch, advantages: np.ndarray, directory: Path) -> tuple[Parts, Parts]:
    """The reference as it comes from the model, and as it comes from the checkpoint."""
    before = reference(rank)
    rank.load(directory)
    return before, reference(rank)


@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", None), ("bfloat16", None), ("float32", {"rank": 2, "alpha": 4.0})]
)
def test_a_reference_follows_by_its_share_and_is_in_the_checkpoint(dtype, lora, case_of: CaseOf, tmp_path):
    case = case_of("qwen2_tied")
    saving, loading = (
        make_recipe(
            layout,
            model={"path": "unused", "dtype": dtype},
            algorithm={"reference": {"update_every_steps": 1, "share": SHARE}},
            train={"lora": lora},
        )
        for layout in (ParallelLayout(tensor=2), ParallelLayout(pipeline=2))
    )
    results = on_ranks(follow_and_save, saving, case, tmp_path)
    start, policy, followed = (assemble(parts) for parts in zip(*results, strict=True))
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for name in start:
        wanted = (1 - SHARE) * start[name].astype(np.float64) + SHARE * policy[name]
        np.testing.assert_allclose(followed[name], wanted, rtol=tolerance, atol=tolerance / 10)
    assert max(np.abs(policy[name] - start[name]).max() for name in start) > LR / 2

    fresh, restored = (assemble(parts) for parts in zip(*on_ranks(load_and_look, loading, case, tmp_path), strict=True))
    for name in start:
        np.testing.assert_array_equal(fresh[name], start[name])
        np.testing.assert_array_equal(restored[name], followed[name])
