"""The programs in yaml_recipes/agents/, against a real gateway with a policy that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megagrpo.agents.turns import Limits
from megagrpo.errors import RecipeError
from megagrpo.types import Sample, SamplingParams
from megagrpo.user_functions import load_function
from tests.agents.policy import STOP, Policy, gateway_of, play
from tools.recipe_docs import YAML_RECIPES

SAMPLING = SamplingParams(max_tokens=200)


def program(name: str) -> Any:
    if name != "game":
        pytest.importorskip("openai")
    return load_function(f"{YAML_RECIPES}/agents/{name}.py:rollout", "agent.function", RecipeError)


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(
    rollout: Callable[..., Any], say: Callable[[str], str], turns_max: int = 20, **task: Any
) -> tuple[Any, Sample, list[dict[str, Any]]]:
    """Plays a rollout; returns its result, its sample and its events. The policy answers a prompt's text."""

    async def run() -> tuple[Any, Sample, list[dict[str, Any]]]:
        policy = Policy(lambda prompt, seed: say(prompt) + STOP)
        async with gateway_of(policy, audited=1.0) as gateway:
            limits = Limits(turns_max, 4000, SAMPLING, 1)
            one = await play(gateway, policy, rollout, SimpleNamespace(**task), limits)
            return one.returned, one.sample, one.events

    return asyncio.run(run())


def test_the_program_of_30_lines_calls_its_tool_and_scores_the_last_answer() -> None:
    rollout = program("openai_calculator")
    steps = [calling("calculate", expression="67+48"), calling("calculate", expression="115/25"), "90"]
    left = iter(steps)
    asked = {"messages": [{"role": "user", "content": "67+48-25="}], "ground_truth": "90"}
    returned, sample, events = played(rollout, lambda prompt: next(left), **asked)
    assert returned == 1.0
    assert [event["error"] for event in events] == ["", "Error: not two numbers with +, - or * between them"]
    assert sample.agent is not None
    assert len(sample.agent.branches) == 1
    assert len((YAML_RECIPES / "agents" / "openai_calculator.py").read_text().splitlines()) < 40


@pytest.mark.parametrize(("second", "score"), [("7", 1.0), ("2", 0.0), ("5", 0.0)])
def test_players_win_the_rounds_in_which_they_choose_the_same(second: str, score: float) -> None:
    rollout = program("game")

    def choose(prompt: str) -> str:
        return "7" if "2 or 7?" in prompt else second

    rounds = [["2", "7"], ["2", "7"]]
    returned, sample, _ = played(rollout, choose, extra_info={"rounds": rounds})
    assert returned == {"score": score, "valid": 0.5 if second == "5" else 1.0}
    assert sample.agent is not None
    assert len(sample.agent.branches) == 2, "each player has a conversation of its own"
    assert len(sample.agent.turns) == 4


def in_directories(under: Path) -> dict[str, Any]:
    """Directories in the place of containers."""
    return {
        "start": ["mkdir", f"{under}/{{name}}"],
        "run": ["timeout", "{seconds}", "bash", "-c", f"cd {under}/{{name}} && {{command}}"],
        "stop": ["rm", "-r", f"{under}/{{name}}"],
        "command_seconds": 1,
    }


@pytest.mark.parametrize(("work", "score"), [("echo 42 > answer", 1.0), ("echo 41 > answer; exit 3", 0.0)])
def test_commands_run_in_the_rows_container_which_is_gone_in_the_end(tmp_path: Path, work: str, score: float) -> None:
    rollout = program("swe")
    steps = iter([calling("bash", command=work), calling("bash", command="sleep 60"), calling("bash"), "Done."])
    seen = []

    def say(prompt: str) -> str:
        seen.append(prompt)
        return next(steps)

    info = {"image": "any", "test": "grep -q 42 answer"}
    task = {"messages": [{"role": "user", "content": "Write 42."}], "extra_info": info}
    returned, sample, events = played(lambda *of: rollout(*of, **in_directories(tmp_path)), say, **task)
    assert returned == {"score": score, "commands": 3}
    errors = ["" if score else "exit status 3", "exit status 124", "not a command"]
    assert [event.get("error") for event in events] == [*errors, None]
    assert "(exit status 124)" in seen[2]
    assert list(tmp_path.iterdir()) == []
    assert sample.agent is not None
    assert len(sample.agent.branches) == 1


def test_at_the_limit_of_turns_what_is_done_is_tested(tmp_path: Path) -> None:
    rollout = program("swe")
    info = {"image": "any", "test": "test -e answer"}
    task = {"messages": [{"role": "user", "content": "Write."}], "extra_info": info}
    always = calling("bash", command="touch answer")
    returned, sample, _ = played(lambda *of: rollout(*of, **in_directories(tmp_path)), lambda prompt: always, 2, **task)
    assert returned == {"score": 1.0, "commands": 2}
    assert sample.finish == "length"


def test_a_container_that_does_not_start_fails_the_rollout_with_its_reason(tmp_path: Path) -> None:
    rollout = program("swe")
    words = in_directories(tmp_path) | {"start": ["bash", "-c", "echo no such image: {image}; exit 1"]}
    task = SimpleNamespace(messages=[], extra_info={"image": "any", "test": "true"})
    with pytest.raises(RuntimeError, match="no such image: any"):
        asyncio.run(rollout(task, None, **words))
