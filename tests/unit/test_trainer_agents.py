"""Agents' rollouts on the driver: branches become sequences, tokens are found again, and metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.agents.turns import reported
from megagrpo.algorithm.mismatch import Mismatch, TokenMismatch
from megagrpo.errors import UnusableCheckpointError
from megagrpo.track.metrics import undocumented
from megagrpo.trainer.batches import Sampled, require_fitting
from megagrpo.trainer.sampling import staleness_metrics
from megagrpo.trainer.step import train_sequences
from megagrpo.trainer.step_metrics import TOOLS_MAX, agent_metrics, mismatch_record
from megagrpo.types import AgentRun, Branch, Group, Prompt, Sample, Score
from tests.agent_runs import CALL, calculator_run, group_of, tool_event, turn_event
from tests.tiny_run import recipe_with

masks = st.lists(st.lists(st.booleans(), max_size=12), max_size=4)


def rollout(masks: list[list[bool]], index: int = 0, begin: int = 0) -> Sample:
    """Every token of every branch is a number of its own; a logprob is its token's number, below 0."""
    branches = []
    for mask in masks:
        branches.append(Branch(np.arange(begin, begin + len(mask), dtype=np.int32), np.array(mask, bool)))
        begin += len(mask)
    sampled = [branch.tokens[branch.trained] for branch in branches]
    tokens = np.concatenate([np.empty(0, np.int32), *sampled])
    run = AgentRun(tuple(branches), (), ())
    return Sample("p", index, tokens, -tokens.astype(np.float32), tokens + 100, "stop", "", run)


@given(st.lists(masks, min_size=1, max_size=4), st.data())
def test_every_sampled_token_is_trained_once_after_what_the_engine_saw(
    rollouts: list[list[list[bool]]], data: st.DataObject
) -> None:
    samples = tuple(rollout(masks, index, 1000 * index) for index, masks in enumerate(rollouts))
    rows = np.array([data.draw(st.booleans()) for _ in samples])
    sequences = train_sequences([Group(Prompt("p", (1, 2), "", ""), samples)], rows)
    for row, sample in enumerate(samples):
        own, first = [s for s in sequences if s.row == row], 0
        for sequence in own:
            mask = sequence.loss_mask
            assert mask.any()
            assert sequence.first == first
            np.testing.assert_array_equal(np.diff(sequence.tokens), 1)
            np.testing.assert_array_equal(sequence.rollout_logprobs[mask], -sequence.tokens[mask])
            assert not sequence.rollout_logprobs[~mask].any()
            first += int(mask.sum())
        trained = [s.tokens[s.loss_mask] for s in own]
        np.testing.assert_array_equal(np.concatenate([[], *trained]), sample.tokens if rows[row] else [])


def test_the_worst_token_is_shown_in_its_branch() -> None:
    alone = Sample("p", 0, np.array([7]), np.array([-1.0]), np.array([3]), "stop", "")
    sample = rollout([[False, True, False, True], [], [False] * 3 + [True, False, True]], 1)
    group = Group(Prompt("p", (50, 51), "", ""), (alone, sample))
    found = [TokenMismatch(1, 2, -1.0, -2.0), TokenMismatch(1, 1, -1.0, -2.0), TokenMismatch(0, 0, -1.0, -2.0)]
    mismatch = Mismatch(4, *[0.1] * 12, worst=tuple(found))
    worst = mismatch_record(1, mismatch, [group], lambda tokens: " ".join(map(str, tokens))).worst
    assert [(w.sample, w.position, w.token, w.before, w.after, w.weight_version) for w in worst] == [
        (1, 2, 7, "4 5 6", "8 9", 107),
        (1, 1, 3, "0 1 2", "", 103),
        (0, 0, 7, "50 51", "", 3),
    ]


def test_tokens_are_counted_by_branch_and_versions_may_fall_from_one_branch_to_the_next() -> None:
    sample = rollout([[False, True, True, False, True], [False, True]])
    alone = Sample("p", 1, np.array([7]), np.array([-1.0]), np.array([4]), "stop", "")
    group = Group(Prompt("p", (50, 51), "", ""), (replace(sample, versions=np.array([2, 5, 5, 2])), alone))
    assert group.sequence_tokens == 5 + 2 + 3
    found = staleness_metrics([group], 5)
    assert {name: value for name, value in found.items() if value} == {
        "staleness/mean": pytest.approx(7 / 5),
        "staleness/max": 3,
        "staleness/above_1_share": 0.4,
        "staleness/mixed_share": 0.5,
        "staleness/0_share": 0.4,
        "staleness/1_share": 0.2,
        "staleness/3_share": 0.4,
    }


def test_a_recipe_with_other_lengths_or_another_vocabulary_refuses_the_branches() -> None:
    sample = rollout([[False] * 6 + [True] * 2, [False, True]])
    group = Group(Prompt("p", (1,) * 40, "", ""), (sample, rollout([])), (Score(1.0), Score(None)))
    sampled = Sampled([group], [group])
    agent = "agent={tools: [python], tokens_max: 8}"
    require_fitting(sampled, recipe_with(agent), 10, "here")
    with pytest.raises(UnusableCheckpointError, match="of 8 tokens"):
        require_fitting(sampled, recipe_with("agent={tools: [python], tokens_max: 7}"), 10, "here")
    with pytest.raises(UnusableCheckpointError, match="token 9"):
        require_fitting(sampled, recipe_with(agent), 9, "here")
    alone = replace(group, samples=(replace(sample, agent=None), rollout([])))
    with pytest.raises(UnusableCheckpointError, match="of 43 tokens"):
        require_fitting(Sampled([alone], [alone]), recipe_with(agent), 100, "here")


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_step_without_agents_reports_nothing_of_them() -> None:
    assert agent_metrics([Group(Prompt("a", (1,), "a", ""), ())]) == {}


def test_turns_tools_and_tokens_of_rollouts() -> None:
    three = calculator_run(counts={"turns": 4, "turns_unused": 1}, branches=calculator_run().branches * 3)
    metrics = agent_metrics([group_of(calculator_run(), three)])
    assert metrics["agent/turns/mean"] == 3
    assert metrics["agent/turns/max"] == 4
    assert metrics["agent/turns_unused"] == 1
    assert metrics["agent/branches/mean"] == 2
    assert metrics["agent/given_tokens/mean"] == 28
    assert metrics["agent/given_tokens/share"] == pytest.approx(14 / 22)
    assert metrics["agent/prefix_reuse"] == pytest.approx(1 - 14 / 28)
    assert metrics["agent/tool_calls/mean"] == 1
    assert metrics["agent/tools/calculator/calls"] == 2
    assert metrics["agent/tools/calculator/seconds_mean"] == 0.5
    assert metrics["agent/tool_failures/share"] == metrics["agent/tools/calculator/failure_share"] == 0
    assert metrics["agent/seconds/mean"] == metrics["agent/seconds/max"] == 2.0
    assert metrics["agent/seconds/outside_mean"] == 0.5
    assert not undocumented(metrics)


def test_what_goes_wrong_is_counted_by_what_it_is() -> None:
    counts = {
        "branch/history": 2,
        "branch/reasoning": 1,
        "ignored/temperature": 3,
        "refused/context_length_exceeded": 1,
    }
    counts |= {"unreadable_calls": 2, "retries": 1, "tokens_rerendered": 40}
    process = "the agent's process ended (signal 9)"
    failed = calculator_run(error=process, counts={"failed": 1}, reward=None)
    aborted = calculator_run(error="the engine gave up on a turn", reward=None)
    late = calculator_run(error="took longer than 60 s", counts={"turns": 2, "late": 1}, reward=None)
    broken = tool_event(3.0, 2.5, error="TimeoutError: took longer than 2 s")
    run = calculator_run(counts=counts | {"turns": 2}, events=(*calculator_run().events, broken))
    metrics = agent_metrics([group_of(run, run, failed, late, aborted)])
    assert metrics["agent/branches/history"] == 4
    assert metrics["agent/branches/reasoning"] == 2
    assert metrics["agent/ignored/temperature"] == 6
    assert metrics["agent/refused/context_length_exceeded"] == 2
    assert metrics["agent/unreadable_calls"] == 4
    assert metrics["agent/retries"] == 2
    assert metrics["agent/tokens_rerendered"] == 80
    assert (metrics["agent/failed"], metrics["agent/late"]) == (1, 1), "nor is an engine's abort a failure"
    assert metrics["agent/tool_failures/share"] == pytest.approx(2 / 7)
    assert metrics["agent/tools/calculator/seconds_max"] == 2.5
    assert not undocumented(metrics)


def test_agents_may_tell_anything_and_make_up_any_number_of_tools() -> None:
    given: list[dict[str, Any]] = [{"kind": "tool"}, {"kind": "turn", "said": "x"}]
    given += [{"kind": "tool", "name": name, "seconds": at} for name, at in ((3, 1.0), ("x", "1"), ("x", math.nan))]
    odd = tuple(reported(event, 0.0) for event in given)
    many = tuple(tool_event(0.0, 1.0, f"tool{number}") for number in range(3 * TOOLS_MAX))
    metrics = agent_metrics([group_of(calculator_run(events=(*odd, *many, tool_event(0.0, 1.0, ""))))])
    tools = [name for name in metrics if name.startswith("agent/tools/") and name.endswith("/calls")]
    assert len(tools) <= TOOLS_MAX + 1
    assert sum(metrics[name] for name in tools) == 3 * TOOLS_MAX + 1
    assert not undocumented(metrics)


def test_turns_at_the_same_time_are_not_counted_twice() -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    turns = (turn_event(0, 1.0, 2.0, said), turn_event(1, 2.0, 2.0, said), turn_event(2, 6.0, 1.0, said))
    metrics = agent_metrics([group_of(calculator_run(events=turns))])
    assert metrics["agent/seconds/mean"] == 7
    assert metrics["agent/seconds/outside_mean"] == 3
    assert metrics["agent/tool_calls/mean"] == 6


def test_a_rollout_that_never_asked_has_metrics() -> None:
    failed = calculator_run(
        branches=(), turns=(), messages=(), events=(), counts={"failed": 1.0}, error="ImportError", reward=None
    )
    metrics = agent_metrics([group_of(failed)])
    assert metrics["agent/failed"] == 1
    assert metrics["agent/turns/max"] == 0
