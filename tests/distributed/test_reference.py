"""A reference policy that follows the policy, and what a checkpoint remembers of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from tests.distributed.grpo_case import LR, assemble, load_reference, make_batches, make_case, make_recipe
from tests.distributed.grpo_ranks import Parts, adapter_boxes, boxes, on_ranks, update
from tests.tiny_models import make_model

SHARE = 0.25


def follow_and_save(
    rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray, directory: Path
) -> tuple[Parts, Parts, Parts]:
    """Weights at the start, after an update, and the reference after it has followed; all of it saved."""
    start = weights(rank)
    rank.load_batch(batches[rank.where.data])
    rank.compute_reference_logprobs()
    update(rank, advantages, LR)
    rank.update_reference()
    rank.release(["reference"])
    assert not any(tensor.untyped_storage().nbytes() for tensor in rank.reference.tensors)
    with pytest.raises(RankError, match="reference released"):
        rank.save(directory)
    rank.restore(["reference"])
    rank.save(directory)
    return start, weights(rank), reference(rank)


def load_and_look(rank: Any, directory: Path) -> tuple[Parts, Parts]:
    """The reference as it comes from the model, and as it comes from the checkpoint."""
    before = reference(rank)
    rank.load(directory)
    return before, reference(rank)


def weights(rank: Any) -> Parts:
    """Those that are trained."""
    adapters = rank.policy.adapters
    return adapter_boxes(rank, adapters.tensors()) if adapters else boxes(rank, rank.tensors())


def reference(rank: Any) -> Parts:
    """What is in place of the policy's weights when reference logprobs are computed."""
    with rank.reference.in_place_of(rank.policy.chunks):
        return weights(rank)


@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", None), ("bfloat16", None), ("float32", {"rank": 2, "alpha": 4.0})]
)
def test_a_reference_follows_by_its_share_and_is_in_the_checkpoint(tmp_path, dtype, lora):
    model = make_model("qwen2_tied", tmp_path / "model", num_hidden_layers=2)
    case = make_case(load_reference(model), temperature=0.8)
    algorithm = {"kl": {"coefficient": 0.1}, "reference": {"update_every_steps": 1, "share": SHARE}}
    changes = {"algorithm": algorithm, "model": {"path": "unused", "dtype": dtype}}
    layouts = ParallelLayout(tensor=2), ParallelLayout(pipeline=2)
    saving, loading = (
        make_recipe(layout, train=make_recipe(layout).train.model_dump() | {"lora": lora}, **changes)
        for layout in layouts
    )
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    batches = make_batches(saving, case.sequences)
    results = on_ranks(follow_and_save, saving, model, batches, case.advantages, checkpoint)
    start, policy, followed = (assemble(list(parts)) for parts in zip(*results, strict=True))
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for name in start:
        wanted = (1 - SHARE) * start[name].astype(np.float64) + SHARE * policy[name]
        np.testing.assert_allclose(followed[name], wanted, rtol=tolerance, atol=tolerance / 10)
    assert max(np.abs(policy[name] - start[name]).max() for name in start) > LR / 2

    loaded = on_ranks(load_and_look, loading, model, checkpoint)
    fresh, restored = (assemble(list(parts)) for parts in zip(*loaded, strict=True))
    for name in start:
        np.testing.assert_array_equal(fresh[name], start[name])
        np.testing.assert_array_equal(restored[name], followed[name])
