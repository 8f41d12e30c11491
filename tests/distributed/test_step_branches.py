"""A rollout of an agent weighs as one response, however it is cut into branches and wherever these lie.

First with logprobs that are given: losses and their gradients by token, against loops in float64. Then a real model:
the step in plain torch, and on ranks that share the branches of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.algorithm.over_ranks import token_draws
from megagrpo.algorithm.policy_losses import CovarianceLoss, ObjectiveInputs, grpo_objective
from megagrpo.algorithm.ragged import Ragged
from megagrpo.batching.rank_batches import RankBatch, TrainSequence, make_rank_batches
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.batch import as_tensors, of_tokens, weigh
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.schema import Recipe
from tests.distributed.conftest import CaseOf, Tiny
from tests.distributed.step_case import (
    LONGEST,
    VOCAB,
    Case,
    assert_same_step,
    grpo_step,
    load_reference,
    make_recipe,
    response_logprobs,
)
from tests.distributed.step_ranks import gather, on_ranks, step

LENGTHS = [1, 12, 5, 3, 20, 8, 2]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
MINIBATCHES, DIVISOR, CUTS = 2, 16.0, 4
LAYOUTS = [ParallelLayout(), ParallelLayout(data=2), ParallelLayout(data=2, context=2)]
CORRECTION = {
    "weights": {"name": "sequence", "low": 0.5, "high": 1.5, "normalize": True},
    "reject": [
        {"level": "sequence", "statistic": "k3", "over": "mean", "high": 0.05},
        {"level": "sequence", "statistic": "ratio", "over": "max", "high": 2.2},
        {"level": "token", "statistic": "ratio", "low": 0.6},
    ],
    "veto": 0.4,
}
AGGREGATIONS = [
    "token_mean",
    "token_sum",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    {"name": "seq_mean_token_sum_norm", "divisor": DIVISOR},
]
COVARIANCE: list[dict[str, Any]] = [
    {"name": "clip_cov", "covariance_share": 0.3, "covariance_low": -0.2, "covariance_high": 0.4},
    {"name": "kl_cov", "covariance_share": 0.3, "covariance_kl": 0.7},
]


def name_of(aggregation: Any) -> str:
    return aggregation if isinstance(aggregation, str) else aggregation["name"]


def recipes_in(layout: ParallelLayout) -> dict[str, Recipe]:
    def recipe(**algorithm: Any) -> Recipe:
        plain = {"kl": {"coefficient": 0.0}, "entropy_coefficient": 0.0, "minibatches": MINIBATCHES, "loss": {}}
        return make_recipe(layout, algorithm=plain | algorithm)

    found = {name_of(each): recipe(aggregation=each) for each in AGGREGATIONS}
    found |= {f"{name_of(each)}, corrected": recipe(aggregation=each, correction=CORRECTION) for each in AGGREGATIONS}
    agent = {"function": "agent.py:rollout", "tokens_max": LONGEST}
    for loss in COVARIANCE:
        of_agent = recipe(loss=loss)
        found[loss["name"]] = Recipe.model_validate({**of_agent.model_dump(exclude_unset=True), "agent": agent})
    return found | {"gspo": recipe(loss={"name": "gspo", "clip_low": 0.02, "clip_high": 0.02})}


def numbers(seed: int) -> dict[str, np.ndarray]:
    """Logprobs and an advantage of every response token, row after row."""
    random = np.random.default_rng(seed)
    new = random.normal(-1, 0.5, OFFSETS[-1])
    old = new + random.normal(0, 0.2, OFFSETS[-1])
    spread = np.repeat(random.uniform(0.02, 0.4, len(LENGTHS)), LENGTHS)
    rollout = old + random.normal(0, spread)
    advantages = random.normal(0, 1, OFFSETS[-1])
    found = {"new": new, "old": old, "rollout": rollout, "advantages": advantages}
    return {name: values.astype(np.float32) for name, values in found.items()}


def cut(seed: int, rollout: np.ndarray) -> list[TrainSequence]:
    """Every row in one to four branches, with given tokens before and between sampled ones; seed 0: one, no gaps."""
    random, sequences = np.random.default_rng(seed), []
    for row, length in enumerate(LENGTHS):
        count = int(random.integers(1, min(4, length) + 1)) if seed else 1
        inner = np.sort(random.choice(np.arange(1, length), count - 1, replace=False)) if count > 1 else []
        bounds = [0, *map(int, inner), length]
        for first, end in pairwise(bounds):
            mask = [False, False]
            for _ in range(end - first):
                mask += [False] * int(random.integers(0, 3) if seed and random.random() < 0.4 else 0) + [True]
            trained = np.array(mask)
            logprobs = np.zeros(len(mask), np.float32)
            logprobs[trained] = rollout[OFFSETS[row] + first : OFFSETS[row] + end]
            sequences.append(TrainSequence(random.integers(0, VOCAB, len(mask)), trained, logprobs, row, first))
    return sequences


# --- with logprobs that are given -------------------------------------------------------------------------------------


def losses_of_cuts(rank: TrainRank, batch: RankBatch, advantages: Any, recipes: dict[str, Recipe]) -> dict[Any, Any]:
    """By seed and recipe: this rank's part of the losses' sum, and d loss / d logprob of its tokens, 0 elsewhere."""
    found = {}
    for seed in range(CUTS):
        batches = make_rank_batches(
            cut(seed, numbers(seed)["rollout"]),
            layout=rank.layout,
            minibatches=MINIBATCHES,
            tokens_per_microbatch=24,
            seed=7,
        )
        own = batches[rank.where.data]
        whole = as_tensors(own, rank.layout, rank.where.context, rank.device, has_logits=True, at_once=1)
        offsets = torch.from_numpy(OFFSETS)
        values = {name: of_tokens(whole, Ragged(each, OFFSETS), rank.device) for name, each in numbers(seed).items()}
        index = [offsets[response.rows] + response.index for response in whole.responses]
        for name, recipe in recipes.items():
            total, gradients = 0.0, np.zeros(OFFSETS[-1])
            for minibatch in whole.minibatches:
                new, old, _, signs = (
                    minibatch.part_of(values[each]) for each in ("new", "old", "rollout", "advantages")
                )
                weights = weigh(minibatch, signs, old, recipe, seed)
                for micro, response in enumerate(minibatch.responses):
                    logprobs = new[micro].clone().requires_grad_()
                    inputs = ObjectiveInputs(
                        logprobs=logprobs,
                        old_logprobs=old[micro],
                        advantages=signs[micro],
                        sequences=response.sequences,
                        weights=weights.weights[micro],
                        entropy=None,
                        reference_logprobs=None,
                        importance=weights.importance and weights.importance[micro],
                        chosen=None if weights.chosen is None else weights.chosen[micro],
                    )
                    terms = recipe.algorithm.loss, recipe.algorithm.kl
                    loss = grpo_objective(inputs, *terms, kl_coefficient=0.0, entropy_coefficient=0.0).loss
                    total += loss.item()
                    if len(logprobs):
                        (gradient,) = torch.autograd.grad(loss, logprobs)
                        gradients[index[minibatch.first + micro].numpy()] += gradient.numpy()
            found[seed, name] = total, gradients
    return found


def loop(seed: int, recipe: Recipe, rows_of_minibatches: Sequence[set[int]]) -> tuple[float, np.ndarray]:
    """The same for whole rollouts in float64, token by token, from the formulas. gspo: for branches."""
    n = {name: values.astype(np.float64) for name, values in numbers(seed).items()}
    algorithm, total, gradients = recipe.algorithm, 0.0, np.zeros(OFFSETS[-1])
    tokens_of = [range(OFFSETS[row], OFFSETS[row + 1]) for row in range(len(LENGTHS))]
    for rows in rows_of_minibatches:
        d, importance = n["old"] - n["rollout"], np.ones(OFFSETS[-1])
        kept = {row: list(tokens_of[row]) for row in rows}
        if algorithm.correction.corrects:
            weight = {row: min(max(math.exp(sum(d[t] for t in tokens_of[row])), 0.5), 1.5) for row in rows}
            for row in rows:
                each = tokens_of[row]
                k3 = sum(math.exp(d[t]) - 1 - d[t] for t in each) / len(each)
                vetoed = any(d[t] < math.log(0.4) for t in each)
                if k3 > 0.05 or max(math.exp(d[t]) for t in each) > 2.2 or vetoed:
                    kept[row] = []
                kept[row] = [t for t in kept[row] if math.exp(d[t]) >= 0.6]
            left = [row for row in rows if kept[row]]
            mean = sum(weight[row] for row in left) / len(left) if left else 1.0
            for row in rows:
                for t in tokens_of[row]:
                    importance[t] = weight[row] / mean
        responses = max(sum(bool(each) for each in kept.values()), 1)
        tokens = max(sum(len(each) for each in kept.values()), 1)
        sequence_mean = {}
        for branch in cut(seed, numbers(seed)["rollout"]):
            own = range(OFFSETS[branch.row] + branch.first, OFFSETS[branch.row] + branch.first + branch.loss_mask.sum())
            sequence_mean |= dict.fromkeys(own, sum(n["new"][t] - n["old"][t] for t in own) / len(own))
        chosen = chosen_tokens(seed, recipe, rows) if isinstance(algorithm.loss, CovarianceLoss) else set()
        for row in rows:
            for t in kept[row]:
                scale = {
                    "token_mean": 1 / tokens,
                    "token_sum": 1,
                    "seq_mean_token_sum": 1 / responses,
                    "seq_mean_token_mean": 1 / (len(kept[row]) * responses),
                    "seq_mean_token_sum_norm": 1 / (DIVISOR * responses),
                }[algorithm.aggregation.name]
                log_ratio = sequence_mean[t] if algorithm.loss.name == "gspo" else n["new"][t] - n["old"][t]
                ratio, a = math.exp(log_ratio), n["advantages"][t]
                if algorithm.loss.name == "kl_cov":
                    added = algorithm.loss.covariance_kl * math.copysign(t in chosen, log_ratio)
                    total += scale * (-ratio * a + added * log_ratio)
                    gradients[t] = scale * (-ratio * a + added)
                    continue
                if algorithm.loss.name == "clip_cov" and t in chosen:
                    continue
                low, high = 1 - algorithm.loss.clip_low, 1 + algorithm.loss.clip_high
                total -= scale * importance[t] * min(ratio * a, min(max(ratio, low), high) * a)
                cut_off = ratio > high if a > 0 else ratio < low
                gradients[t] = 0.0 if cut_off else -scale * importance[t] * ratio * a
    return total, gradients


def chosen_tokens(seed: int, recipe: Recipe, rows: set[int]) -> set[int]:
    """Returns the tokens that clip_cov and kl_cov treat apart: a sort of a minibatch's, drawn by row and index."""
    loss, n = recipe.algorithm.loss, {name: values.astype(np.float64) for name, values in numbers(seed).items()}
    tokens = [t for row in rows for t in range(OFFSETS[row], OFFSETS[row + 1])]
    old, advantages = n["old"] - n["old"][tokens].mean(), n["advantages"] - n["advantages"][tokens].mean()
    covariance = old * advantages
    count = max(1, int(loss.covariance_share * len(tokens)))
    if loss.name == "kl_cov":
        return set(sorted(tokens, key=lambda t: -covariance[t])[:count])
    row_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    index = np.arange(OFFSETS[-1]) - OFFSETS[row_of]
    draws = token_draws(seed, torch.from_numpy(row_of), torch.from_numpy(index)).tolist()
    candidates = [t for t in tokens if loss.covariance_low <= covariance[t] <= loss.covariance_high]
    assert len(candidates) > count, "nothing is drawn"
    return set(sorted(candidates, key=lambda t: draws[t])[:count])


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one rank", "data", "data, context"])
def test_losses_and_gradients_are_those_of_whole_rollouts_however_they_are_cut(layout, case_of: CaseOf):
    recipes = recipes_in(layout)
    results = on_ranks(losses_of_cuts, recipes["token_mean"], case_of("qwen3"), recipes)
    for seed in range(CUTS):
        batches = make_rank_batches(
            cut(seed, numbers(seed)["rollout"]),
            layout=layout,
            minibatches=MINIBATCHES,
            tokens_per_microbatch=24,
            seed=7,
        )
        minibatches = [
            {row for batch in batches for micro in batch.minibatches[m] for row in micro.rows}
            for m in range(MINIBATCHES)
        ]
        assert not seed or shared_rows(batches) or layout.data == 1
        for name, recipe in recipes.items():
            wanted_loss, wanted = loop(seed, recipe, minibatches)
            loss, gradients = (sum(part) for part in zip(*(result[seed, name] for result in results), strict=True))
            assert loss == pytest.approx(wanted_loss, rel=2e-5, abs=1e-6), (seed, name)
            np.testing.assert_allclose(gradients, wanted, rtol=5e-5, atol=1e-6, err_msg=f"{name}, {seed}")


def shared_rows(batches: Sequence[RankBatch]) -> set[int]:
    """Rows with branches on several data ranks."""
    rows = [{row for minibatch in batch.minibatches for micro in minibatch for row in micro.rows} for batch in batches]
    return {row for i, own in enumerate(rows) for others in rows[i + 1 :] for row in own & others}


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(tiny: Tiny) -> Case:
    """Branches of a real model's tokens, engines' logprobs a little off, and an advantage for each token."""
    directory, random = tiny("qwen3"), np.random.default_rng(3)
    model, sequences = load_reference(directory), []
    for branch in cut(3, numbers(3)["rollout"]):
        with torch.no_grad():
            logprobs = response_logprobs(model, branch.tokens)[0].numpy()
        off = np.concatenate([[0], logprobs]) + random.normal(0, 0.25, len(branch.tokens))
        rollout = np.where(branch.loss_mask, off, 0).astype(np.float32)
        sequences.append(TrainSequence(branch.tokens, branch.loss_mask, rollout, branch.row, branch.first))
    return Case(directory, sequences, Ragged(numbers(3)["advantages"], OFFSETS))


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_branches_of_a_rollout_on_several_ranks_take_the_step_of_plain_torch(aggregation, case: Case):
    plain = {"algorithm": {"aggregation": aggregation}, "train": {"distributed_optimizer": False}}
    recipes = [make_recipe(layout, **plain) for layout in LAYOUTS[1:]]
    wanted = grpo_step(case, recipes[0], load_reference(case.directory))
    for recipe in recipes:
        batches = make_rank_batches(
            case.sequences,
            layout=recipe.train.layout.parallel(),
            minibatches=1,
            tokens_per_microbatch=LONGEST,
            seed=1,
        )
        assert shared_rows(batches)
        micros = [micro for batch in batches for micro in batch.minibatches[0]]
        assert any(len(set(micro.rows)) < len(micro.rows) for micro in micros), (
            "no microbatch has two branches of a row"
        )
        assert_same_step(gather(on_ranks(step, recipe, case)), wanted)


def mismatch(rank: TrainRank, batch: RankBatch, advantages: Any) -> Any:
    rank.load_batch(batch)
    rank.compute_old_logprobs()
    rank.compute_reference_logprobs()
    metrics = rank.update(advantages, 0.0, 0.1, step=1)
    return metrics and metrics.mismatch


def test_the_mismatch_of_sequences_is_that_of_whole_rollouts(case: Case):
    model, of_row, tokens = load_reference(case.directory), {}, 0
    for sequence in case.sequences:
        with torch.no_grad():
            logprobs = response_logprobs(model, sequence.tokens)[0].numpy()
        d = (logprobs - sequence.rollout_logprobs[1:])[sequence.loss_mask[1:]]
        of_row[sequence.row] = of_row.get(sequence.row, 0.0) + d.sum()
        tokens += len(d)
    wanted = np.mean([math.exp(d) ** 2 for d in of_row.values()]) - 1
    for layout in LAYOUTS[:2]:
        (found,) = [each for each in on_ranks(mismatch, make_recipe(layout), case) if each]
        assert found.tokens == tokens
        assert found.chi2_sequence == pytest.approx(wanted, rel=1e-3)
