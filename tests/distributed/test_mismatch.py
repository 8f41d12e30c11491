"""The train-versus-rollout mismatch of an update, in several layouts, is what transformers' logprobs say it is.

Groups travel as in a step: one of them is skipped. Two tokens have planted rollout logprobs, in different sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.megatron.rank import TrainRank
from megagrpo.trainer.step import group_of_row, train_sequences
from megagrpo.trainer.step_metrics import mismatch_record
from megagrpo.types import Group, Prompt, Sample
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS
from tests.distributed.step_case import (
    PROMPTS,
    RESPONSES,
    VOCAB,
    Case,
    load_reference,
    make_recipe,
    response_logprobs,
)
from tests.distributed.step_ranks import on_ranks, the_one, update

SAMPLES = 3
SKIPPED = 1
KEPT = 7
"""Rows whose tokens' figures are asked for: of two groups, and the first of the third."""
# (row, position in the response): by how much the engine's logprob is too low; elsewhere it is noise of 0.1.
PLANTED = {(7, 40): 5.0, (11, 15): 3.5}
ONE = {"kl": {"coefficient": 0.0}}
SEVERAL = ONE | {"minibatches": 3, "epochs": 2}


@dataclass(frozen=True)
class Step:
    case: Case  # of the groups that are trained on
    groups: list[Group]
    difference: np.ndarray  # float64, train - rollout logprob of every trained token, by transformers
    train_logprob: dict[tuple[int, int], float]  # by transformers, of the planted tokens


@pytest.fixture(scope="module")
def step(tiny: Tiny) -> Step:
    model, random = load_reference(tiny("qwen3")), np.random.default_rng(0)
    groups, differences, planted = [], [], {}
    for group in range(len(RESPONSES) // SAMPLES):
        prompt = random.integers(0, VOCAB, PROMPTS[group])
        samples = []
        for row in range(group * SAMPLES, (group + 1) * SAMPLES):
            response = random.integers(0, VOCAB, RESPONSES[row])
            with torch.no_grad():
                logprobs, _ = response_logprobs(model, np.concatenate([prompt, response]))
            train = logprobs.numpy()[len(prompt) - 1 :]
            rollout = (train + random.normal(0, 0.1, len(train))).astype(np.float32)
            for (at, position), lower in PLANTED.items():
                if at == row:
                    rollout[position] -= lower
                    planted[at, position] = float(train[position])
            if group != SKIPPED:
                differences.append(train - rollout)
            versions = np.full(len(response), 100 + row, np.int32)
            samples.append(Sample(f"p{group}", row % SAMPLES, response.astype(np.int32), rollout, versions, "stop", ""))
        groups.append(Group(Prompt(f"p{group}", tuple(prompt.tolist()), "random", ""), tuple(samples)))
    rows = group_of_row(groups) != SKIPPED
    advantages = random.normal(0, 1, len(rows)).astype(np.float32)
    case = Case(tiny("qwen3"), train_sequences(groups, rows), advantages)
    return Step(case, groups, np.concatenate(differences), planted)


def mismatch(rank: TrainRank, batch: RankBatch, advantages: np.ndarray, old: bool) -> Any:
    rank.load_batch(batch)
    if old:
        rank.compute_old_logprobs()
    metrics = update(rank, advantages)
    return metrics and metrics.mismatch, rank.token_figures(KEPT)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(0x4E00 + token) for token in tokens)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("one rank", ONE),
        ("tensor, data", SEVERAL),
        ("unequal, context, expert", ONE),
        ("context, data", SEVERAL),
        ("all", SEVERAL),
    ],
    ids=lambda value: "several updates" if value is SEVERAL else "one update" if value is ONE else value,
)
def test_every_layout_finds_what_transformers_finds(step, name, algorithm):
    recipe = make_recipe(ROWS[name].of("qwen3"), algorithm=algorithm)
    answers, figures = zip(*on_ranks(mismatch, recipe, step.case, algorithm is SEVERAL), strict=True)
    found = the_one(answers)

    logprobs, entropies = ([its for its in of_ranks if its] for of_ranks in zip(*figures, strict=True))
    kept = {tuple(at): value for its in logprobs for *at, value in zip(its.rows, its.index, its.values, strict=True)}
    assert sum(len(its.rows) for its in logprobs) == len(kept), "each token comes from one rank"
    assert len(entropies) == len(logprobs)
    assert all((its.values > 0).all() for its in entropies)
    of_rows = [row for row in range(KEPT) if row // SAMPLES != SKIPPED]
    rollout = np.concatenate([step.groups[row // SAMPLES].samples[row % SAMPLES].logprobs for row in of_rows])
    train = np.array([kept[row, at] for row in of_rows for at in range(RESPONSES[row])])
    assert len(train) == len(kept)
    np.testing.assert_allclose(train - rollout, step.difference[: len(train)], atol=1e-4)

    d = step.difference
    weights = np.exp(d)
    assert found.tokens == len(d)
    assert found.mean == pytest.approx(np.abs(d).mean(), abs=1e-5)
    assert found.p99 == pytest.approx(np.quantile(np.abs(d), 0.99, method="inverted_cdf"), abs=1e-4)
    assert found.max == pytest.approx(np.abs(d).max(), abs=1e-4)
    assert found.k1 == pytest.approx((-d).mean(), abs=1e-5)
    assert found.k3 == pytest.approx((weights - 1 - d).mean(), rel=1e-3)
    assert found.ratio_mean == pytest.approx(weights.mean(), rel=1e-3)
    assert found.effective_share == pytest.approx(weights.sum() ** 2 / (len(d) * (weights**2).sum()), rel=1e-3)

    record = mismatch_record(1, found, step.groups, letters)
    assert len(record.worst) == 8
    np.testing.assert_allclose([token.difference for token in record.worst], np.sort(np.abs(d))[::-1][:8], atol=1e-4)
    for ((row, position), lower), token in zip(PLANTED.items(), record.worst, strict=False):
        group, sample = step.groups[row // SAMPLES], step.groups[row // SAMPLES].samples[row % SAMPLES]
        assert (token.prompt_id, token.sample, token.position) == (group.prompt.id, sample.index, position)
        assert (token.token, token.text) == (sample.tokens[position], letters([sample.tokens[position]]))
        assert token.before + token.text + token.after in letters([*group.prompt.tokens, *sample.tokens])
        assert token.weight_version == 100 + row
        assert token.rollout_logprob == sample.logprobs[position]
        assert token.train_logprob == pytest.approx(step.train_logprob[row, position], abs=1e-4)
        assert token.difference == pytest.approx(lower, abs=0.5)
