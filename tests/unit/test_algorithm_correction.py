"""Off-policy correction against formulas written out response by response, on one rank and on several, and verl's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from megagrpo.algorithm.correction import (
    Corrected,
    Correction,
    CorrectionConfig,
    ImportanceConfig,
    Rejection,
    RejectionConfig,
    correct,
    correction_of,
)
from megagrpo.algorithm.sequences import Sequences
from tests.rank_threads import on_threads

Rows = list[list[float]]
LOG_RATIOS = st.floats(-3, 3, width=32)
ROWS = st.lists(st.lists(LOG_RATIOS, min_size=1, max_size=6), min_size=1, max_size=8)
# No float32 is equal to these, so that no statistic lies on a bound.
BOUNDS = st.tuples(st.sampled_from([None, -0.3037, 0.0119, 0.4321]), st.sampled_from([None, 0.5123, 1.7177, 3.3331]))
REJECTION = TypeAdapter(RejectionConfig)
REJECTIONS = st.builds(
    lambda level, statistic, over, bounds: REJECTION.validate_python(
        {"level": level, "statistic": statistic, "low": bounds[0], "high": bounds[1]}
        | ({"over": over} if level == "sequence" else {})
    ),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["ratio", "k1", "k2", "k3"]),
    st.sampled_from(["sum", "mean", "max"]),
    BOUNDS,
)
CORRECTIONS = st.builds(
    CorrectionConfig,
    weights=st.none()
    | st.builds(
        ImportanceConfig,
        name=st.sampled_from(["token", "sequence"]),
        low=st.sampled_from([0.0, 0.5]),
        high=st.sampled_from([1.3, 2.0]),
        outside=st.sampled_from(["truncate", "zero"]),
        normalize=st.booleans(),
    ),
    reject=st.lists(REJECTIONS, max_size=2),
    veto=st.none() | st.sampled_from([0.1, 0.5]),
)


def sequences_of(rows: Rows) -> Sequences:
    counts = torch.tensor([len(row) for row in rows])
    return Sequences(torch.arange(len(rows)).repeat_interleave(counts), counts.float())


def corrected(rows: Rows, **changes: Any) -> Corrected:
    """On one rank, with log r as given."""
    log_ratios = torch.tensor([d for row in rows for d in row], dtype=torch.float64)
    rollout = torch.zeros_like(log_ratios)
    return correct(log_ratios, rollout, sequences_of(rows), CorrectionConfig(**changes), lambda _: None)


def number(statistic: str, d: float) -> float:
    return {"ratio": math.exp(d), "k1": -d, "k2": d * d / 2, "k3": math.expm1(d) - d}[statistic]


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


def written_out(rows: Rows, s: CorrectionConfig) -> tuple[np.ndarray, list[list[float]] | None, Correction]:
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
                ratio = math.exp(min(max(d if s.weights.name == "token" else sum(row), -20), 20))
                own[t] = min(max(ratio, s.weights.low), s.weights.high)
                if own[t] != ratio:
                    outside += 1
                    own[t] = 0.0 if s.weights.outside == "zero" else own[t]
    tokens = sum(map(len, rows))
    figures = Correction(
        weight_mean=sum(map(sum, weights)) / tokens,
        outside_share=outside / tokens,
        rejected_share=1 - sum(map(sum, kept)) / tokens,
        vetoed_share=sum(vetoed) / len(rows),
    )
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
    for name, value in vars(correction_of(found.sums)).items():
        assert value == pytest.approx(getattr(figures, name), rel=1e-6, abs=1e-9), name


@settings(max_examples=40)
@given(ROWS, CORRECTIONS, st.integers(2, 3))
def test_ranks_that_hold_parts_of_the_same_responses_find_the_same(rows, changes, ranks):
    whole = sequences_of(rows)
    log_ratios = torch.tensor([d for row in rows for d in row], dtype=torch.float64)

    def run(rank: int, sum_over_ranks) -> Corrected:
        def over_ranks(sums: torch.Tensor) -> torch.Tensor:
            total = sums.clone()
            sum_over_ranks(total)
            return total

        part = Sequences(whole.index[rank::ranks], whole.tokens, over_ranks)
        own = log_ratios[rank::ranks]
        return correct(own, torch.zeros_like(own), part, changes, sum_over_ranks)

    alone = corrected(rows, **changes.model_dump())
    found = on_threads(ranks, run)
    for rank, part in enumerate(found):
        assert torch.equal(part.kept, alone.kept[rank::ranks])
        if alone.importance is not None:
            torch.testing.assert_close(part.importance, alone.importance[rank::ranks])
    torch.testing.assert_close(sum(part.sums for part in found), alone.sums)


def test_the_order_of_rejections_does_not_matter():
    rows = [[0.5, -0.2, 1.4], [0.1, 0.0], [-2.0, 0.3]]
    rejections = [
        {"level": "token", "statistic": "ratio", "low": 0.5, "high": 2.0},
        {"level": "sequence", "statistic": "k2", "over": "mean", "high": 0.3},
    ]
    one, other = (corrected(rows, reject=order) for order in (rejections, rejections[::-1]))
    assert torch.equal(one.kept, other.kept)
    assert one.kept.tolist() == [False] * 3 + [True] * 2 + [False] * 2  # judged with the tokens that the other rejects


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


def test_icepop_keeps_masked_tokens_in_the_denominators_and_rejection_does_not():
    rows = [[0.0, 3.0]]
    assert corrected(rows, weights={"name": "token", "low": 0.5, "outside": "zero"}).kept.all()
    assert not corrected(rows, reject=[{"level": "token", "high": 2.0}]).kept.all()


# --- verl -------------------------------------------------------------------------------------------------------------
# From verl/trainer/ppo/rollout_corr_helper.py, on padded rows.


def padded(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    return (
        torch.tensor([row + [0.0] * (longest - len(row)) for row in rows], dtype=torch.float64),
        torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows], dtype=torch.float64),
    )


def verl_weights(rows: Rows, level: str, threshold: float, normalize: bool) -> torch.Tensor:
    log_ratio, mask = padded(rows)
    if level == "token":
        weights = torch.exp(torch.clamp(log_ratio, min=-20, max=20))
    else:
        total = (log_ratio * mask).sum(-1, keepdim=True)
        weights = torch.exp(torch.clamp(total, min=-20, max=20)).expand_as(log_ratio)
    weights = (weights * mask).clamp(max=threshold)
    if normalize:
        of_sequence = (weights * mask).sum(-1) / mask.sum(-1)
        weights = weights / ((weights * mask).sum() / mask.sum() if level == "token" else of_sequence.mean())
    return weights[mask > 0]


def verl_token_k1(rows: Rows, lower: float, upper: float) -> torch.Tensor:
    log_ratio, mask = padded(rows)
    token_k1 = -torch.clamp(log_ratio, min=-20, max=20)
    return ((token_k1 >= math.log(lower)) & (token_k1 <= math.log(upper)))[mask > 0]


def verl_upper(rows: Rows, statistic: str, over: str, upper: float) -> torch.Tensor:
    log_ratio, mask = padded(rows)
    values = 0.5 * log_ratio**2 if statistic == "k2" else torch.exp(log_ratio) - 1.0 - log_ratio
    if over == "sum":
        of_sequence = (values * mask).sum(-1)
    elif over == "mean":
        of_sequence = (values * mask).sum(-1) / mask.sum(-1)
    else:
        of_sequence = values.masked_fill(mask == 0, float("-inf")).max(dim=-1).values
    return (of_sequence <= upper).unsqueeze(-1).expand_as(mask)[mask > 0]


@settings(max_examples=50)
@given(ROWS, st.sampled_from(["token", "sequence"]), st.booleans())
def test_truncated_weights_are_verls(rows, level, normalize):
    found = corrected(rows, weights={"name": level, "high": 2.0, "normalize": normalize})
    torch.testing.assert_close(found.importance.double(), verl_weights(rows, level, 2.0, normalize), rtol=1e-5, atol=0)


@settings(max_examples=50)
@given(ROWS, st.sampled_from(["k2", "k3"]), st.sampled_from(["sum", "mean", "max"]))
def test_rejections_by_k2_and_k3_are_verls(rows, statistic, over):
    reject = {"level": "sequence", "statistic": statistic, "over": over, "high": 0.4}
    assert torch.equal(corrected(rows, reject=[reject]).kept, verl_upper(rows, statistic, over, 0.4))


def test_bounds_are_on_the_statistic_as_named_where_verl_bounds_the_inverse_ratio():
    rows = [[math.log(r)] for r in (0.1, 0.3, 0.6, 1.0, 1.8, 4.0)]
    by_ratio = corrected(rows, reject=[{"level": "token", "statistic": "ratio", "low": 0.5, "high": 5.0}])
    assert by_ratio.kept.tolist() == [False, False, True, True, True, True]
    assert verl_token_k1(rows, 0.5, 5.0).tolist() == [False, True, True, True, True, False]  # 1/5 <= r <= 1/0.5
    by_k1 = corrected(rows, reject=[{"level": "token", "statistic": "k1", "low": -1.0, "high": 0.6}])
    assert by_k1.kept.tolist() == [-1.0 <= -row[0] <= 0.6 for row in rows]


def test_weights_are_normalized_over_what_stays_where_verl_counts_what_it_rejects():
    rows = [[0.1, -0.2, 3.0]]
    found = corrected(
        rows, weights={"name": "token", "high": 2.0, "normalize": True}, reject=[{"level": "token", "high": 2.0}]
    )
    assert found.importance[:2].mean().item() == pytest.approx(1.0)
    assert verl_weights(rows, "token", 2.0, True)[:2].mean().item() < 0.8
