"""Rewards of agents' rollouts: function `agent`, at limits and where agents fail, and the calls that functions see."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megagrpo.errors import RewardError
from megagrpo.evaluation.metrics import evaluation_metrics
from megagrpo.evaluation.responses import responses_of
from megagrpo.recipe import schema
from megagrpo.reward.functions import tool_calls_of
from megagrpo.reward.scorer import Scorer
from megagrpo.types import AgentRun, Branch, FinishReason, Group, Prompt, Sample, Turn


def scorer_of(function: dict[str, Any]) -> Scorer:
    return Scorer(schema.RewardConfig.model_validate({"functions": [function]}), response_tokens_max=8)


def response(finish: FinishReason) -> Sample:
    return Sample("a:0", 0, np.zeros(3, np.int32), np.zeros(3), np.zeros(3), finish, "")


def agent_sample(index: int, finish: FinishReason, reward: float | None = None, **run) -> Sample:
    branch = Branch(np.array([1, 2, 3, 4], np.int32), np.array([False, True, True, True]))
    given = None if reward is None else {"score": reward}
    agent = AgentRun((branch,), (Turn(0, 0, 3),), (), reward=given, **run)
    return replace(response(finish), index=index, agent=agent)


def agent_group(*samples: Sample) -> Group:
    return Group(Prompt("p", (1,), "s", "7"), samples)


@pytest.mark.parametrize(("arguments", "at_limit"), [({}, 0.0), ({"reward_at_limit": -0.5}, -0.5)])
def test_a_rollout_that_a_limit_ended_without_a_reward_has_that_of_the_recipe(arguments, at_limit):
    scorer = scorer_of({"function": "agent", "arguments": arguments})
    (group,) = scorer.score([agent_group(agent_sample(0, "stop", 1.0), agent_sample(1, "length"))])
    assert [score.value for score in group.scores] == [1.0, at_limit]
    assert not group.scores[1].solved


def test_null_masks_a_rollout_at_a_limit_and_a_reward_it_has_stays():
    scorer = scorer_of({"function": "agent", "arguments": {"reward_at_limit": None}})
    samples = agent_sample(0, "length"), agent_sample(1, "length", 0.5), agent_sample(2, "stop")
    (group,) = scorer.score([agent_group(*samples)])
    assert [score.value for score in group.scores] == [None, 0.5, None]
    assert group.scores[0].masked
    assert group.scores[2].error  # it ended by itself


def call_of(name: str) -> dict[str, Any]:
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result_of(name: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"{name}'s", "tool_call_id": name}


def test_tool_calls_are_those_of_the_policys_answers_however_the_conversation_begins():
    """The agent leaves out the row's system message, and gives an example of its own before the task."""
    task, last = {"role": "user", "content": "task"}, {"role": "assistant", "content": "4"}
    example = [{"role": "user", "content": "?"}, call_of("example"), result_of("example")]
    row = Prompt("p", (1,), "s", "7", messages=({"role": "system", "content": "You help."}, *example[:2], task))
    for begins in ([task], [*example, task]):
        messages = (*begins, call_of("policy"), result_of("policy"), last)
        events = tuple({"kind": "turn", "at": 0.0, "said": said} for said in (call_of("policy"), last))
        sample = agent_sample(0, "stop", events=events)
        assert sample.agent
        sample = replace(sample, agent=replace(sample.agent, messages=messages))
        assert tool_calls_of(row, sample) == [{"name": "policy", "arguments": {}, "result": "policy's"}]
    assert tool_calls_of(row, response("stop")) == []


@pytest.mark.parametrize("given", ["much", float("nan"), float("inf"), 10**400, [1.0]])
def test_a_reward_at_a_limit_is_a_finite_number(given):
    with pytest.raises(RewardError):
        scorer_of({"function": "agent", "arguments": {"reward_at_limit": given}})


def test_rollouts_whose_agent_was_late_or_failed_are_unsolved_in_an_evaluation_and_masked_in_training():
    scorer = scorer_of({"function": "agent"})
    late = agent_sample(2, "abort", error="it took longer than 5 s", counts={"late": 1.0})
    failed = agent_sample(3, "abort", error="KeyError: 'x'", counts={"failed": 1.0})
    group = agent_group(agent_sample(0, "stop", 1.0), agent_sample(1, "length"), late, failed)
    (plain,), (trained,) = scorer.score_unshaped([group]), scorer.score([group])
    assert [score.value for score in plain.scores] == [1.0, 0.0, 0.0, 0.0]
    assert [score.value for score in trained.scores] == [1.0, 0.0, None, None]
    assert [score.error for score in plain.scores] == [score.error for score in trained.scores]
    metrics = evaluation_metrics(responses_of("held out", [plain]), 4)
    assert metrics["mean@4"] == metrics["pass@1"] == 0.25
    assert metrics["unscored_share"] == 0.5


def test_an_evaluation_leaves_out_a_rollout_that_an_engine_gave_up():
    (group,) = scorer_of({"function": "agent"}).score_unshaped([agent_group(agent_sample(0, "abort"))])
    assert group.scores[0].value is None
