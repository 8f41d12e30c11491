"""Unmodified clients, each in an environment of its own, ask a gateway for many rollouts at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megagrpo.agents.dialects import messages
from megagrpo.agents.dialects.chat_request import Kept, Refusal
from megagrpo.agents.gateway import Gateway
from megagrpo.agents.turns import Limits
from megagrpo.types import Request, SamplingParams
from tests.agents.policy import Policy, adder, gateway_of, tokenizer
from tests.agents.scripted import check
from tests.dialect_answers import ANSWERS

pytestmark = pytest.mark.long

CLIENTS = Path(__file__).parent / "clients"
# The program in clients/, and the environment that it runs in.
PROGRAMS = {
    "openai_chat": "openai",
    "openai_responses": "openai",
    "anthropic_messages": "anthropic",
    "openai_agents": "openai-agents",
}
LIMITS = Limits(turns_max=40, tokens_max=4000, sampling=SamplingParams(max_tokens=300), seed=7)
PROCESSES = 4
SECONDS_MAX = 600


def numbers_of(index: int) -> list[int]:
    """Five numbers, the first of which no other rollout has."""
    rng = random.Random(index)
    return [1000 + index, *(rng.randrange(2, 9) for _ in range(4))]


class Agents:
    """Processes of one client, each with a share of the rollouts."""

    def __init__(self, gateway: Gateway, python: Path, program: str, rollouts: int, at_once: int) -> None:
        self._url, self._command = f"{gateway.url}/v1", [str(python), str(CLIENTS / f"{program}.py")]
        self._at_once = at_once // PROCESSES
        self.keys = [gateway.open(f"task {index}", 0, LIMITS) for index in range(rollouts)]
        self.said: dict[str, str] = {}
        self.processes: list[asyncio.subprocess.Process] = []

    def process_of(self, key: str) -> int:
        return self.keys.index(key) % PROCESSES

    async def run(self) -> list[int]:
        """Exit statuses. A process that was killed has a negative one."""
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CLIENTS), "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        for _ in range(PROCESSES):
            self.processes.append(
                await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env=environment,
                    limit=1 << 24,
                )
            )
        return await asyncio.gather(*(self._one(number) for number in range(PROCESSES)))

    async def _one(self, number: int) -> int:
        process = self.processes[number]
        assert process.stdin is not None
        assert process.stdout is not None
        mine = range(number, len(self.keys), PROCESSES)
        rollouts = [{"key": self.keys[index], "numbers": numbers_of(index)} for index in mine]
        asked = {"url": self._url, "at_once": self._at_once, "rollouts": rollouts}
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        async for line in process.stdout:
            ended = json.loads(line)
            self.said[ended["key"]] = ended["said"]
        return await process.wait()


async def check_rollout(gateway: Gateway, policy: Policy, key: str, index: int) -> None:
    """Checks that the trained tokens are those that the engine saw, and none of another rollout."""
    record = await gateway.close(key)
    sample = record.sample(Request(f"task {index}", 0, (), 0, LIMITS.sampling), "stop")
    assert sample.agent is not None
    assert sample.agent.error == ""
    check(record, sample, policy.seen.get(key, ()))
    texts = [tokenizer().decode(branch.tokens) for branch in sample.agent.branches]
    asked = {int(number) for text in texts for number in re.findall(r"Add: (\d+)", text)}
    assert asked <= {numbers_of(index)[0]}


@pytest.mark.parametrize("program", [*list(PROGRAMS)[:3], pytest.param("openai_agents", marks=pytest.mark.soak)])
def test_rollouts_of_a_client_are_not_mixed_up(program: str, agent_python: Callable[[str], Path]) -> None:
    python, rollouts, at_once = agent_python(PROGRAMS[program]), 128, 64

    async def run() -> None:
        all_wait = asyncio.Event()

        async def together() -> None:
            if policy.running == at_once:
                all_wait.set()
            await all_wait.wait()

        policy = Policy(adder, before=lambda key: together())
        async with gateway_of(policy) as gateway:
            agents = Agents(gateway, python, program, rollouts, at_once)
            assert await agents.run() == [0] * PROCESSES
            assert policy.most_running >= at_once
            for index, key in enumerate(agents.keys):
                assert re.findall(r"-?\d+", agents.said[key]) == [str(sum(numbers_of(index)))]
                await check_rollout(gateway, policy, key, index)

    asyncio.run(asyncio.wait_for(run(), SECONDS_MAX))


@pytest.mark.parametrize(
    "program", ["openai_chat", *(pytest.param(one, marks=pytest.mark.soak) for one in list(PROGRAMS)[1:])]
)
def test_agents_that_are_killed_cost_their_own_rollouts(program: str, agent_python: Callable[[str], Path]) -> None:
    python, rollouts, at_once = agent_python(PROGRAMS[program]), 48, 16
    rng = random.Random(program)
    dies_at = {process: rng.randrange(5, 40) for process in rng.sample(range(PROCESSES), 2)}

    async def run() -> None:
        asked = [0] * PROCESSES

        async def perhaps_kill(key: str) -> None:
            process = agents.process_of(key)
            asked[process] += 1
            if asked[process] == dies_at.get(process):
                os.kill(agents.processes[process].pid, signal.SIGKILL)
            if asked[process] >= dies_at.get(process, 1000):
                await asyncio.Event().wait()  # for ever: only the gateway ends this turn

        policy = Policy(adder, before=perhaps_kill)
        async with gateway_of(policy) as gateway:
            agents = Agents(gateway, python, program, rollouts, at_once)
            ends = await agents.run()
            assert ends == [-signal.SIGKILL if process in dies_at else 0 for process in range(PROCESSES)]
            for index, key in enumerate(agents.keys):
                if agents.process_of(key) not in dies_at:
                    assert re.findall(r"-?\d+", agents.said[key]) == [str(sum(numbers_of(index)))]
                await check_rollout(gateway, policy, key, index)
            assert policy.running == 0
            assert policy.given_up >= len(dies_at)

    asyncio.run(asyncio.wait_for(run(), SECONDS_MAX))


def test_answers_streams_and_errors_are_of_anthropics_types(agent_python: Callable[[str], Path]) -> None:
    asked = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    request = messages.read(asked, Kept())
    statuses = (400, 401, 408, 500)
    given = {
        "answers": [messages.written(request, answer) for answer in ANSWERS.values()],
        "events": [
            json.loads(event.partition(b"data: ")[2])
            for answer in ANSWERS.values()
            for event in messages.events(request, answer)
        ],
        "errors": [messages.refused(Refusal(status, "code", "message")) for status in statuses],
    }
    command = [agent_python("anthropic"), CLIENTS / "anthropic_types.py"]
    done = subprocess.run(command, input=json.dumps(given), text=True, capture_output=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
