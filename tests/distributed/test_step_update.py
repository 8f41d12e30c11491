"""Whole updates: minibatches, epochs, the distributed optimizer, the reference policy, metrics, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import Recipe
from tests.distributed.grpo_case import (
    LONGEST,
    LR,
    Case,
    assemble,
    load_reference,
    make_batches,
    make_case,
    make_recipe,
)
from tests.distributed.grpo_ranks import Parts, boxes, gather, metrics_of_step, on_ranks, row_kl, step, update
from tests.rank_group import CALL_SECONDS, ENVIRONMENT, REPOSITORY, RankGroupError
from tests.tiny_models import make_model

ALONE = ParallelLayout()
TENSOR_AND_DATA = ParallelLayout(tensor=2, data=2)
CONTEXT_AND_PIPELINE = ParallelLayout(context=2, pipeline=2)
SEVERAL = {
    "minibatches": 3,
    "epochs": 2,
    "correction": {
        "weights": {"name": "token", "high": 1.3, "normalize": True},
        "reject": [{"level": "token", "statistic": "ratio", "low": 0.5, "high": 2.0}],
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Case]:
    directory = make_model("qwen3", tmp_path_factory.mktemp("update") / "qwen3", num_hidden_layers=2)
    return directory, make_case(load_reference(directory), temperature=0.8)


def on_all(function: Callable[..., Any], model: tuple[Path, Case], recipe: Recipe, *args: Any) -> list[Any]:
    directory, case = model
    return on_ranks(function, recipe, directory, make_batches(recipe, case.sequences), case.advantages, *args)


# --- minibatches and epochs -------------------------------------------------------------------------------------------


def several_steps(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> tuple[Any, Parts, Parts]:
    """Two steps of the loop, as the trainer calls them."""
    before = boxes(rank, rank.tensors())
    for _ in range(2):
        rank.load_batch(batches[rank.where.data])
        rank.compute_old_logprobs()
        rank.compute_reference_logprobs()
        metrics = update(rank, advantages, LR / 10)
    return metrics, before, boxes(rank, rank.tensors())


@pytest.fixture(scope="module")
def several_alone(model):
    return collect(on_all(several_steps, model, make_recipe(ALONE, algorithm=SEVERAL)))


def figures(metrics: Any) -> dict[str, Any]:
    """All numbers of an update, those of its mismatch and its correction too; not the worst tokens."""
    found = asdict(metrics)
    parts = {part: found.pop(part) or {} for part in ("mismatch", "correction")}
    parts["mismatch"].pop("worst")
    return found | {f"{part} {name}": value for part, values in parts.items() for name, value in values.items()}


def collect(results: Sequence[Any]) -> tuple[dict[str, float], np.ndarray]:
    (metrics,) = [metrics for metrics, _, _ in results if metrics is not None]
    before, after = (assemble([result[index] for result in results]) for index in (1, 2))
    return figures(metrics), np.concatenate([(after[name] - before[name]).ravel() for name in sorted(after)])


@pytest.mark.parametrize("layout", [TENSOR_AND_DATA, CONTEXT_AND_PIPELINE], ids=str)
def test_minibatches_and_epochs_do_not_depend_on_the_layout(layout, model, several_alone):
    metrics, change = collect(on_all(several_steps, model, make_recipe(layout, algorithm=SEVERAL)))
    wanted_metrics, wanted_change = several_alone
    assert np.linalg.norm(change - wanted_change) <= 1e-3 * np.linalg.norm(wanted_change)
    assert metrics == pytest.approx(wanted_metrics, rel=2e-3, abs=1e-5)
    assert metrics["mismatch tokens"] == sum(int(s.loss_mask.sum()) for s in model[1].sequences)
    assert metrics["kl"] > 1e-4
    assert 0.05 < metrics["correction rejected_share"] < 0.95
    assert metrics["correction weight_mean"] != 1


def test_the_same_seed_and_layout_give_the_same_numbers(model, several_alone):
    metrics, change = collect(on_all(several_steps, model, make_recipe(ALONE, algorithm=SEVERAL)))
    assert metrics == several_alone[0]
    np.testing.assert_array_equal(change, several_alone[1])


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", TENSOR_AND_DATA), ("qwen3_moe", ParallelLayout(data=4, expert=2))], ids=str
)
def test_the_distributed_optimizer_takes_the_same_step(family, layout, tmp_path):
    directory = make_model(family, tmp_path / family, num_hidden_layers=2)
    case = make_case(load_reference(directory), temperature=0.8)
    results = []
    for distributed in (False, True):
        recipe = make_recipe(layout, train={"distributed_optimizer": distributed})
        steps = on_ranks(step, recipe, directory, make_batches(recipe, case.sequences), case.advantages, LR)
        results.append(gather(steps, gradients=not distributed))
    plain, distributed = results
    assert distributed.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    assert np.linalg.norm(distributed.change() - plain.change()) <= 1e-5 * np.linalg.norm(plain.change())


def test_bfloat16_with_float32_gradients_stays_near_float32(model):
    directory, case = model
    results = []
    for dtype in ("float32", "bfloat16"):
        recipe = make_recipe(ParallelLayout(tensor=2), model={"path": "unused", "dtype": dtype})
        steps = on_ranks(metrics_of_step, recipe, directory, make_batches(recipe, case.sequences), case.advantages)
        results.append(next(metrics for metrics in steps if metrics))
    exact, rounded = results
    assert rounded.loss == pytest.approx(exact.loss, abs=0.02)
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)


# --- old logprobs and reference ---------------------------------------------------------------------------------------


def first_step_metrics(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray, old: bool) -> Any:
    rank.load_batch(batches[rank.where.data])
    if old:
        rank.compute_old_logprobs()
    return update(rank, advantages, LR)


def test_one_update_needs_no_pass_for_old_logprobs(model):
    recipe = make_recipe(ALONE, algorithm={"kl": {"coefficient": 0.0}})
    (own,), (stored,) = (on_all(first_step_metrics, model, recipe, old) for old in (False, True))
    assert own.ratio_mean == 1.0
    assert own.clip_low_fraction == own.clip_high_fraction == 0.0
    assert own.kl is None
    assert figures(replace(stored, kl=0)) == pytest.approx(figures(replace(own, kl=0)), rel=1e-5)
    assert 0 < own.entropy < np.log(131)


def reference_and_policy(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> Any:
    """Logprobs of the reference before and after the policy moved, and sums of KL by row."""
    logprobs, sums = [], []
    for _ in range(2):
        rank.load_batch(batches[rank.where.data])
        rank.compute_old_logprobs()
        rank.compute_reference_logprobs()
        if rank.where.pipeline == rank.layout.pipeline - 1:
            passes = rank.passes.old_logprobs, rank.passes.reference_logprobs
            logprobs.append([np.concatenate([found.numpy() for found in each]) for each in passes])
        sums.append(row_kl(rank))
        update(rank, advantages, LR)
    return logprobs, sums


def test_the_reference_stays_while_the_policy_moves_and_kl_is_summed_by_sequence(model):
    sums = {}
    for layout in (ALONE, TENSOR_AND_DATA, CONTEXT_AND_PIPELINE):
        results = on_all(reference_and_policy, model, make_recipe(layout, algorithm={"kl": {"coefficient": 0.1}}))
        for logprobs, _ in results:
            if logprobs:
                (old, reference), (old_after, reference_after) = logprobs
                np.testing.assert_array_equal(old, reference)
                np.testing.assert_array_equal(reference, reference_after)
                assert np.abs(old - old_after).max() > 0.1
        assert {row for _, (first, _) in results for row in first} == {s.row for s in model[1].sequences}
        assert not any(kl for _, (first, _) in results for kl in first.values())
        sums[layout] = {s.row: sum(second.get(s.row, 0.0) for _, (_, second) in results) for s in model[1].sequences}
    for other in (TENSOR_AND_DATA, CONTEXT_AND_PIPELINE):
        assert sums[other] == pytest.approx(sums[ALONE], rel=1e-3, abs=1e-5)
    assert min(sums[ALONE].values()) > 0


def numbers_without_gradients(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> Any:
    """Old logprobs by row, those of the reference of a policy that has moved, and how many microbatches passed."""
    rank.load_batch(batches[rank.where.data])
    rank.compute_old_logprobs()
    rank.compute_reference_logprobs()
    update(rank, advantages, LR)
    rank.load_batch(batches[rank.where.data])
    rank.compute_old_logprobs()
    rank.compute_reference_logprobs()
    found = [rank.token_numbers(each) for each in (rank.passes.old_logprobs, rank.passes.reference_logprobs)]
    return found, len(rank.batch.joined)


@pytest.mark.parametrize(
    "layout",
    [TENSOR_AND_DATA, CONTEXT_AND_PIPELINE, ParallelLayout(pipeline=2, virtual_pipeline=2)],
    ids=str,
)
def test_logprobs_do_not_depend_on_how_many_microbatches_pass_at_once(layout, tmp_path):
    layers = 2 * layout.virtual_pipeline
    directory = make_model("qwen3", tmp_path / "qwen3", num_hidden_layers=layers)
    case = make_case(load_reference(directory), temperature=0.8)
    sequences = case.sequences
    trained, by_size = LONGEST // layout.context, []
    for tokens in (None, 5 * trained):
        sizes = {"tokens_per_microbatch": trained, "logprob_tokens_per_microbatch": tokens}
        recipe = make_recipe(layout, train=sizes, algorithm={"minibatches": 2})
        batches = make_batches(recipe, sequences)
        results = on_ranks(numbers_without_gradients, recipe, directory, batches, case.advantages)
        by_size.append((by_token(results, 0), by_token(results, 1), results[0][1]))
    (old, reference, count), (joined_old, joined_reference, joined_count) = by_size
    assert joined_count < count
    assert len(old) == sum(int(s.loss_mask.sum()) for s in sequences)
    assert joined_old == pytest.approx(old, rel=1e-4, abs=1e-5)
    assert joined_reference == pytest.approx(reference, rel=1e-4, abs=1e-5)
    assert max(abs(old[token] - reference[token]) for token in old) > 0.1


def by_token(results: Sequence[Any], index: int) -> dict[tuple[int, int], float]:
    """What ranks found, by row and index in the response."""
    numbers = [found[index] for found, _ in results if found[index] is not None]
    return {(int(r), int(i)): float(v) for n in numbers for r, i, v in zip(n.rows, n.index, n.values, strict=True)}


# --- the optimizer ----------------------------------------------------------------------------------------------------


def nothing_loaded(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> tuple[Any, Any]:
    rank.load_batch(RankBatch(((),), (0,), (0,), (0.0,)))
    rank.compute_old_logprobs()
    rank.compute_reference_logprobs()
    return row_kl(rank), update(rank, advantages, LR)


@pytest.mark.parametrize("layout", [ALONE, ParallelLayout(pipeline=2)], ids=str)
def test_a_batch_of_nothing_has_no_kl_and_takes_no_step(model, layout):
    results = on_all(nothing_loaded, model, make_recipe(layout))
    assert [kl for kl, _ in results] == [{}] * layout.ranks
    (metrics,) = [metrics for _, metrics in results if metrics is not None]
    assert (metrics.mismatch.tokens, metrics.grad_norm) == (0, 0)


def decay_only(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> tuple[Parts, Parts]:
    rank.load_batch(batches[rank.where.data])
    before = boxes(rank, rank.tensors())
    update(rank, advantages * 0, LR)
    return before, boxes(rank, rank.tensors())


def test_without_signal_only_matrices_decay(model):
    recipe = make_recipe(ALONE, algorithm={"kl": {"coefficient": 0.0}, "entropy_coefficient": 0.0})
    ((before, after),) = on_all(decay_only, model, recipe)
    for (box, old), (_, new) in zip(before, after, strict=True):
        kept = 1 - LR * recipe.train.optimizer.weight_decay if len(box.shape) > 1 else 1
        np.testing.assert_allclose(new, old * kept, rtol=1e-6, err_msg=box.tensor)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_several_optimizer_steps_without_old_logprobs_are_refused(model):
    with pytest.raises(RankGroupError, match="compute_old_logprobs was not called"):
        on_all(first_step_metrics, model, make_recipe(ALONE, algorithm=SEVERAL), False)


def test_an_update_without_the_reference_that_its_recipe_needs_is_refused(model):
    with pytest.raises(RankGroupError, match="compute_reference_logprobs was not called"):
        on_all(first_step_metrics, model, make_recipe(ALONE), True)


def test_a_gradient_that_is_not_finite_ends_the_run(model):
    directory, case = model
    recipe = make_recipe(ALONE)
    with pytest.raises(RankGroupError, match="the gradient is not finite"):
        on_ranks(
            metrics_of_step,
            recipe,
            directory,
            make_batches(recipe, case.sequences),
            np.full(12, np.nan, np.float32),
        )


def released(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> tuple[str, Any, Any]:
    rank.load_batch(batches[rank.where.data])
    rank.release(["gradients", "optimizer"])
    try:
        update(rank, advantages, LR)
    except RankError as error:
        message = str(error)
    rank.restore(["gradients", "optimizer"])
    return message, update(rank, advantages, LR), None


def test_an_update_is_refused_while_its_memory_is_released(model):
    recipe = make_recipe(ALONE, algorithm={"kl": {"coefficient": 0.0}})
    ((message, metrics, _),) = on_all(released, model, recipe)
    assert "gradients, optimizer released" in message
    assert asdict(metrics) == asdict(on_all(first_step_metrics, model, recipe, False)[0])


def saved_and_loaded(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray, directory: str) -> Any:
    """Metrics of a third step without, and with, going back to a checkpoint after the first."""
    rank.load_batch(batches[rank.where.data])
    update(rank, advantages, LR)
    Path(directory).mkdir(exist_ok=True)
    rank.save(Path(directory))
    first = [update(rank, advantages, LR) for _ in range(2)]
    rank.load(Path(directory))
    return first, [update(rank, advantages, LR) for _ in range(2)]


def test_a_rank_continues_from_its_checkpoint_as_if_nothing_had_happened(model, tmp_path):
    recipe = make_recipe(ParallelLayout(data=2), algorithm={"kl": {"coefficient": 0.0}})
    results = on_all(saved_and_loaded, model, recipe, str(tmp_path / "checkpoint"))
    assert all(first == second for first, second in results)
    assert results[0][0][0].loss != results[0][0][1].loss


# --- torchrun ---------------------------------------------------------------------------------------------------------


def test_ranks_run_under_torchrun(model, tmp_path):
    directory, case = model
    recipe = make_recipe(ParallelLayout(data=2), algorithm={"kl": {"coefficient": 0.0}})
    saved = tmp_path / "case"
    saved.write_bytes(pickle.dumps((recipe, str(directory), make_batches(recipe, case.sequences), case.advantages, LR)))
    script = Path(__file__).with_name("torchrun_update.py")
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", script, saved, tmp_path / "metrics.json"]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = next(m for m in on_all(first_step_metrics, model, recipe, False) if m is not None)
    assert json.loads((tmp_path / "metrics.json").read_text()) == json.loads(json.dumps(asdict(metrics)))
