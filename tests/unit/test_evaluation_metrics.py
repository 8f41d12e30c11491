"""Metrics of scored responses, and the files that keep them. The estimates, intervals and tests behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from math import isnan
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.evaluation.metrics import best_of, evaluation_metrics, intervals, majority, means, paired_p_value
from megagrpo.evaluation.responses import (
    Response,
    ResponseFiles,
    from_line,
    read_responses,
    responses_of,
    to_line,
    write_responses,
)
from megagrpo.recipe.schema.eval import evaluation_metric_names
from megagrpo.types import Group, Prompt, Sample, Score


def responses(
    values: Sequence[float | None],
    *,
    prompt: str = "p",
    answers: Sequence[str | None] = (),
    source: str = "s",
    tokens: int = 3,
) -> list[Response]:
    ids = np.zeros(tokens, np.int32)
    finishes = ["length" if i == 0 else "stop" for i in range(len(values))]
    samples = tuple(Sample(prompt, i, ids, ids, ids, finish, f" text {i}") for i, finish in enumerate(finishes))  # type: ignore[arg-type]
    scores = tuple(
        Score(
            value,
            error="timed out" if value is None else "",
            solved=value is not None and value >= 1,
            answer=answers[i] if answers else None,
            parts={} if value is None else {"math": value},
            notes={"math.answer": "7"},
        )
        for i, value in enumerate(values)
    )
    return responses_of("main", [Group(Prompt(prompt, (1,), source, "7", text="1+1="), samples, scores)])


def test_metrics_are_means_over_prompts() -> None:
    given = [
        *responses([1.0, 0.5, 0.0, 1.0], prompt="p", answers=["7", "8", "9", "7"]),
        *responses([0.0, 0.0, 0.5, 1.0], prompt="q", answers=["1", "1", "2", "3"], tokens=7),
    ]
    metrics = evaluation_metrics(given, 4)
    assert {name: value for name, value in metrics.items() if not name.endswith(("/low", "/high"))} == {
        "mean@4": pytest.approx(4 / 8),
        "pass@1": pytest.approx(3 / 8),
        "pass@2": pytest.approx((5 / 6 + 1 / 2) / 2),
        "pass@4": 1.0,
        "best@2": pytest.approx(((5 + 0.5) / 6 + (3 + 2 * 0.5) / 6) / 2),
        "best@4": 1.0,
        "maj@4": 0.5,
        "reward/math": 0.5,
        "reward/errors": 0.0,
        "masked": 0.0,
        "unscored_share": 0.0,
        "response_tokens/mean": 5.0,
        "response_tokens/truncated_share": 0.25,
    }
    for name in evaluation_metric_names(4):
        assert metrics[f"{name}/low"] <= metrics[name] <= metrics[f"{name}/high"]


def test_the_names_are_those_that_the_recipe_expects() -> None:
    names = ["mean@6", *(f"pass@{k}" for k in (1, 2, 4, 6)), *(f"best@{k}" for k in (2, 4, 6)), "maj@6"]
    assert evaluation_metric_names(6) == names
    assert evaluation_metric_names(1) == ["mean@1", "pass@1"]
    for samples in (1, 2, 6, 8):
        found = evaluation_metrics(responses([1.0] * samples), samples)
        assert [name for name in found if "@" in name and "/" not in name] == evaluation_metric_names(samples)


def test_responses_without_an_answer_vote_with_their_text() -> None:
    assert evaluation_metrics(responses([1.0, 0.0, 0.0], answers=[None, "8", "8"]), 3)["maj@3"] == 0
    apart = responses([1.0, 0.0, 0.0])
    assert evaluation_metrics(apart, 3)["maj@3"] == pytest.approx(1 / 3), "each text is a vote"
    alike = [apart[0], *(replace(one, response="eight ") for one in apart[1:])]
    assert evaluation_metrics(alike, 3)["maj@3"] == 0


def test_data_sources_are_told_apart_when_there_are_several() -> None:
    given = [
        *responses([1.0], prompt="p", source="a"),
        *responses([0.0], prompt="q", source="b"),
        *responses([1.0], prompt="r", source="b"),
    ]
    metrics = evaluation_metrics(given, 1)
    assert metrics["mean@1"] == pytest.approx(2 / 3)
    assert (metrics["a/pass@1"], metrics["b/mean@1"], metrics["b/reward/math"]) == (1.0, 0.5, 0.5)
    assert "s/mean@1" not in evaluation_metrics(responses([1.0]), 1)


def test_failed_rewards_are_counted_and_left_out_never_zero() -> None:
    given = [*responses([1.0, None], prompt="p"), *responses([None, None], prompt="q")]
    metrics = evaluation_metrics(given, 2)
    assert (metrics["mean@2"], metrics["pass@1"], metrics["maj@2"]) == (1.0, 1.0, 1.0)
    assert isnan(metrics["pass@2"])
    assert isnan(metrics["pass@2/low"])
    assert metrics["reward/errors"] == 3


def test_a_prompt_that_occurs_twice_is_one_prompt_with_the_samples_of_both() -> None:
    given = [*responses([1.0, 1.0]), *responses([0.0, 0.0]), *responses([1.0, 1.0], prompt="q")]
    assert evaluation_metrics(given, 2)["mean@2"] == 0.75


TEXTS = st.text(max_size=8)


@given(TEXTS, TEXTS, st.floats(allow_nan=False, allow_infinity=False) | st.none(), st.dictionaries(TEXTS, TEXTS))
def test_a_line_gives_the_response_back(text: str, answer: str, score: float | None, notes: dict[str, str]) -> None:
    one = replace(responses([1.0])[0], response=text, answer=answer, score=score, notes=notes)
    line = to_line(one)
    assert line.count(b"\n") == 1
    assert from_line(line) == one


def test_a_masked_response_keeps_its_reason_and_is_no_error() -> None:
    sample = Sample("p", 0, np.zeros(1), np.zeros(1), np.zeros(1), "stop", "")
    scores = (Score(None, masked="the budget is spent"), Score(None, error="timed out"), Score(1.0))
    found = responses_of("main", [Group(Prompt("p", (1,), "s", ""), (sample,) * 3, scores)])
    assert [(one.error, one.masked) for one in found] == [("", "the budget is spent"), ("timed out", ""), ("", "")]
    metrics = evaluation_metrics(found, 3)
    assert (metrics["reward/errors"], metrics["masked"], metrics["mean@3"]) == (1, 1, 1)


def test_a_number_that_is_not_finite_is_null() -> None:
    sample = Sample("p", 0, np.zeros(1), np.zeros(1), np.zeros(1), "stop", "")
    group = Group(Prompt("p", (1,), "s", ""), (sample,), (Score(1.0, parts={"a": float("nan"), "b": 1.0}),))
    (found,) = responses_of("main", [group])
    assert from_line(to_line(found)).parts == {"a": None, "b": 1.0}


def test_a_line_that_was_cut_off_is_left_out_and_another_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path, both = tmp_path / "a.jsonl", responses([1.0, 0.0])
    write_responses(path, both)
    assert list(read_responses(path)) == both
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_responses(path)) == both[:1]
    path.write_bytes(b"{}\n" + to_line(both[0]))
    with pytest.raises(ValueError):
        list(read_responses(path))


def test_a_file_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    path, one = tmp_path / "a.jsonl", responses([1.0])
    write_responses(path, one)
    with pytest.raises(ValueError):
        write_responses(path, [*one, replace(one[0], score=float("nan"))])
    assert list(read_responses(path)) == one
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_steps_file_has_all_sets_that_were_evaluated_at_it_and_later_steps_come_again(tmp_path: Path) -> None:
    said: list[str] = []
    first, second = responses([1.0]), [replace(one, set="other") for one in responses([0.0])]
    files = ResponseFiles(tmp_path, 0, said.append)
    files.begin(10, first)
    files.begin(10, second)
    files.begin(20, first)
    files.close()
    assert list(read_responses(tmp_path / "step_000010.jsonl")) == [*first, *second]
    files = ResponseFiles(tmp_path, 10, said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010.jsonl"]
    files.begin(10, [replace(first[0], score=0.5)])
    files.close()
    assert [one.score for one in read_responses(tmp_path / "step_000010.jsonl")] == [0.0, 0.5]
    ResponseFiles(tmp_path, 0, said.append).close()
    assert (list(tmp_path.iterdir()), said) == ([], [])


def test_a_file_that_cannot_be_made_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "evaluations").write_text("a file")
    files = ResponseFiles(tmp_path / "evaluations", 0, said.append)
    files.begin(0, responses([1.0]))
    files.close()
    assert len(said) == 1


# --- estimates, intervals and tests -----------------------------------------------------------------------------------

SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=7)


@given(SCORES, st.data())
def test_the_best_of_k_is_the_mean_best_of_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    assert best_of(scores, k) == pytest.approx(fmean(max(subset) for subset in combinations(scores, k)))


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of 5 samples that are solved with a chance of 0.3, its mean is 1 - 0.7^k."""
    for k in (1, 2, 4, 5):
        expected = sum(
            0.3 ** sum(solved) * 0.7 ** (5 - sum(solved)) * best_of(solved, k)
            for solved in product([0.0, 1.0], repeat=5)
        )
        assert expected == pytest.approx(1 - 0.7**k)


def test_many_samples_are_no_problem() -> None:
    assert best_of([0.0] * 1000 + [1.0], 501) == pytest.approx(501 / 1001)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0])), min_size=1, max_size=6))
def test_majority_is_the_mean_over_uniform_tie_breaks(votes: list[tuple[str, float]]) -> None:
    answers = [answer for answer, _ in votes]
    most = max(answers.count(answer) for answer in answers)
    winners = sorted({answer for answer in answers if answers.count(answer) == most})
    expected = fmean(fmean(score for answer, score in votes if answer == winner) for winner in winners)
    assert majority([score for _, score in votes], answers) == pytest.approx(expected)


@pytest.mark.parametrize(("prompts", "rate"), [(60, 0.5), (200, 0.2)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(prompts: int, rate: float) -> None:
    columns = np.random.default_rng(1).binomial(1, rate, size=(prompts, 400)).astype(float)
    low, high = intervals(columns)
    covered = ((low <= rate) & (rate <= high)).mean()
    assert 0.91 <= covered <= 0.98


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, float("nan")]), min_size=1, max_size=30),
    st.integers(60, 100),
)
def test_an_interval_is_around_the_mean_and_within_the_values(column: list[float], resamples: int) -> None:
    values = np.array(column)[:, None]
    (mean,), (low,), (high,) = means(values), *intervals(values, resamples)
    known = values[~np.isnan(values)]
    if not len(known):
        assert np.isnan([mean, low, high]).all()
        return
    assert mean == pytest.approx(known.mean())
    assert known.min() - 1e-9 <= low <= high <= known.max() + 1e-9


def test_intervals_are_the_same_every_time_and_do_not_depend_on_other_columns() -> None:
    values = np.random.default_rng(0).random((50, 3))
    together, alone = intervals(values), intervals(values[:, :1])
    assert (together[0][0], together[1][0]) == pytest.approx((alone[0][0], alone[1][0]), rel=1e-12)
    assert (intervals(values)[0] == together[0]).all()


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 5))
def test_the_test_of_ones_and_zeros_is_mcnemars(better: int, worse: int, same: int) -> None:
    p, name = paired_p_value(np.array([1.0] * better + [-1.0] * worse + [0.0] * same))
    signs = list(product([1, -1], repeat=min(better + worse, 10)))
    if better + worse <= 10:
        as_far = fmean(abs(sum(flip)) >= abs(better - worse) for flip in signs)
        assert p == pytest.approx(as_far)
    assert name.startswith("McNemar")


def test_the_permutation_test_agrees_with_all_permutations() -> None:
    differences = np.array([0.5, -0.25, 1.0, 0.75, 0.125, 0.5, -0.5, 0.25])
    all_sums = [abs(np.dot(flip, differences)) for flip in product([1, -1], repeat=8)]
    p, name = paired_p_value(differences)
    assert p == pytest.approx(fmean(each >= differences.sum() - 1e-12 for each in all_sums), abs=0.02)
    assert name.startswith("permutation")


def test_the_paired_test_calls_equal_models_different_as_often_as_its_level_says() -> None:
    generator = np.random.default_rng(2)
    p_values = [paired_p_value(generator.normal(size=40))[0] for _ in range(200)]
    assert 0.01 <= np.mean(np.array(p_values) < 0.05) <= 0.1
    assert np.mean([paired_p_value(generator.normal(0.8, size=40))[0] < 0.05 for _ in range(20)]) > 0.9
