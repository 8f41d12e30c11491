"""Whole updates: minibatches, epochs, the reference policy, metrics, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megagrpo.batching import rank_batches
from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model import unwrapped
from megagrpo.megatron.rank import TrainRank
from megagrpo.processes.ports import free_port
from tests.distributed.conftest import CaseOf
from tests.distributed.layouts import ROWS, soak
from tests.distributed.step_case import LONGEST, LR, RESPONSES, Case, assemble, make_recipe
from tests.distributed.step_ranks import (
    Parts,
    load_and_pass,
    make_batches,
    of_all_tokens,
    on_ranks,
    states_of,
    the_one,
    trained_of,
    update,
)
from tests.rank_group import run_ranks
from tests.safetensors_files import saved, with_tensors

ALONE = ParallelLayout()
LAYOUTS = ["tensor, data", "unequal, context, expert", "virtual, context"]
SEVERAL = {
    "minibatches": 3,
    "epochs": 2,
    "correction": {
        "weights": {"name": "token", "high": 1.3, "normalize": True},
        "reject": [{"level": "token", "statistic": "ratio", "low": 0.5, "high": 2.0}],
    },
}
UPDATES = SEVERAL | {"minibatches": 2, "epochs": 1}
"""Enough of them that the weights of one are in the passes of another."""
NO_KL = {"kl": {"coefficient": 0.0}}


@pytest.fixture(scope="module")
def case(case_of: CaseOf) -> Case:
    return case_of("qwen3")


# --- minibatches and epochs -------------------------------------------------------------------------------------------


def several_steps(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> tuple[Any, Parts, Parts]:
    """Two steps of the loop, as the trainer calls them."""
    before = trained_of(rank.policy)
    for _ in range(2):
        load_and_pass(rank, batch)
        metrics = update(rank, advantages, LR / 10)
    return metrics, before, trained_of(rank.policy)


def metrics_and_change(case: Case, layout: ParallelLayout) -> tuple[dict[str, float], np.ndarray]:
    results = on_ranks(several_steps, make_recipe(layout, algorithm=SEVERAL), case)
    metrics, before, after = zip(*results, strict=True)
    old, new = assemble(before), assemble(after)
    return figures(the_one(metrics)), np.concatenate([(new[name] - old[name]).ravel() for name in sorted(new)])


def figures(metrics: Any) -> dict[str, Any]:
    """All numbers of an update, those of its mismatch and its correction too; not the worst tokens."""
    found = asdict(metrics)
    parts = {part: found.pop(part) or {} for part in ("mismatch", "correction", "route_differences", "own_routes")}
    parts["mismatch"].pop("worst")
    return found | {f"{part} {name}": value for part, values in parts.items() for name, value in values.items()}


@pytest.fixture(scope="module")
def several_alone(case):
    return metrics_and_change(case, ALONE)


@pytest.mark.parametrize("name", [*soak("tensor, data"), "unequal, context, expert"])
def test_minibatches_and_epochs_do_not_depend_on_the_layout(name, case, several_alone):
    metrics, change = metrics_and_change(case, ROWS[name].of("qwen3"))
    wanted_metrics, wanted_change = several_alone
    assert np.linalg.norm(change - wanted_change) <= 1e-3 * np.linalg.norm(wanted_change)
    assert metrics == pytest.approx(wanted_metrics, rel=2e-3, abs=1e-5)
    assert metrics["mismatch tokens"] == case.tokens
    assert metrics["kl"] > 1e-4
    assert 0.05 < metrics["correction rejected_share"] < 0.95
    assert metrics["correction weight_mean"] != 1


def test_the_same_seed_and_layout_give_the_same_numbers(case, several_alone):
    metrics, change = metrics_and_change(case, ALONE)
    assert metrics == several_alone[0]
    np.testing.assert_array_equal(change, several_alone[1])


@pytest.mark.parametrize("name", [*soak("tensor, data"), "unequal, context, expert"])
def test_exchanges_beside_passes_change_no_number(name: str, case: Case) -> None:
    """Compares several steps and updates: also weights that a forward pass brings are there when others read them."""
    layout = ROWS[name].of("qwen3")
    found = []
    for overlap in ([], ["gradients", "parameters"]):
        train = {"overlap": overlap, "distributed_optimizer": True}
        results = on_ranks(several_steps, make_recipe(layout, algorithm=UPDATES, train=train), case)
        metrics, before, after = zip(*results, strict=True)
        found.append((figures(the_one(metrics)), assemble(after)))
        assert any((found[-1][1][key] != value).any() for key, value in assemble(before).items())
    (wanted, wanted_weights), (metrics, weights) = found
    assert metrics == wanted
    for key, value in wanted_weights.items():
        np.testing.assert_array_equal(weights[key], value)


def padded_as_for_gpus() -> None:
    rank_batches.TOKENS_MULTIPLE["cpu"], rank_batches.ONE_SIZE_SHARE = 64, 1.0


def two_steps_of_one_size(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> tuple[Any, ...]:
    found = several_steps(rank, batch, advantages)
    sizes = [{packed.tokens.shape[-1] for packed in minibatch.packed} for minibatch in rank.batch.minibatches]
    return *found, sizes, unwrapped(rank.policy.chunks[0]).config.variable_seq_lengths


@pytest.mark.parametrize("name", ["virtual, context", *soak("tensor, data")])
def test_padding_changes_no_number(name: str, case: Case) -> None:
    layout, found = ROWS[name].of("qwen3"), []
    for first in (None, padded_as_for_gpus):
        results = on_ranks(two_steps_of_one_size, make_recipe(layout, algorithm=UPDATES), case, first=first)
        metrics, before, after, sizes, told = zip(*results, strict=True)
        old, new = assemble(before), assemble(after)
        change = np.concatenate([(new[key] - old[key]).ravel() for key in sorted(new)])
        found.append((figures(the_one(metrics)), change, sizes[0], told[0]))
    (wanted, wanted_change, *_), (metrics, change, sizes, told) = found
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert np.linalg.norm(change - wanted_change) <= 1e-4 * np.linalg.norm(wanted_change)
    assert all(size % 64 == 0 for of_minibatch in sizes for size in of_minibatch)
    if layout.pipeline > 1:
        assert all(len(of_minibatch) == 1 for of_minibatch in sizes)
        assert not told


def test_gradients_in_bfloat16_are_near_those_in_float32(case: Case) -> None:
    layout, norms = ROWS["tensor, data"].of("qwen3"), []
    for kind in ("float32", "bfloat16"):
        recipe = make_recipe(layout, model={"path": "unused", "dtype": "bfloat16"}, train={"gradient_dtype": kind})
        metrics, *_ = zip(*on_ranks(several_steps, recipe, case), strict=True)
        norms.append(the_one(metrics).grad_norm)
    assert norms[0] != norms[1]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


# --- old logprobs and reference ---------------------------------------------------------------------------------------


def first_metrics(rank: TrainRank, batch: RankBatch, advantages: np.ndarray, old: bool = False) -> Any:
    rank.load_batch(batch)
    if old:
        rank.compute_old_logprobs()
    return update(rank, advantages)


def test_one_update_needs_no_pass_for_old_logprobs(case):
    recipe = make_recipe(ALONE, algorithm=NO_KL)
    (own,), (stored,) = (on_ranks(first_metrics, recipe, case, old) for old in (False, True))
    without = NO_KL | {"entropy_coefficient": 0.0}
    (silent,), (reported,) = (
        on_ranks(first_metrics, make_recipe(ALONE, algorithm=without | {"entropy_metric": metric}), case)
        for metric in (False, True)
    )
    assert own.ratio_mean == 1.0
    assert own.clip_low_fraction == own.clip_high_fraction == 0.0
    # Exactly, also by logprobs of a pass of their own: clips of 3e-4, as GSPO's, are as small as rounding.
    assert (stored.ratio_mean, stored.clip_low_fraction, stored.clip_high_fraction) == (1.0, 0.0, 0.0)
    assert own.kl is None
    assert figures(replace(stored, kl=0)) == pytest.approx(figures(replace(own, kl=0)), rel=1e-5)
    assert 0 < own.entropy < np.log(131)
    assert silent.entropy is None, "it need not be computed"
    assert figures(replace(silent, entropy=0)) == figures(replace(reported, entropy=0))


def passes_of_two_steps(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> list[dict[str, Any]]:
    """Returns the figures of the passes before each update, and the number of microbatches."""
    found = []
    for _ in range(2):
        load_and_pass(rank, batch)
        old, reference = (rank.token_numbers(n) for n in (rank.passes.old_logprobs, rank.passes.reference_logprobs))
        found.append(
            {"old": old, "reference": reference, "kl": rank.token_kl(), "energy": rank.token_energy()}
            | {"microbatches": len(rank.batch.joined)}
        )
        update(rank, advantages)
    return found


@pytest.fixture(scope="module")
def passes(case) -> Callable[..., list[dict[str, Any]]]:
    """The two steps of a row: each kind of logprobs and the KL estimates of all tokens."""

    @cache
    def made(name: str, at_once: int | None = None) -> list[dict[str, Any]]:
        layout = ROWS[name].of("qwen3")
        trained = LONGEST // layout.context
        sizes = {"tokens_per_microbatch": trained, "logprob_tokens_per_microbatch": at_once and at_once * trained}
        recipe = make_recipe(layout, train=sizes, algorithm={"minibatches": 2, "advantage": {"name": "otb"}})
        steps = zip(*on_ranks(passes_of_two_steps, recipe, case), strict=True)
        return [
            {kind: of_all_tokens(rank[kind] for rank in ranks) for kind in ("old", "reference", "kl", "energy")}
            | {"microbatches": ranks[0]["microbatches"]}
            for ranks in steps
        ]

    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reference_stays_while_the_policy_moves(name, passes):
    first, second = passes(name)
    np.testing.assert_array_equal(first["old"], first["reference"])
    np.testing.assert_array_equal(first["reference"], second["reference"])
    assert np.abs(first["old"] - second["old"]).max() > 0.1
    assert not first["kl"].any()
    alone = passes("one rank")[1]
    rows = np.cumsum([0, *RESPONSES[:-1]])
    sums, wanted = (np.add.reduceat(found["kl"], rows) for found in (second, alone))
    np.testing.assert_allclose(sums, wanted, rtol=1e-3, atol=1e-5)
    assert wanted.min() > 0
    np.testing.assert_allclose(second["energy"], alone["energy"], rtol=1e-4, atol=1e-5)
    probability = np.exp(second["old"].astype(np.float64))
    assert (second["energy"] > (1 - probability) ** 2).all(), "the sum of squares has the token's own, and others"
    assert (second["energy"] < 2).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_logprobs_do_not_depend_on_how_many_microbatches_pass_at_once(name, passes):
    apart, joined = passes(name)[1], passes(name, at_once=5)[1]
    assert joined["microbatches"] < apart["microbatches"]
    for kind in ("old", "reference", "energy"):
        np.testing.assert_allclose(joined[kind], apart[kind], rtol=1e-4, atol=1e-5)


# --- the optimizer, and what is refused -------------------------------------------------------------------------------


def update_of_nothing(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> tuple[Any, Any]:
    load_and_pass(rank, RankBatch(((),), (0,), (0,), (0.0,), ((),)))
    return rank.token_kl(), update(rank, advantages)


@pytest.mark.parametrize("layout", [ALONE, ParallelLayout(pipeline=2)], ids=str)
def test_a_batch_of_nothing_has_no_kl_and_takes_no_step(layout, case):
    kl, metrics = zip(*on_ranks(update_of_nothing, make_recipe(layout), case), strict=True)
    assert not any(kl)
    assert (the_one(metrics).mismatch.tokens, the_one(metrics).grad_norm) == (0, 0)


def decay_only(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> tuple[Parts, Parts]:
    rank.load_batch(batch)
    before = trained_of(rank.policy)
    update(rank, advantages * 0)
    return before, trained_of(rank.policy)


def test_without_signal_only_matrices_decay(case):
    recipe = make_recipe(ALONE, algorithm=NO_KL | {"entropy_coefficient": 0.0})
    ((before, after),) = on_ranks(decay_only, recipe, case)
    for (box, old), (_, new) in zip(before, after, strict=True):
        kept = 1 - LR * recipe.train.optimizer.weight_decay if len(box.shape) > 1 else 1
        np.testing.assert_allclose(new, old * kept, rtol=1e-6, err_msg=box.tensor)


def refused_updates(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> None:
    rank.load_batch(batch)
    with pytest.raises(RankError, match="compute_old_logprobs was not called"):
        update(rank, advantages)
    rank.compute_old_logprobs()
    with pytest.raises(RankError, match="compute_reference_logprobs was not called"):
        update(rank, advantages)
    rank.compute_reference_logprobs()
    with pytest.raises(RankError, match="the gradient is not finite, 3 optimizer steps in a row"):
        update(rank, advantages * np.nan)


@pytest.mark.parametrize("clip_grad", [0.5, 0.0], ids=["clipped", "not clipped"])
def test_updates_without_the_passes_that_they_need_or_with_gradients_that_are_not_finite_are_refused(clip_grad, case):
    """The recipe has several optimizer steps, which need old logprobs, and a KL term, which needs the reference's."""
    optimizer = {"optimizer": {"lr": LR, "clip_grad": clip_grad, "skipped_steps_max": 2}}
    on_ranks(refused_updates, make_recipe(ALONE, algorithm=SEVERAL, train=optimizer), case)


def updates_around_broken_ones(
    rank: TrainRank, batch: RankBatch, advantages: np.ndarray, broken_rank: int | None
) -> tuple[Any, dict[str, Any]]:
    """Two updates. Between them, if there is a broken rank, one with a NaN in its gradient, and one whose loss is
    infinite and its gradient is not."""

    def whole_update() -> Any:
        load_and_pass(rank, batch)
        return update(rank, advantages)

    whole_update()
    skipped = None
    if broken_rank is not None:
        before = states_of(rank.policy)
        if dist.get_rank() == broken_rank:
            parameter = next(p for p in rank.policy.chunks[-1].parameters() if p.requires_grad)
            hook = parameter.register_hook(lambda gradient: gradient * np.nan)
        skipped = whole_update()
        if dist.get_rank() == broken_rank:
            hook.remove()
        only = np.inf if rank.where.data == 0 else 0.0
        load_and_pass(rank, batch)
        minibatch = rank.batch.minibatches[0]
        rank.policy.compute_gradients(
            minibatch.packed,
            lambda i, output: rank.logprobs(output, minibatch.responses[i], entropy=False)[0].sum() * 1e-3 + only,
        )
        assert np.isnan(rank.policy.optimizer_step(LR))
        after = states_of(rank.policy)
        assert all(torch.equal(after[name], value) for name, value in before.items())
    whole_update()
    return skipped, states_of(rank.policy)


@pytest.mark.parametrize(
    ("name", "family", "broken_rank", "overlap"),
    [
        *soak(("tensor, data", "qwen3", 3, [])),
        ("unequal, data", "qwen3", 0, ["gradients", "parameters"]),
        pytest.param("expert, data", "qwen3_moe", 1, [], marks=pytest.mark.long),
    ],
)
def test_an_optimizer_step_with_a_nan_on_one_rank_is_skipped_on_all_and_leaves_nothing_behind(
    name: str, family: str, broken_rank: int, overlap: list[str], case_of: CaseOf
) -> None:
    row, of_family = ROWS[name], case_of(family)
    train = {"overlap": overlap, "distributed_optimizer": row.distributed_optimizer}
    recipe = make_recipe(
        row.of(family), algorithm={"minibatches": 2}, train=train, model={"path": "unused", "dtype": row.dtype}
    )
    broken, whole = (on_ranks(updates_around_broken_ones, recipe, of_family, which) for which in (broken_rank, None))
    metrics = the_one(skipped for skipped, _ in broken)
    assert metrics.skipped_steps == 2
    assert np.isnan(metrics.grad_norm)
    for (_, found), (_, wanted) in zip(broken, whole, strict=True):
        assert any(name.startswith("exp_avg") and value.abs().sum() > 0 for name, value in wanted.items())
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def logprobs_of_broken_references(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> None:
    rank.load_batch(batch)
    rank.compute_reference_logprobs()
    for tensor in rank.policy.reference.tensors:
        tensor.fill_(np.nan)
    with pytest.raises(RankError, match=r"reference are not finite\n.*nan for 164 of 164: token 0 of response \d"):
        rank.compute_reference_logprobs()


def test_logprobs_that_are_not_finite_are_an_error_that_names_tokens(case):
    on_ranks(logprobs_of_broken_references, make_recipe(ALONE), case)


def broken_weights(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> list[str]:
    return sorted(rank.broken())


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["weights", "adapters"])
def test_weights_that_are_not_finite_or_too_large_are_named_on_the_ranks_that_hold_them(lora, case, tmp_path):
    tensors, layer = saved(case.directory), "model.layers.1."
    embedding, key, up = "model.embed_tokens.weight", f"{layer}self_attn.k_proj.weight", f"{layer}mlp.up_proj.weight"
    tensors[key][0, 3] = np.nan
    tensors[up][-1, 0] = -1e20
    tensors[embedding][-1, 0] = np.inf
    broken = replace(case, directory=with_tensors(case.directory, tmp_path, tensors))
    recipe = make_recipe(ParallelLayout(tensor=2), algorithm=NO_KL, train={"lora": lora} if lora else {})
    assert on_ranks(broken_weights, recipe, broken) == [[key], sorted([embedding, up])]
    assert on_ranks(broken_weights, recipe, case) == [[], []]


# --- torchrun ---------------------------------------------------------------------------------------------------------


def update_under_torchrun(rank: int, store: str, port: int, recipe: Any, directory: str, *given: Any) -> Any:
    """The environment is that of a process which torchrun has started. Given: the batches, and advantages."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    trained, (batches, advantages) = TrainRank(recipe, rank, "env://", directory, "cpu"), given
    return first_metrics(trained, batches[trained.where.data], advantages)


def test_ranks_run_under_torchrun(case: Case) -> None:
    recipe = make_recipe(ParallelLayout(data=2), algorithm=NO_KL)
    given = recipe, str(case.directory), make_batches(recipe, case), case.advantages
    under = run_ranks(2, update_under_torchrun, free_port("127.0.0.1"), *given, joined=False)
    assert the_one(under) == the_one(on_ranks(first_metrics, recipe, case))
