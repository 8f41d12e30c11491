"""A step's groups: rounds of dynamic sampling, greedy baselines, prompts set aside."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.trainer.sampling import prompts_of_round, sample_step, solved_prompts, with_signal
from megagrpo.types import Group
from tests.step_fakes import FakeRollouts, make_run

DYNAMIC = "rollout.dynamic_sampling={rounds_max: 3}"


def ids(groups: list[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


def test_without_dynamic_sampling_every_group_stays() -> None:
    run = make_run(scores=lambda prompt: [0.0, 0.0, 0.0, 0.0])
    sampled = sample_step(run, 1)
    assert len(sampled.groups) == 4
    assert sampled.groups == sampled.all


def test_groups_without_signal_are_replaced_by_new_prompts_in_their_order() -> None:
    def scores(prompt: int) -> list[float | None]:
        return [1.0, 0.0, 0.0, 0.0] if prompt % 2 else [1.0, 1.0, None, 1.0]

    run = make_run(DYNAMIC, scores=scores, shuffle=False)
    sampled = sample_step(run, 1)
    # Round 1 has prompts 0 to 3, of which 1 and 3 teach something; so 4 more are expected to bring the 2 that lack.
    assert ids(sampled.all) == [f"p{i}" for i in range(8)]
    assert ids(sampled.groups) == ["p1", "p3", "p5", "p7"]
    assert (sampled.rounds, sampled.left_over) == (2, 0)
    assert run.cursor.position == 8


def test_what_a_round_brings_too_much_is_left_over() -> None:
    run = make_run(DYNAMIC, scores=lambda prompt: [float(prompt == 0 or prompt > 3), 0.0, 0.0, 0.0], shuffle=False)
    sampled = sample_step(run, 1)
    assert ids(sampled.groups) == ["p0", "p4", "p5", "p6"]
    assert (sampled.rounds, sampled.left_over) == (2, 1)


def test_rounds_are_bounded() -> None:
    run = make_run(DYNAMIC, scores=lambda prompt: [1.0, 1.0, 1.0, 1.0])
    sampled = sample_step(run, 1)
    assert (len(sampled.groups), len(sampled.all), sampled.rounds) == (0, 12, 3)


def test_prompts_that_come_again_in_a_later_round_are_other_samples() -> None:
    run = make_run(DYNAMIC, scores=lambda prompt: [1.0] * 4, prompts=4)
    sample_step(run, 1)
    assert isinstance(run.rollouts, FakeRollouts)
    assert len(run.rollouts.asked) == len(set(run.rollouts.asked)) == 12


@given(st.integers(1, 64), st.data())
def test_a_round_is_as_large_as_the_share_with_signal_asks_for(wanted: int, data: st.DataObject) -> None:
    sampled = data.draw(st.integers(1, 300))
    useful = data.draw(st.integers(0, min(sampled, wanted - 1)))
    count = prompts_of_round(wanted, useful, sampled)
    assert 1 <= count <= wanted
    if useful and count < wanted:
        assert count == math.ceil((wanted - useful) / (useful / sampled) - 1e-9)


def test_for_gdpo_a_group_has_signal_if_any_function_differs() -> None:
    two = "reward.functions=[{function: gsm8k}, {function: format, arguments: {pattern: a}}]"
    run = make_run("algorithm.advantage.name=gdpo", two, scores=lambda prompt: [1.0] * 4, counted=[(1, 0), (0, 1)] * 2)
    sampled = sample_step(run, 1)
    assert len(with_signal(sampled.groups, run.recipe)) == 4
    unweighted = two.replace("pattern: a}", "pattern: a}, weight: 0")
    run = make_run(
        "algorithm.advantage.name=gdpo", unweighted, scores=lambda prompt: [1.0] * 4, counted=[(1, 0), (1, 1)] * 2
    )
    assert with_signal(sample_step(run, 1).groups, run.recipe) == []
    flat = make_run(scores=lambda prompt: [1.0] * 4)
    assert with_signal(sample_step(flat, 1).groups, flat.recipe) == []


def test_remax_scores_one_greedy_response_for_each_prompt_and_trains_on_none() -> None:
    run = make_run(
        "algorithm.advantage.name=remax", scores=lambda prompt: [1.0, 0.0, 0.0, 0.0], greedy=lambda prompt: 0.5
    )
    sampled = sample_step(run, 1)
    assert sampled.baselines is not None
    assert np.array_equal(sampled.baselines, [0.5] * 4)
    assert all(len(group.samples) == 4 for group in sampled.all)


def test_a_share_that_is_met_exactly_sets_a_prompt_aside() -> None:
    solved = "rollout.samples_per_prompt=25"  # 0.28 * 25 is 7.000000000000001
    run = make_run(solved, scores=lambda prompt: [1.0] * 7 + [0.0] * 18)
    groups = sample_step(run, 1).groups
    assert len(solved_prompts(groups, 0.28)) == len(groups)
    assert solved_prompts(groups, 0.29) == []


def test_a_prompt_is_set_aside_once_it_is_solved_often_enough() -> None:
    run = make_run(
        "data.no_resampling_pass_rate=0.75", scores=lambda prompt: [1.0, 1.0, float(prompt < 2), 0.0], prompts=8
    )
    for step in (1, 2):
        sample_step(run, step)
    assert run.cursor.set_aside_count == 2
    assert isinstance(run.rollouts, FakeRollouts)
    before = len(run.rollouts.asked)
    for step in range(3, 9):
        sample_step(run, step)
    assert {name.partition("+")[0] for name in run.rollouts.asked[before:]} == {f"p{i}" for i in range(2, 8)}


def test_solved_counts_all_responses_also_those_without_a_score() -> None:
    run = make_run(scores=lambda prompt: [1.0, 1.0, None, None])
    groups = sample_step(run, 1).groups
    assert solved_prompts(groups, 0.5) == ids(groups)
    assert solved_prompts(groups, 0.6) == []


@pytest.mark.parametrize("resumed_after", [1, 2, 3])
def test_a_resumed_run_samples_the_same_prompts(resumed_after: int) -> None:
    settings = (DYNAMIC, "data.no_resampling_pass_rate=1.0")

    def scores(prompt: int) -> list[float | None]:
        return [1.0, 1.0, 1.0, float(prompt % 3 == 0)]

    whole, first, second = (make_run(*settings, scores=scores) for _ in range(3))
    expected = [ids(sample_step(whole, step).all) for step in range(1, 6)]
    found = [ids(sample_step(first, step).all) for step in range(1, resumed_after + 1)]
    second.cursor.restore(json.loads(json.dumps(first.cursor.state())))
    found += [ids(sample_step(second, step).all) for step in range(resumed_after + 1, 6)]
    assert found == expected
    assert second.cursor.set_aside_count == whole.cursor.set_aside_count > 0
