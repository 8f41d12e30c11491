"""The built-in loop, against a real gateway with a policy that says what it is told, and in an agent process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megagrpo.agents.host import AgentHost
from megagrpo.agents.processes import program_of
from megagrpo.agents.tool_loop import prepare, rollout
from megagrpo.agents.turns import Limits
from megagrpo.errors import AgentError, MegagrpoError
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.rollout.pool import Order
from megagrpo.types import Prompt, Request, Sample, SamplingParams
from tests.agents.policy import STOP, Played, Policy, adder, chat, gateway_of, play
from tests.loop.small_run import wait_until

OWN = Path(__file__).with_name("own_tools.py")
SAMPLING = SamplingParams(max_tokens=200)
Say = Callable[[str, int], str]


def calls(*given: tuple[str, Any]) -> str:
    """An answer with these calls."""
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in given]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def says(*answers: str) -> Say:
    """A policy that says these, one after another; the last one again and again."""
    left = list(answers)
    return lambda prompt, seed: (left.pop(0) if len(left) > 1 else left[0]) + STOP


def played(
    say: Say, tools: Sequence[Any], texts: Sequence[str] = ("Add: 1 2",), turns_max: int = 20, tokens_max: int = 4000
) -> list[Played]:
    """A rollout of each text, all at once."""

    async def run() -> list[Played]:
        await prepare(tools=tools)
        policy = Policy(say)
        async with gateway_of(policy, audited=1.0) as gateway:
            plays = []
            for index, text in enumerate(texts):
                messages = [{"role": "user", "content": text}]
                task = SimpleNamespace(id=f"task {index}", ground_truth="7", messages=messages)
                limits = Limits(turns_max, tokens_max, SAMPLING, index)
                plays.append(play(gateway, policy, partial(rollout, tools=tools), task, limits, index))
            return await asyncio.gather(*plays)

    return asyncio.run(run())


def test_many_rollouts_call_tools_until_they_know_and_train_what_the_engine_saw() -> None:
    rng = random.Random(1)
    numbers = [[rng.randrange(100) for _ in range(rng.randrange(2, 6))] for _ in range(64)]
    results = played(adder, [f"{OWN}:add"], [f"Add: {' '.join(map(str, row))}" for row in numbers])
    right = 0
    for row, result in zip(numbers, results, strict=True):
        run = result.sample.agent
        assert run is not None
        assert result.returned is None
        right += run.messages[-1]["content"].endswith(f"The sum is {sum(row)}.")
        told = [event for event in result.events if event["kind"] == "tool"]
        assert run.counts["calls"] == len(told)
        assert all(event["name"] == "add" and event["error"] == "" for event in told)
        if not run.counts.get("unreadable_calls") and "reasoning" not in str(run.counts):
            assert len(run.branches) == 1
    assert right == 64
    assert sum(result.sample.agent.counts.get("unreadable_calls", 0) for result in results) > 0  # type: ignore[union-attr]


def test_calls_of_one_answer_run_at_the_same_time_and_are_told_in_their_order() -> None:
    both = calls(("later", {"text": "first", "seconds": 0.3}), ("later", {"text": "second"}), ("add", {"a": 1}))
    (result,) = played(says(both, "Done."), [f"{OWN}:later", f"{OWN}:add"])
    assert [event["arguments"] for event in result.events][-1] != ""
    assert result.prompt.index("first\n</") < result.prompt.index("second\n</") < result.prompt.index("2\n</")
    # Told when each has ended: the quick ones first.
    assert json.loads(result.events[-1]["arguments"])["text"] == "first"
    assert len(result.sample.agent.branches) == 1  # type: ignore[union-attr]


def test_what_goes_wrong_in_a_call_is_told_to_the_policy_and_to_the_trace() -> None:
    wrong = calls(("raises", {"text": "no such row"}), ("raises", {"txt": 1}))
    (result,) = played(says(wrong, "Done."), [f"{OWN}:raises"])
    assert "no such row" in result.prompt
    assert "txt" in result.prompt
    assert len([event for event in result.events if event["error"]]) == 2
    late = calls(("later", {"text": "x", "seconds": 60}))
    (result,) = played(says(late, "Done."), [{"name": f"{OWN}:later", "timeout_seconds": 0.2}])
    assert "longer than 0.2 s" in result.prompt
    assert 0.1 < result.events[0]["seconds"] < 30


@pytest.mark.parametrize(
    "unreadable",
    ['<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>', calls(("multiply", {"a": 1})), "<tool_call>"],
)
def test_a_call_that_cannot_be_read_or_is_unknown_is_told_and_can_be_repaired(unreadable: str) -> None:
    (result,) = played(says(unreadable, calls(("add", {"a": 1})), "Done."), [f"{OWN}:add"])
    assert "Error" in result.prompt
    assert "2\n</tool_response>" in result.prompt
    assert result.sample.finish == "stop"


def test_limits_of_turns_and_tokens_truncate() -> None:
    (result,) = played(says(calls(("add", {"a": 1}))), [f"{OWN}:add"], turns_max=3)
    assert (len(result.record.turns), result.sample.finish) == (3, "length")
    long = {"name": f"{OWN}:later", "result_characters_max": 400}
    (result,) = played(says(calls(("later", {"text": "long " * 30}))), [long], tokens_max=900)
    assert result.sample.finish == "length"
    assert 2 <= len(result.record.turns) < 20
    (result,) = played(says("word " * 400), [f"{OWN}:add"])
    assert len(result.record.turns) == 1


def test_long_results_are_cut_in_the_middle() -> None:
    tool = {"name": f"{OWN}:later", "result_characters_max": 60}
    (result,) = played(says(calls(("later", {"text": f"begin{'x' * 90}end"})), "Done."), [tool])
    shown = result.events[0]["result"]
    assert len(shown) == 60
    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert shown in result.prompt


def test_a_tool_with_a_state_ends_the_rollout_and_gives_its_reward() -> None:
    tool = {"name": f"{OWN}:Counter", "arguments": {"goal": 3}}
    results = played(says(calls(("up", {"by": 2}))), [tool], ["Count: a", "Count: b"])
    for result in results:
        assert result.returned == {"score": 1.0, "count": 4.0}
        assert [event["result"] for event in result.events] == ["2", "4"]
        assert result.sample.finish == "stop"


def test_a_tool_may_give_rewards_of_turns() -> None:
    two, one = calls(("step", {}), ("step", {})), calls(("step", {}))
    walk, count = f"{OWN}:Walk", f"{OWN}:Counter"
    (result,) = played(says(two, one, "Done."), [walk, count])
    assert result.returned == {"score": 3.0, "steps": 3.0, "count": 0.0, "turn_rewards": [2.0, 1.0]}
    with pytest.raises(ValueError, match="turn_rewards"):
        played(says("Done."), [walk, {"name": f"{OWN}:Walk", "call_name": "stroll"}])


def test_tools_of_one_name_fail_the_rollout() -> None:
    with pytest.raises(AgentError):
        played(says("Done."), [f"{OWN}:add", {"name": f"{OWN}:later", "call_name": "add"}])


def test_python_keeps_the_variables_of_a_rollout_between_its_turns() -> None:
    first, second = calls(("python", {"code": "x = 20"})), calls(("python", {"code": "x += 1; print(2 * x)"}))
    results = []
    for _ in range(2):
        results += played(says(first, second, "Done."), [{"name": "python", "stateful": True}])
    assert [result.events[1]["result"] for result in results] == ["42", "42"]


# --- in an agent process ---------------------------------------------------------------------------------------------


@dataclass
class Hosted:
    host: AgentHost
    policy: Policy
    samples: dict[int, Sample]
    failures: list[MegagrpoError]


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    agent = AgentConfig.model_validate({"tools": [f"{OWN}:add", "python"], "parser": "hermes"})
    policy, samples, failures = Policy(adder), dict[int, Sample](), list[MegagrpoError]()

    def finished(order: Order, index: int, key: str, sample: Sample | None) -> None:
        assert sample is not None
        samples[index] = sample

    made = AgentHost(
        agent, program_of(agent), 4000, tmp_path, chat, policy.ask,
        finished=finished, failed=failures.append,
        sampling=set, say=print,
    )  # fmt: skip
    yield Hosted(made, policy, samples, failures)
    made.close()


def test_the_loop_runs_in_agent_processes_as_a_recipe_says_it(hosted: Hosted) -> None:
    prompt = Prompt("sum", (1,), "sums", "12", messages=({"role": "user", "content": "Add: 3 4 5"},))
    requests = [Request("sum", index, (1,), index, SAMPLING) for index in range(8)]
    hosted.host.begin([Order(requests, prompt=prompt)])
    wait_until(lambda: len(hosted.samples) == 8 or bool(hosted.failures), "eight samples", 120.0)
    assert not hosted.failures
    for sample in hosted.samples.values():
        run = sample.agent
        assert run is not None
        assert run.error == ""
        assert "The sum is 12." in run.messages[-1]["content"]
        assert [event["name"] for event in run.events if event["kind"] == "tool"] == ["add", "add"]
