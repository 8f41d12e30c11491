"""Agent processes: functions of every kind, what they may do, and what is heard of it."""

from __future__ import annotations

import asyncio
import shlex
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from megagrpo.agents.processes import AgentProcess, Program
from tests.loop.small_run import wait_until

SECONDS = 120.0
ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "api_key": "key", "model": "policy"}
AGENTS = """
    import asyncio, dataclasses, os, signal, subprocess, sys, time
    from decimal import Decimal

    import neighbour

    held = None


    @dataclasses.dataclass
    class Reward:
        score: float
        speed: float
        turn_rewards: list


    async def rollout(task, endpoint, **arguments):
        print("printed to break the protocol")
        os.write(1, b'{"end": 0}\\n')
        match task.messages[0]["content"]:
            case "number":
                return Decimal("0.5")
            case "mapping":
                return {"score": 1, "right": True, "turn_rewards": {"a": 0.25}}
            case "dataclass":
                return Reward(1.0, 2.0, [0.5, 1])
            case "nothing":
                return None
            case "text":
                return "good"
            case "infinite":
                return float("inf")
            case "no score":
                return {"right": 1.0}
            case "raises":
                raise KeyError("here")
            case "exits":
                sys.exit(3)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "starts":
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                endpoint.event("child", pid=child.pid)
                await asyncio.sleep(1000)
            case "waits":
                await asyncio.sleep(1000)
            case "told":
                endpoint.event("tool", name="add", seconds=0.5, error="", arguments={"a": 1}, result="x" * 10**6)
                endpoint.event("set", value={1, 2})
                return len(task.messages)
            case "seen":
                secret = os.environ.get("SECRET"), os.environ.get("GIVEN"), neighbour.VALUE, arguments
                endpoint.event("seen", task=dataclasses.asdict(task), values=secret, at=endpoint.base_url)


    def blocking(task, endpoint):
        time.sleep(0.05)
        return float(task.sample)
"""


@asynccontextmanager
async def started(program: Program, log: Path) -> AsyncIterator[tuple[AgentProcess, AsyncIterator[dict[str, Any]]]]:
    process = await AgentProcess.start(program, log)
    try:
        yield process, process.messages()
    finally:
        await process.end()


def task(content: str, sample: int = 0) -> dict[str, Any]:
    limits = {"turns_max": 5, "tokens_max": 100, "timeout_seconds": 9.0}
    row = {"ground_truth": "4", "data_source": "sums", "ability": "math", "extra_info": {"index": 3}}
    messages = [{"role": "user", "content": content}]
    return {"id": "p", "sample": sample, "seed": 2**62, "messages": messages, **row, "limits": limits}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    file = tmp_path / "chat.py"  # as a module of megagrpo beside the runner
    file.write_text(textwrap.dedent(AGENTS))
    (tmp_path / "neighbour.py").write_text("VALUE = 7")
    return Program(str(file), file.read_text(), "rollout", {}, None)


Says = Awaitable[list[dict[str, Any]]]


async def rollouts(program: Program, log: Path, *contents: str) -> list[dict[str, Any]]:
    """All that a process says until each of these rollouts, all begun at once, has ended."""
    async with started(program, log) as (process, messages):
        assert await anext(messages) == {"ready": True}
        for number, content in enumerate(contents):
            process.send({"begin": number, "task": task(content, number), "endpoint": ENDPOINT})
        said: list[dict[str, Any]] = []
        while sum("end" in message for message in said) < len(contents):
            said.append(await anext(messages))
        return said


def run(work: Awaitable[Any]) -> Any:
    async def within() -> Any:
        return await asyncio.wait_for(work, SECONDS)

    return asyncio.run(within())


def test_what_a_function_returns_is_a_reward_or_an_error_and_what_it_prints_is_in_the_log(
    program: Program, tmp_path: Path
) -> None:
    contents = ("number", "mapping", "dataclass", "nothing", "text", "infinite", "no score", "raises", "exits")
    said = run(rollouts(program, tmp_path / "log", *contents))
    ends = {contents[message["end"]]: message for message in said}
    found = {name: (end["reward"], end["turn_rewards"]) for name, end in ends.items() if not end["error"]}
    assert found == {
        "number": ({"score": 0.5}, None),
        "mapping": ({"score": 1.0, "right": 1.0}, {"a": 0.25}),
        "dataclass": ({"score": 1.0, "speed": 2.0}, [0.5, 1.0]),
        "nothing": (None, None),
    }
    failed = {name: end["error"].partition(":")[0] for name, end in ends.items() if end["error"]}
    assert failed == {"text": "TypeError", "infinite": "ValueError", "no score": "ValueError", "raises": "KeyError",
                      "exits": "SystemExit"}  # fmt: skip
    assert "line" in ends["raises"]["trace"]
    assert (tmp_path / "log").read_text().count("printed to break the protocol") == len(contents)


def test_a_function_sees_its_task_its_neighbours_and_the_variables_it_is_given(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("GIVEN", "y")
    given = Program(program.file, program.source, "rollout", {"depth": 3}, None, ("GIVEN",))
    (event, _) = run(rollouts(given, tmp_path / "log", "seen"))
    assert event["values"] == [None, "y", 7, {"depth": 3}]
    assert event["task"] == task("seen")
    assert event["at"] == ENDPOINT["base_url"]


def test_events_are_heard_long_texts_cut_and_what_is_no_json_as_text(program: Program, tmp_path: Path) -> None:
    tool, other, end = run(rollouts(program, tmp_path / "log", "told"))
    assert {name: tool[name] for name in ("kind", "name", "arguments")} == {"kind": "tool", "name": "add",
                                                                           "arguments": {"a": 1}}  # fmt: skip
    assert len(tool["result"]) < 30_000
    assert (other["kind"], other["value"]) == ("set", "{1, 2}")
    assert end["reward"] == {"score": 1.0}


def test_a_function_that_is_not_async_runs_in_a_thread_for_each_rollout(program: Program, tmp_path: Path) -> None:
    blocking = Program(program.file, program.source, "blocking", {}, None)
    said = run(rollouts(blocking, tmp_path / "log", *["any"] * 40))
    assert sorted(message["reward"]["score"] for message in said) == list(range(40))


def test_a_rollout_that_is_cancelled_ends_at_once_and_alone(program: Program, tmp_path: Path) -> None:
    async def work() -> list[dict[str, Any]]:
        async with started(program, tmp_path / "log") as (process, messages):
            await anext(messages)
            for number in range(2):
                process.send({"begin": number, "task": task("waits"), "endpoint": ENDPOINT})
            process.send({"cancel": 1})
            process.send({"cancel": 17})
            process.send({"begin": 2, "task": task("number"), "endpoint": ENDPOINT})
            return [await anext(messages), await anext(messages)]

    assert sorted((message["end"], bool(message["error"])) for message in run(work())) == [(1, True), (2, False)]


@pytest.mark.parametrize("how", ["ends", "dies", "its driver ends"])
def test_nothing_that_a_process_has_started_outlives_it(how: str, program: Program, tmp_path: Path) -> None:
    async def work() -> tuple[int, str]:
        process = await AgentProcess.start(program, tmp_path / "log")
        messages = process.messages()
        await anext(messages)
        process.send({"begin": 0, "task": task("starts"), "endpoint": ENDPOINT})
        child = (await anext(messages))["pid"]
        if how == "dies":
            process.send({"begin": 1, "task": task("dies"), "endpoint": ENDPOINT})
            assert [message async for message in messages] == []
        elif how == "its driver ends":
            process._writer.close()
            await asyncio.to_thread(process._process.keeper.wait, SECONDS)
        return child, await process.end()

    child, how_it_ended = run(work())
    wait_until(lambda: not psutil.pid_exists(child), "the end of what it started", SECONDS)
    assert "SIGKILL" in how_it_ended or how == "its driver ends"


@pytest.mark.parametrize(
    ("function", "source", "arguments", "said"),
    [
        ("rollout", "import nowhere", {}, "ModuleNotFoundError"),
        ("other", "", {}, "other"),
        ("rollout", "rollout = 3", {}, "no function"),
        ("rollout", "async def rollout(task): ...", {}, "too many positional"),
        ("rollout", "async def rollout(task, endpoint): ...", {"depth": 1}, "depth"),
        ("rollout", "raise SystemExit", {}, "SystemExit"),
    ],
)
def test_a_function_that_cannot_be_called_is_said_at_the_start(
    function: str, source: str, arguments: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    async def work() -> dict[str, Any]:
        program = Program(str(tmp_path / "agent.py"), source, function, arguments, None)
        async with started(program, tmp_path / "log") as (_, messages):
            return await anext(messages)

    assert said in run(work())["failed"]


PREPARES = """
import asyncio
prepared = []

async def prepare(*, depth):
    await asyncio.sleep(0)
    prepared.append(10 // depth)

async def rollout(task, endpoint, *, depth):
    return prepared[0]
"""


def test_a_file_may_prepare_before_its_process_is_ready_and_a_failure_is_said(tmp_path: Path) -> None:
    async def work(depth: int) -> list[dict[str, Any]]:
        program = Program(str(tmp_path / "agent.py"), PREPARES, "rollout", {"depth": depth}, None)
        async with started(program, tmp_path / "log") as (process, messages):
            first = [await anext(messages), await anext(messages)]
            process.send({"begin": "key", "task": task("any"), "endpoint": ENDPOINT})
            return first + ([await anext(messages)] if depth else [])

    loaded, ready, end = run(work(5))
    assert (loaded, ready) == ({"loaded": True}, {"ready": True})
    assert end["reward"] == {"score": 2.0}
    assert "ZeroDivisionError" in run(work(0))[1]["failed"]


def test_the_runner_needs_the_standard_library_alone(program: Program, tmp_path: Path) -> None:
    """An interpreter without site-packages stands for one of another environment."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    python.chmod(0o755)
    foreign = Program(program.file, program.source, "rollout", {}, str(python))
    (said,) = run(rollouts(foreign, tmp_path / "log", "number"))
    assert said["reward"] == {"score": 0.5}
