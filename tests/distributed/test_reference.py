"""A reference policy that follows the policy, and what a checkpoint remembers of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.checkpoint.store import CheckpointStore, SavedFile
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.convert.merge_lora import merge_lora
from megagrpo.convert.targets import to_hugging_face
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.rank import TrainRank
from megagrpo.weights.files.adapters import key_a, key_b, merged
from tests.distributed.conftest import CaseOf
from tests.distributed.step_case import LR, assemble, make_recipe
from tests.distributed.step_ranks import Parts, on_ranks, save, trained_of, update
from tests.safetensors_files import saved

SHARE = 0.25


def reference(rank: TrainRank) -> Parts:
    """Returns the weights that compute the reference logprobs."""
    with rank.policy.reference.in_place_of_policy():
        return trained_of(rank.policy)


def follow_and_save(
    rank: TrainRank, batch: RankBatch, advantages: np.ndarray, directory: Path
) -> tuple[Parts, Parts, Parts, tuple[SavedFile, ...]]:
    """Weights at the start, after an update, and the reference after it has followed; files of all of it."""
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
    files = save(rank, directory)
    return start, trained_of(rank.policy), reference(rank), files


def load_and_look(rank: TrainRank, batch: RankBatch, advantages: np.ndarray, directory: Path) -> tuple[Parts, Parts]:
    """The reference as it comes from the model, and as it comes from the checkpoint."""
    before = reference(rank)
    rank.load(directory)
    return before, reference(rank)


@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", None), ("bfloat16", None), ("float32", {"rank": 2, "alpha": 4.0})]
)
def test_a_reference_follows_by_its_share_is_in_the_checkpoint_and_exported_from_it(
    dtype, lora, case_of: CaseOf, tmp_path
):
    case, store = case_of("qwen2_tied"), CheckpointStore(tmp_path / "run", keep_last=1)
    saving, loading = (
        make_recipe(
            layout,
            model={"path": "unused", "dtype": dtype},
            algorithm={"reference": {"update_every_steps": 1, "share": SHARE}},
            train={"lora": lora},
        )
        for layout in (ParallelLayout(tensor=2), ParallelLayout(pipeline=2))
    )
    *results, files = zip(*on_ranks(follow_and_save, saving, case, store.begin(1)), strict=True)
    start, policy, followed = map(assemble, results)
    recipe = {"model": {"path": str(case.directory)}, "train": {"lora": lora}}
    store.commit(TrainerState(1, weight_version=2, data_cursor={}, recipe=recipe), [its for of in files for its in of])
    run, output = tmp_path / "run", tmp_path / "average"
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for name in start:
        wanted = (1 - SHARE) * start[name].astype(np.float64) + SHARE * policy[name]
        np.testing.assert_allclose(followed[name], wanted, rtol=tolerance, atol=tolerance / 10)
    assert max(np.abs(policy[name] - start[name]).max() for name in start) > LR / 2

    looked = zip(*on_ranks(load_and_look, loading, case, run / "step_000001" / "rank"), strict=True)
    fresh, restored = map(assemble, looked)
    for name in start:
        np.testing.assert_array_equal(fresh[name], start[name])
        np.testing.assert_array_equal(restored[name], followed[name])

    average = {name: torch.tensor(followed[name]) for name in start}
    if lora:
        merge_lora(case.directory, run, output, reference=True)
        pairs = {name: [average.get(key(name)) for key in (key_a, key_b)] for name in saved(case.directory)}
        whole = saved(case.directory).items()
        average = {name: weight if None in pairs[name] else merged(weight, *pairs[name], 2.0) for name, weight in whole}
    else:
        to_hugging_face(run, output, dtype=dtype, reference=True)
    exported = saved(output)
    assert exported.keys() == average.keys()
    for name, wanted in average.items():
        torch.testing.assert_close(exported[name].float(), wanted.float(), rtol=1e-6 if lora else 0, atol=0)
