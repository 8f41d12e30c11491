"""Every loss, aggregation and correction: the same loss and gradients in every layout and packing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.schema import Recipe
from tests.distributed.conftest import CaseOf
from tests.distributed.layouts import ROWS, soak
from tests.distributed.step_case import LONGEST, Case, assemble, by_token, make_recipe
from tests.distributed.step_ranks import (
    Parts,
    compute_gradients,
    gradients_of,
    on_ranks,
    take_old_and_reference_from_rollout,
)

TOKEN = {"level": "token", "statistic": "ratio", "low": 0.8, "high": 1.25}
SEQUENCE = {"level": "sequence", "statistic": "k3", "over": "mean", "high": 0.04}
KPOP = {"level": "token", "statistic": "binary_kl", "high": 1e-4}
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"loss": {"name": "ppo_clip", "dual_clip": 1.2}},
    "gspo": {"loss": {"name": "gspo", "clip_low": 0.02, "clip_high": 0.02}, "aggregation": "seq_mean_token_mean"},
    "cispo": {"loss": {"name": "cispo"}, "aggregation": "token_sum"},
    "gmpo": {"loss": {"name": "gmpo"}, "aggregation": "seq_mean_token_sum"},
    "sapo": {"loss": {"name": "sapo"}, "aggregation": "seq_mean_token_sum_norm"},
    "dppo_tv": {"loss": {"name": "dppo_tv", "clip_low": 0.002, "clip_high": 0.002}},
    "dppo_kl": {"loss": {"name": "dppo_kl", "clip_low": 1e-4, "clip_high": 1e-4}},
    "reinforce": {"loss": {"name": "reinforce"}},
    "a user's own": {"loss": {"name": f"{Path(__file__).parent}/own_loss.py:squared", "arguments": {"width": 0.2}}},
    "clip_cov": {"loss": {"name": "clip_cov", "covariance_share": 0.1, "covariance_low": 0.1}},
    "kl_cov": {"loss": {"name": "kl_cov", "covariance_share": 0.1}},
    "straight-through KL": {"kl": {"coefficient": 0.3, "straight_through": True}},
    "weights by token": {"correction": {"weights": {"name": "token", "high": 1.1, "normalize": True}}},
    "weights by sequence": {"correction": {"weights": {"name": "sequence", "low": 0.5, "outside": "zero"}}},
    "rejections": {"correction": {"reject": [TOKEN, SEQUENCE]}, "aggregation": "seq_mean_token_mean"},
    "geometric weights, KPop": {"correction": {"reject": [KPOP], "weights": {"name": "geometric", "normalize": True}}},
    "veto": {"correction": {"veto": 0.75, "weights": {"name": "sequence", "normalize": True}}},
}


def steps_of_variants(
    rank: TrainRank, batch: RankBatch, advantages: Any, recipes: dict[str, Recipe]
) -> dict[str, tuple[float, Parts, int]]:
    """By variant: this rank's part of the loss, its gradients, and of its response tokens those with a weight."""
    found = {}
    for name, recipe in recipes.items():
        rank.recipe = recipe
        rank.load_batch(batch)
        take_old_and_reference_from_rollout(rank)
        packed = rank.batch.minibatches[0].packed
        for i, response in enumerate(rank.batch.responses):
            # The engines differ from the trainer, differently for every token.
            noisy = response.rollout_logprobs + 0.3 * ((response.rows * 7 + response.numbers * 13) % 11 - 5) / 5
            packed[i] = replace(packed[i], responses=(replace(response, rollout_logprobs=noisy),))
        update = compute_gradients(rank, advantages, step=3)
        ((_, weights),) = update.minibatches
        loss = update.metrics._loss.item() if rank.where.tensor == 0 else 0.0
        weighed = sum(int((w > 0).sum()) for w in weights.weights) if rank.where.tensor == 0 else 0
        found[name] = (loss, gradients_of(rank.policy), weighed)
    return found


def in_layout(
    layout: ParallelLayout, case: Case, tokens: int = LONGEST
) -> dict[str, tuple[float, dict[str, np.ndarray], int]]:
    """Loss, gradients by checkpoint tensor, and weighed tokens of each variant."""
    plain = {"entropy_coefficient": 0.0, "kl": {"coefficient": 0.1}, "loss": {}, "aggregation": "token_mean"}
    train = {"distributed_optimizer": False, "tokens_per_microbatch": tokens}
    recipes = {name: make_recipe(layout, algorithm=plain | v, train=train) for name, v in VARIANTS.items()}
    results = on_ranks(steps_of_variants, recipes["ppo_clip"], case, recipes)
    found = {}
    for name in VARIANTS:
        losses, parts, weighed = zip(*(result[name] for result in results), strict=True)
        found[name] = sum(losses), assemble(parts), sum(weighed)
    return found


@pytest.fixture(scope="module")
def case(case_of: CaseOf) -> Case:
    """Each token its own advantage."""
    return replace(case_of("qwen3"), advantages=by_token(seed=2))


@pytest.fixture(scope="module")
def alone(case: Case) -> dict[str, Any]:
    return in_layout(ParallelLayout(), case)


@pytest.mark.parametrize("name", [*soak("tensor", "context, data"), "unequal, context, expert"])
def test_every_loss_is_the_same_in_every_layout(name, case, alone):
    same(in_layout(ROWS[name].of("qwen3"), case), alone)


def test_every_loss_is_the_same_however_it_is_packed(case, alone):
    same(in_layout(ParallelLayout(), case, tokens=200), alone)


def test_variants_differ_and_leave_out_what_they_should(case, alone):
    losses = [round(loss, 6) for loss, _, _ in alone.values()]
    assert len(set(losses)) >= len(losses) - 1, losses
    for name, (_, gradients, weighed) in alone.items():
        assert max(np.abs(g).max() for g in gradients.values()) > 0, name
        assert (weighed < case.tokens) == (name in ("rejections", "veto", "geometric weights, KPop")), name


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, (loss, gradients, weighed) in wanted.items():
        other_loss, other_gradients, other_weighed = found[name]
        assert other_weighed == weighed, name
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6), name
        largest = max(np.abs(g).max() for g in gradients.values())
        for tensor, gradient in gradients.items():
            np.testing.assert_allclose(
                other_gradients[tensor], gradient, rtol=1e-4, atol=1e-5 * largest, err_msg=f"{name}: {tensor}"
            )
