"""Admission over simulated runs: staleness keeps its bound, every group is trained once, and lengths are not biased.

The estimate of how long responses would have been that were cut, against lengths that are known.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algorithm.admission import Admission, cut_metrics, lengths_of_begun


def simulate(
    admission: Admission,
    *,
    seconds_of: Callable[[int], float],
    train_seconds: float,
    slots: int,
    taught: Callable[[int], bool] = lambda number: True,
    oldest: float = float("inf"),
) -> list[list[tuple[int, int]]]:
    """A run on a simulated clock: (number, staleness) of the groups of each step. `slots` groups are sampled at once.

    oldest: staleness beyond which a group is thrown away when it is complete.
    """
    clock, training_until = 0.0, float("inf")
    trained: list[list[tuple[int, int]]] = []
    waiting: deque[int] = deque()
    running: list[tuple[float, int]] = []
    while admission.taken_steps < admission.steps or training_until < float("inf"):
        while admission.room:
            waiting.append(admission.admit().number)
        while waiting and len(running) < slots:
            number = waiting.popleft()
            heapq.heappush(running, (clock + seconds_of(number), number))
        if training_until == float("inf") and (taken := admission.take()) is not None:
            trained.append([(each.number, admission.version - each.version) for each in taken])
            training_until = clock + train_seconds
            continue
        clock = min(training_until, running[0][0] if running else float("inf"))
        assert clock < float("inf"), "nothing runs and nothing may begin: the run would hang"
        if clock == training_until:
            training_until = float("inf")
            admission.advance(admission.taken_steps)
            continue
        _, number = heapq.heappop(running)
        stale = admission.version - admission.waiting[number].version > oldest
        (admission.complete if taught(number) and not stale else admission.drop)(number)
    return trained


@given(
    per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    more=st.integers(0, 12),
    steps=st.integers(1, 12),
    done=st.integers(0, 3),
    slots=st.integers(1, 20),
    train_seconds=st.floats(0.0, 30.0),
    dropped_share=st.sampled_from([0.0, 0.3]),
    draw=st.randoms(use_true_random=False),
)
def test_a_run_keeps_its_staleness_and_trains_on_every_group_once(
    per_step: int,
    max_staleness: int,
    more: int,
    steps: int,
    done: int,
    slots: int,
    train_seconds: float,
    dropped_share: float,
    draw: random.Random,
) -> None:
    first = done * per_step
    admission = Admission(
        per_step=per_step,
        max_staleness=max_staleness,
        at_once=per_step + more,
        steps=done + steps,
        step=done,
        number=first,
    )
    dropped: dict[int, bool] = {}
    trained = simulate(
        admission,
        seconds_of=lambda number: min(draw.lognormvariate(0.0, 1.5), 1e6),
        train_seconds=train_seconds,
        slots=slots,
        taught=lambda number: not dropped.setdefault(number, number % 2 == 0 and draw.random() < dropped_share),
    )
    assert [len(step) for step in trained] == [per_step] * steps
    assert all(0 <= staleness <= max_staleness for step in trained for _, staleness in step)
    numbers = sorted(number for step in trained for number, _ in step)
    assert numbers == [number for number in range(first, admission.next_number) if not dropped[number]]
    assert not admission.waiting


@given(per_step=st.integers(1, 5), slots=st.integers(1, 8), draw=st.randoms(use_true_random=False))
def test_without_staleness_steps_train_on_what_a_synchronous_run_samples(
    per_step: int, slots: int, draw: random.Random
) -> None:
    admission = Admission(per_step=per_step, max_staleness=0, at_once=per_step, steps=4)
    trained = simulate(admission, seconds_of=lambda number: draw.random(), train_seconds=1.0, slots=slots)
    assert trained == [[(step * per_step + i, 0) for i in range(per_step)] for step in range(4)]


def long_tailed(oldest: float) -> tuple[list[float], list[float]]:
    """Lengths of all responses that began, and of those that were trained, with the tail of reasoning models."""
    draw = random.Random(0)
    lengths: dict[int, float] = {}
    admission = Admission(per_step=8, max_staleness=3 if oldest == float("inf") else 1000, at_once=32, steps=200)
    trained = simulate(
        admission,
        seconds_of=lambda number: lengths.setdefault(number, draw.lognormvariate(0.0, 1.2)),
        train_seconds=0.5,
        slots=32,
        oldest=oldest,
    )
    return list(lengths.values()), [lengths[number] for step in trained for number, _ in step]


def test_trained_lengths_are_the_sampled_ones() -> None:
    sampled, trained = long_tailed(oldest=float("inf"))
    assert sorted(trained) == sorted(sampled)


def test_a_policy_that_discards_what_is_stale_trains_on_shorter_responses() -> None:
    """A control: the comparison above can fail."""
    sampled, trained = long_tailed(oldest=3)
    assert len(trained) < len(sampled)
    assert sum(trained) / len(trained) < 0.9 * sum(sampled) / len(sampled)
    assert max(trained) < max(sampled)


def test_a_slow_group_is_waited_for_only_when_it_is_due() -> None:
    admission = Admission(per_step=2, max_staleness=2, at_once=4, steps=10)
    slow, *others = [admission.admit().number for _ in range(admission.room)]
    for number in others:
        admission.complete(number)
    assert [each.number for each in admission.take() or ()] == others[:2]
    admission.advance(1)
    for step in (2, 3):
        while admission.room:
            admission.complete(admission.admit().number)
        taken = admission.take()
        assert (taken is None) == (step == 3)
        admission.advance(step)
    admission.complete(slow)
    assert slow in [each.number for each in admission.take() or ()]


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=30)


def test_a_long_tail_that_is_cut_has_a_bias_which_is_reported_and_estimated_from_below() -> None:
    draw = np.random.default_rng(0)
    lengths, limits = draw.lognormal(6.0, 1.2, 4000).astype(int), draw.uniform(200, 2000, 4000).astype(int)
    ended, cut = lengths[lengths <= limits], limits[lengths > limits]
    found = cut_metrics(ended.tolist(), ended.tolist(), cut.tolist())
    so_far = np.mean([*ended, *cut])
    true = 1 - ended.mean() / lengths.mean()
    assert 0.3 < found["cut/bias"] < true
    assert so_far < found["cut/begun_tokens_mean"] < lengths.mean()
    assert found["cut/begun_tokens_p90"] == pytest.approx(np.quantile(lengths, 0.9), rel=0.1)
    assert found["cut/samples"] == len(cut)
    assert found["cut/tokens_share"] == pytest.approx(cut.sum() / (cut.sum() + ended.sum()))


@given(trained=LENGTHS, unused=LENGTHS)
def test_what_ended_counts_with_its_length(trained: list[int], unused: list[int]) -> None:
    found = cut_metrics(trained, [*trained, *unused], [])
    assert found["cut/begun_tokens_mean"] == pytest.approx(np.mean([*trained, *unused]))
    assert cut_metrics(trained, trained, [])["cut/bias"] == pytest.approx(0.0, abs=1e-9)


def test_a_trained_response_that_engines_gave_up_on_would_have_been_longer() -> None:
    found = cut_metrics([10, 20, 5], [10, 20, 30], [5])
    assert found["cut/begun_tokens_mean"] == pytest.approx((10 + 20 + 30) / 3)
    assert found["cut/samples"] == 1
    assert found["cut/tokens_share"] == pytest.approx(30 / 65)


@given(ended=LENGTHS, cut=LENGTHS)
def test_the_estimate_is_a_distribution_and_no_shorter_than_what_is_there(ended: list[int], cut: list[int]) -> None:
    lengths, shares = lengths_of_begun(ended, cut)
    assert shares.min() >= 0.0
    assert shares.sum() == pytest.approx(1.0)
    assert lengths @ shares >= np.mean([*ended, *cut]) - 1e-9


def test_published_survival_times_have_the_published_shares() -> None:
    """Freireich's leukemia patients who were treated (1963), as in every textbook: 0.627 live longer than 16 weeks."""
    ended, cut = [6, 6, 6, 7, 10, 13, 16, 22, 23], [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    lengths, shares = lengths_of_begun(ended, cut)
    for weeks, alive in ((6, 0.857), (7, 0.807), (10, 0.753), (13, 0.690), (16, 0.627), (22, 0.538), (23, 0.448)):
        assert shares[lengths > weeks].sum() == pytest.approx(alive, abs=5e-4)
