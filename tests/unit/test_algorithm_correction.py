"""Off-policy correction against formulas written out response by response, on one rank and on several."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.correction import (
    Corrected,
    CorrectionConfig,
    ImportanceConfig,
    Rejection,
    correct,
    correction_of,
)
from tests.methods import REJECTIONS as REJECTION
from tests.methods import part_of, sequences_of
from tests.rank_threads import on_threads

Rows = list[list[float]]
ROLLOUT = -4.0
"""The engines' logprob of every token."""
LOG_RATIOS = st.floats(-3, 3, width=32)
ROWS = st.lists(st.lists(LOG_RATIOS, min_size=1, max_size=6), min_size=1, max_size=8)
# No float32 is equal to these, so that no statistic lies on a bound.
BOUNDS = st.tuples(st.sampled_from([None, -0.3037, 0.0119, 0.4321]), st.sampled_from([None, 0.5123, 1.7177, 3.3331]))
REJECTIONS = st.builds(
    lambda level, statistic, over, bounds: REJECTION.validate_python(
        {"level": level, "statistic": statistic, "low": bounds[0], "high": bounds[1]}
        | ({"over": over} if level == "sequence" else {})
    ),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["ratio", "k1", "k2", "k3", "binary_kl"]),
    st.sampled_from(["sum", "mean", "max"]),
    BOUNDS,
)
CORRECTIONS = st.builds(
    CorrectionConfig,
    weights=st.none()
    | st.builds(
        ImportanceConfig,
        name=st.sampled_from(["token", "sequence", "geometric"]),
        low=st.sampled_from([0.0, 0.5]),
        high=st.sampled_from([1.3, 2.0]),
        outside=st.sampled_from(["truncate", "zero"]),
        normalize=st.booleans(),
    ),
    reject=st.lists(REJECTIONS, max_size=2),
    veto=st.none() | st.sampled_from([0.1, 0.5]),
)


def corrected(rows: Rows, **changes: Any) -> Corrected:
    """On one rank, with log r as given."""
    log_ratios = torch.tensor([d for row in rows for d in row], dtype=torch.float64)
    rollout = torch.full_like(log_ratios, ROLLOUT)
    sequences = sequences_of([*map(len, rows)])
    return correct(log_ratios + ROLLOUT, rollout, sequences, CorrectionConfig(**changes), lambda _: None)


def number(statistic: str, d: float) -> float:
    p, q = math.exp(ROLLOUT + d), math.exp(ROLLOUT)
    both = max(x * math.log(x / y) + (1 - x) * math.log((1 - x) / (1 - y)) for x, y in ((p, q), (q, p)))
    return {"ratio": math.exp(d), "k1": -d, "k2": d * d / 2, "k3": math.expm1(d) - d, "binary_kl": both}[statistic]


def stays(row: list[float], token: int, rejection: Rejection) -> bool:
    if rejection.level == "token":
        value = number(rejection.statistic, row[token])
    else:
        over = {"sum": sum, "mean": np.mean, "max": max}[rejection.over]
        if rejection.statistic == "ratio":
            value = math.exp(min(max(over(row), -20), 20))
        else:
            value = over([number(rejection.statistic, d) for d in row])
    return (rejection.low is None or value >= rejection.low) and (rejection.high is None or value <= rejection.high)


def written_out(rows: Rows, s: CorrectionConfig) -> tuple[np.ndarray, list[list[float]] | None, dict[str, float]]:
    """kept by token, importance by response, and the figures."""
    vetoed = [s.veto is not None and min(row) < math.log(s.veto) for row in rows]
    kept = [
        [not veto and all(stays(row, t, r) for r in s.reject) for t in range(len(row))]
        for row, veto in zip(rows, vetoed, strict=True)
    ]
    weights, outside = [[1.0] * len(row) for row in rows], 0
    if s.weights is not None:
        for row, own in zip(rows, weights, strict=True):
            for t, d in enumerate(row):
                log_weight = {"token": d, "sequence": sum(row), "geometric": sum(row) / len(row)}[s.weights.name]
                ratio = math.exp(min(max(log_weight, -20), 20))
                own[t] = min(max(ratio, s.weights.low), s.weights.high)
                if own[t] != ratio:
                    outside += 1
                    own[t] = 0.0 if s.weights.outside == "zero" else own[t]
    tokens = sum(map(len, rows))
    figures = {
        "weight_mean": sum(map(sum, weights)) / tokens,
        "outside_share": outside / tokens,
        "rejected_share": 1 - sum(map(sum, kept)) / tokens,
        "vetoed_share": sum(vetoed) / len(rows),
    }
    if s.weights is None:
        return np.concatenate(kept), None, figures
    if s.weights.normalize:
        means = [[w for w, k in zip(*pair, strict=True) if k] for pair in zip(weights, kept, strict=True)]
        means = [part for part in means if part]
        if s.weights.name == "token":
            means = [[w] for part in means for w in part]
        mean = float(np.mean([np.mean(part) for part in means])) if means else 0.0
        weights = [[w / mean if mean else w for w in own] for own in weights]
    return np.concatenate(kept), weights, figures


@settings(max_examples=200)
@given(ROWS, CORRECTIONS)
def test_weights_and_rejections_are_those_of_the_formulas(rows, changes):
    found = corrected(rows, **changes.model_dump())
    kept, weights, figures = written_out(rows, changes)
    np.testing.assert_array_equal(found.kept, kept)
    assert (found.importance is None) == (weights is None)
    if weights is not None:
        assert found.importance.dtype == torch.float32
        np.testing.assert_allclose(found.importance, np.where(kept, np.concatenate(weights), 0), rtol=1e-5)
    for name, value in correction_of(found.sums).items():
        assert value == pytest.approx(figures[name], rel=1e-6, abs=1e-9), name


@settings(max_examples=40)
@given(ROWS, CORRECTIONS, st.integers(2, 3))
def test_ranks_that_hold_parts_of_the_same_responses_find_the_same(rows, changes, ranks):
    whole = sequences_of([*map(len, rows)])
    log_ratios = torch.tensor([d for row in rows for d in row], dtype=torch.float64)

    def run(rank: int, sum_over_ranks) -> Corrected:
        part, own = part_of(whole, rank, ranks, sum_over_ranks), log_ratios[rank::ranks]
        return correct(own + ROLLOUT, torch.full_like(own, ROLLOUT), part, changes, sum_over_ranks)

    alone = corrected(rows, **changes.model_dump())
    found = on_threads(ranks, run)
    for rank, part in enumerate(found):
        assert torch.equal(part.kept, alone.kept[rank::ranks])
        if alone.importance is not None:
            torch.testing.assert_close(part.importance, alone.importance[rank::ranks])
    torch.testing.assert_close(sum(part.sums for part in found), alone.sums)


def test_a_logprob_that_is_no_number_is_rejected_and_does_not_spoil_the_others():
    rows = [[0.1, math.nan], [0.2, 0.3], [0.4, -math.inf]]
    for reject in (
        [{"level": "token", "statistic": "ratio", "low": 0.1, "high": 5.0}],
        [{"level": "sequence", "statistic": "k3", "over": "max", "high": 5.0}],
    ):
        found = corrected(rows, weights={"name": "token", "normalize": True}, reject=reject)
        whole = reject[0]["level"] == "sequence"
        assert found.kept.tolist() == [not whole, False, True, True, not whole, False]
        assert torch.isfinite(found.importance).all()
        assert found.importance[found.kept].mean().item() == pytest.approx(1.0)
    assert corrected(rows, veto=0.1).kept.tolist() == [False, False, True, True, False, False]


def test_where_all_weights_are_zero_they_stay_zero():
    found = corrected([[3.0, 4.0]], weights={"name": "token", "outside": "zero", "normalize": True})
    assert not found.importance.any()
    assert found.kept.all()
