"""Environments of the real packages, through agent processes and the gateway: each rollout has its own reward."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest

import megagrpo.agents
from megagrpo import cli
from megagrpo.agents.processes import AgentProcess, Program
from megagrpo.agents.turns import Rollout
from megagrpo.data.reasoning_gym import task_records
from megagrpo.processes.ports import free_port
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.types import Request, Sample, SamplingParams
from tests.agents.families import chat_of
from tests.agents.scripted import ScriptedEngine, checked, served
from tests.loop.small_run import wait_until

pytestmark = pytest.mark.long
SECONDS = 300.0
EPISODES = Path(__file__).parent / "episodes"
ENDS = "<|im_end|>"
REQUEST = Request("prompt", 0, (), 0, SamplingParams(1))
Python = Callable[[str], Path]


@dataclass(frozen=True)
class Played:
    row: dict[str, Any]
    end: dict[str, Any]
    """The agent process's last message."""
    record: Rollout
    sample: Sample
    events: list[dict[str, Any]]

    @property
    def score(self) -> float:
        assert self.end["error"] == "", self.end
        return float(self.end["reward"]["score"])


def play(
    agent: AgentConfig, rows: Sequence[dict[str, Any]], say: Callable[[str], str], log: Path, *,
    rollouts: int | None = None, at_once: int = 64, turns_max: int = 20, together: bool = False,
) -> list[Played]:  # fmt: skip
    """Each row's rollouts, row after row and again. `say`: the conversation -> what the policy says. together: it
    answers once all that run at once have asked."""

    async def all_of_them() -> list[Played]:
        file = Path(megagrpo.agents.__file__).parent / "environments" / f"{agent.kind}.py"
        arguments = agent.model_dump(mode="json", include={agent.kind})[agent.kind]
        program = Program(str(file), file.read_text(), "rollout", arguments, agent.python)
        async with served(chat_of("chatml"), lambda text, _: say(text) + ENDS) as at:
            process = await AgentProcess.start(program, log)
            opening = asyncio.create_task(opens(at.engine)) if together else None
            try:
                return await asyncio.wait_for(of_process(at, process), SECONDS)
            finally:
                await process.end()
                if opening:
                    opening.cancel()

    async def opens(engine: ScriptedEngine) -> None:
        engine.open.clear()
        for _ in range(at_once):
            await engine.begun.acquire()
        engine.open.set()

    async def of_process(at: Any, process: AgentProcess) -> list[Played]:
        limits = {"turns_max": turns_max, "tokens_max": 4000, "timeout_seconds": SECONDS}
        messages = process.messages()
        first = await anext(messages)
        assert first == {"ready": True}
        waiting = list(enumerate([*rows] * 1000))[: rollouts or len(rows)][::-1]
        running: dict[int, tuple[dict[str, Any], str]] = {}
        events: dict[int, list[dict[str, Any]]] = {}
        played: dict[int, Played] = {}
        while waiting or running:
            while waiting and len(running) < at_once:
                number, row = waiting.pop()
                key = at.open(turns_max=turns_max, index=number)
                task = {
                    "id": f"row {number % len(rows)}", "sample": number // len(rows), "seed": number,
                    "messages": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"],
                    "data_source": row["data_source"], "ability": "", "extra_info": row["extra_info"] or {},
                    "limits": limits,
                }  # fmt: skip
                endpoint = {"base_url": f"{at.gateway.url}/v1", "api_key": key, "model": "policy"}
                process.send({"begin": number, "task": task, "endpoint": endpoint})
                running[number], events[number] = (row, key), []
            message = await anext(messages)
            if "event" in message:
                events[message["event"]].append(message)
                continue
            number = message["end"]
            row, key = running.pop(number)
            record = await at.gateway.close(key)
            checked(record, at.engine)
            sample = record.sample(REQUEST, "stop", message["turn_rewards"])
            assert sample.agent is not None
            assert sample.agent.error == ""
            played[number] = Played(row, message, record, sample, events.pop(number))
        return [played[number] for number in sorted(played)]

    return asyncio.run(all_of_them())


def prepared(tmp_path: Path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """The rows that `megagrpo prepare` writes, by split."""
    assert cli.main(["prepare", *arguments, "--output", str(tmp_path / "rows")]) == 0
    return {file.stem: pq.read_table(file).to_pylist() for file in (tmp_path / "rows").iterdir()}


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"-?\d+", text)]


def adds(text: str) -> str:
    """Two calls of the tool, then the sum, which is wrong where the first number is a multiple of 3."""
    first, second, third = numbers(re.search(r"Add: [\d ]+", text)[0])  # type: ignore[index]
    results = [int(found) for found in re.findall(r"<tool_response>\n(-?\d+)", text)]
    if len(results) == 2:
        return f"The sum is {results[1] + (first % 3 == 0)}"
    a, b = (results[0], third) if results else (first, second)
    return f'<tool_call>\n{{"name":"add","arguments":{{"a": {a},"b":{b}}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents") / "log"


@pytest.mark.parametrize("rollouts", [16, pytest.param(256, marks=pytest.mark.soak)])
def test_a_tool_environment_gives_each_rollout_its_own_reward(
    rollouts: int, agent_python: Python, tmp_path: Path, log: Path
) -> None:
    python, environment = str(agent_python("verifiers-0.2")), f"{EPISODES}/sums_with_rubric.py:with_tool"
    rows = prepared(
        tmp_path, "verifiers", environment, "--python", python, "--arguments", '{"rows": 64, "held_out": 3}'
    )
    assert [len(rows["train"]), len(rows["test"])] == [64, 3]
    assert rows["test"][0]["prompt"] == [{"role": "user", "content": "Add: 64 65 128"}]
    verifiers = {"environment": environment, "arguments": {"rows": 64, "held_out": 3}}
    agent = AgentConfig(verifiers=verifiers, python=python)
    for one in play(
        agent, [*rows["train"], *rows["test"]], adds, log, rollouts=rollouts, at_once=min(rollouts, 64), together=True
    ):
        first = numbers(one.row["prompt"][0]["content"])[0]
        assert one.score == float(first % 3 != 0)
        assert one.end["reward"]["add_calls"] == 2
        assert [event["name"] for event in one.events] == ["add", "add"]
        assert numbers(one.sample.text) == [4 * first + 1 + (first % 3 == 0)]
        assert len(one.record.turns) == 3
        assert len(one.record.paths()) == 1
    cut = play(agent, rows["train"][:8], adds, log, turns_max=2)
    assert [(one.score, one.record.limited, len(one.record.turns)) for one in cut] == [(0.0, True, 2)] * 8
    (mistaken,) = play(agent, [{**rows["train"][0], "prompt": rows["train"][1]["prompt"]}], adds, log)
    assert "prepare" in mistaken.end["error"]


def test_an_environment_takes_rows_of_ones_own_and_its_rewards_of_turns_are_passed_on(
    agent_python: Python, log: Path
) -> None:
    environment = {"environment": f"{EPISODES}/sums_with_rubric.py:countdown"}
    agent = AgentConfig(verifiers=environment, python=str(agent_python("verifiers-0.2")))
    row = {"data_source": "own", "reward_model": {"ground_truth": "3"}, "extra_info": None}
    rows = [{**row, "prompt": [{"role": "user", "content": f"Count down from 3, once by {step}."}]} for step in (1, 2)]

    def counts(text: str) -> str:
        turn = text.count("<|im_start|>assistant")
        return str(3 - turn if "by 1" in text or turn != 2 else 0)

    right, skips = play(agent, rows, counts, log)
    assert [turn.reward for turn in right.sample.agent.turns] == [0.5, 0.5, 0.5]  # type: ignore[union-attr]
    assert [turn.reward for turn in skips.sample.agent.turns] == [0.5, 0.0, 0.5]  # type: ignore[union-attr]
    assert (right.score, skips.score) == (1.5, 1.0)


@pytest.mark.soak
def test_tasks_with_a_harness_are_done_by_its_program(agent_python: Python, tmp_path: Path, log: Path) -> None:
    python, environment = str(agent_python("verifiers-0.4")), f"{EPISODES}/sums_with_harness.py:tasks"
    rows = prepared(tmp_path, "verifiers", environment, "--python", python, "--arguments", '{"rows": 16}')["train"]
    agent = AgentConfig(verifiers={"environment": environment, "arguments": {"rows": 16}}, python=python)

    def sums(text: str) -> str:
        first, second = numbers(re.search(r"Sum: [\d ]+", text)[0])  # type: ignore[index]
        return f"The sum is {first + second + (first % 3 == 0)}"

    played = play(agent, rows, sums, log, at_once=8)
    if any("failed to prepare uv script" in one.end["error"] for one in played):
        pytest.skip(f"uv cannot fetch what the package's harness imports: {played[0].end['error']}")
    for one in played:
        first = numbers(one.row["prompt"][0]["content"])[0]
        assert one.score == float(first % 3 != 0)
        assert numbers(one.sample.text) == [2 * first + 1 + (first % 3 == 0)]


@pytest.fixture
def guessing(agent_python: Python, tmp_path: Path) -> Iterator[str]:
    """The URL of an OpenEnv server."""
    port = free_port("127.0.0.1")
    with (tmp_path / "server.log").open("w") as output:
        server = subprocess.Popen(
            [agent_python("openenv"), EPISODES / "guessing_server.py", str(port)], stdout=output, stderr=output
        )

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        try:
            return bool(urlopen(f"http://127.0.0.1:{port}/health").status == 200)
        except URLError:
            return False

    try:
        wait_until(answers, 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def guesses(text: str) -> str:
    """1, 2, 3, … Before them, where the prompt is polite, what is no guess."""
    turn = text.count("<|im_start|>assistant") - ("Please" in text)
    return f'I say {{"number": {turn}}}' if turn else "Let me think."


def test_episodes_of_an_openenv_server_have_the_rewards_of_their_steps(
    agent_python: Python, guessing: str, tmp_path: Path, log: Path
) -> None:
    rows = prepared(
        tmp_path, "openenv", "--prompt", "Write {\"number\": N}.", "--system-prompt", "Play.", "--size", "32",
        "--test-size", "8",
    )  # fmt: skip
    polite = [{**row, "prompt": [{"role": "user", "content": "Please."}]} for row in rows["test"]]
    agent = AgentConfig(openenv={"url": guessing}, python=str(agent_python("openenv")))
    played = play(agent, [*rows["train"], *polite], guesses, log, rollouts=256, together=True)
    for one in played:
        secret = one.row["extra_info"]["seed"] % 7 + 1
        no_action = int(one.row in polite)
        assert one.score == 1.0
        assert one.end["turn_rewards"] == [0.0] * (no_action + secret - 1) + [1.0]
        assert one.end["reward"]["no_action"] == no_action
        assert len(one.record.turns) == len(one.events) == secret + no_action
        assert len(one.record.paths()) == 1
    said = played[0].sample.agent.messages  # type: ignore[union-attr]
    assert [message["role"] for message in said] == ["system", "user", "assistant"]
    assert said[1]["content"] == 'Write {"number": N}.\n\nGuess a number from 1 to 7.'
    (cut,) = play(agent, rows["train"][6:7], guesses, log, turns_max=3)
    assert (cut.score, cut.record.limited, len(cut.record.turns)) == (0.0, True, 3)


@pytest.mark.parametrize("counts", ["best", pytest.param("last", marks=pytest.mark.soak)])
def test_a_wrong_answer_to_a_task_of_reasoning_gym_may_be_mended(counts: str, log: Path) -> None:
    pytest.importorskip("reasoning_gym")
    entries = [entry for _, entry in task_records("reasoning_gym://seed=1/size=32/chain_sum")]
    rows = [
        {**entry, "prompt": [{"role": "user", "content": entry["prompt"]}], "reward_model": entry} for entry in entries
    ]
    truths = {entry["prompt"]: int(entry["ground_truth"]) for entry in entries}

    def answers(text: str) -> str:
        """Right at once where the sum is even; at the second attempt where it is odd, but never where it is below 0."""
        sum_ = next(truth for question, truth in truths.items() if question in text)
        right = sum_ % 2 == 0 or (sum_ > 0 and "not right" in text)
        return f"<answer>{sum_ if right else sum_ + 1}</answer>"

    agent = AgentConfig(reasoning_gym={"counts": counts, "attempts_max": 3})
    for one in play(agent, rows, answers, log, rollouts=256, together=True):
        sum_ = int(one.row["ground_truth"])
        attempts = 1 if sum_ % 2 == 0 else 2 if sum_ > 0 else 3
        assert len(one.record.turns) == one.end["reward"]["attempts"] == attempts
        assert one.score == one.end["reward"]["solved"] == float(attempts < 3)
        assert sum(one.end["turn_rewards"]) == one.score
        assert one.record.turns[-1].sampled.size > 0
