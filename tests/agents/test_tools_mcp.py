"""MCP servers as tools: real servers in processes of their own, on pipes and over HTTP."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megagrpo.agents.tools.load import offered, provider
from megagrpo.agents.tools.tool import Called, answer
from megagrpo.errors import AgentError
from megagrpo.processes.ports import free_port
from megagrpo.recipe.schema.agent import ToolConfig

pytest.importorskip("mcp")
SERVER = shlex.join([sys.executable, str(Path(__file__).with_name("mcp_server.py"))])
Call = Callable[[str, Any], Awaitable[Called]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port("127.0.0.1")
    process = subprocess.Popen([*shlex.split(SERVER), str(port)], start_new_session=True)
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket() as trial:
            trial.settimeout(0.1)
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise AssertionError("the server ended")


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> str:
    return SERVER if request.param == "stdio" else str(request.getfixturevalue("url"))


def with_server(config: ToolConfig, use: Callable[[Any, Call], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        made: Any = provider(config, "agent.tools.0")
        try:
            async with made.session(None) as session:
                tools = {tool.name: tool for tool in session.tools}
                return await use(made, lambda name, arguments: answer(tools[name], arguments))
        finally:
            await made.shared.close()

    return asyncio.run(run())


def test_a_servers_tools_are_told_and_called_at_the_same_time(server: str) -> None:
    async def use(made: Any, call: Call) -> None:
        async with made.session(None) as session:
            told = {tool.name: tool.schema["function"] for tool in session.tools}
        assert set(told) >= {"add", "count", "wait", "fail"}
        assert told["add"]["description"] == "Adds two numbers."
        assert told["add"]["parameters"]["properties"]["a"]["type"] == "integer"
        slow = asyncio.create_task(call("wait", {"seconds": 30}))
        results = await asyncio.gather(*(call("add", {"a": number, "b": 1}) for number in range(20)))
        assert [result.text for result in results] == [str(number + 1) for number in range(20)]
        assert not slow.done()
        slow.cancel()
        failed = await call("fail", {"text": "no such thing"})
        assert "no such thing" in failed.text
        assert failed.error
        assert (await call("add", {"a": "x"})).error

    with_server(ToolConfig(name="server", mcp=server), use)


def test_a_late_call_is_told_and_the_server_goes_on(server: str) -> None:
    async def use(_: Any, call: Call) -> None:
        assert "longer" in (await call("wait", {"seconds": 60})).error
        assert (await call("add", {"a": 1, "b": 2})).text == "3"

    with_server(ToolConfig(name="server", mcp=server, timeout_seconds=2), use)


def test_a_server_that_ends_is_told_and_started_again() -> None:
    async def use(_: Any, call: Call) -> None:
        assert [(await call("count", {})).text for _ in range(2)] == ["1", "2"]
        assert (await call("leave", {})).error
        assert (await call("count", {})).text == "1"

    with_server(ToolConfig(name="server", mcp=SERVER), use)


@pytest.mark.parametrize(("stateful", "counts"), [(False, ["1", "2", "3"]), (True, ["1", "1", "2"])])
def test_rollouts_share_a_server_unless_each_has_its_own(stateful: bool, counts: list[str]) -> None:
    async def use(made: Any, call: Call) -> list[str]:
        async with made.session(None) as other:
            others = {tool.name: tool for tool in other.tools}
            first = [(await call("count", {})).text, (await answer(others["count"], {})).text]
        return [*first, (await call("count", {})).text]

    assert with_server(ToolConfig(name="server", mcp=SERVER, stateful=stateful), use) == counts


def test_some_tools_of_a_server_are_offered_with_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TESTS", "open sesame")
    arguments = {"tools": ["variable"], "env": {"KEY": "Bearer $SECRET_OF_TESTS"}}

    async def use(made: Any, call: Call) -> str:
        async with made.session(None) as session:
            assert [tool.name for tool in session.tools] == ["look_up"]
        return (await call("look_up", {"name": "KEY"})).text

    config = ToolConfig(name="server", mcp=SERVER, arguments=arguments, call_name="look_up")
    assert with_server(config, use) == "Bearer open sesame"


@pytest.mark.parametrize(
    ("server", "arguments"),
    [
        ("python -c pass", {}),
        ("no-such-program-anywhere", {}),
        ("http://127.0.0.1:9/mcp", {}),
        (SERVER, {"tools": ["no such tool"]}),
    ],
)
def test_a_server_that_cannot_serve_is_found_when_it_is_loaded(server: str, arguments: dict[str, Any]) -> None:
    async def use(_: Any, call: Call) -> None:
        raise AssertionError("it has no tools")

    with pytest.raises(AgentError):
        with_server(ToolConfig(name="server", mcp=server, arguments=arguments), use)


def test_what_a_server_says_last_is_in_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.py").write_text("raise ImportError('no trains here')\n")
    config = ToolConfig(name="server", mcp=shlex.join([sys.executable, str(tmp_path / "server.py")]))
    with pytest.raises(AgentError) as raised:
        asyncio.run(offered(config, "agent.tools.0", os.environ))
    assert raised.value.problems[0].given.splitlines()[-1].endswith("no trains here")
    assert "no trains here" in capsys.readouterr().err  # and in the agents' log
