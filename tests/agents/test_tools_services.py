"""The services of examples/agents/web.py as tools, against a server that answers in their formats."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megagrpo.agents.tools.load import loaded, provider
from megagrpo.agents.tools.tool import Called, answer
from megagrpo.errors import RecipeError
from megagrpo.recipe.schema.agent import ToolConfig
from megagrpo.user_functions import load_function

WEB = Path(__file__).parents[2] / "examples" / "agents" / "web.py"
SERVICES = sys.modules[load_function(f"{WEB}:Service", "agent.tools.0", RecipeError).__module__]
ANSWERS: dict[str, Any] = {
    "/graph/v1/snippet/search": {"data": [{"snippet": {"text": "attention"}}, {"snippet": {}}]},
    "/search": {
        "organic": [{"title": "T", "snippet": "S", "link": "L"}, {"title": "no snippet"}],
        "answerBox": {"answer": "42"},
    },
    "/massive": {"results": {"passages": [["one", "two", "three"]]}},
    "/crawl": {"results": [{"success": True, "markdown": {"raw_markdown": "raw"}, "metadata": {"title": "P"}}]},
}
Ask = Callable[[web.Request], Awaitable[web.StreamResponse]]


def call(name: str, server: Ask, argument: str, path: str = "", **more: Any) -> Called:
    """Returns the tool's answer; its service is a server that answers by `server`."""

    async def run() -> Called:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
            made = provider(ToolConfig(name=f"{WEB}:{name}", arguments={"url": url, **more}), "agent.tools.0")
            async with made.session(None) as session:
                (tool,) = session.tools
                (parameter,) = tool.parameters["required"]
                return await answer(tool, {parameter: argument})
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def public(request: web.Request) -> web.StreamResponse:
    path = request.path
    if path.startswith("/http"):  # jina: the page is in the path
        assert request.headers["Authorization"] == "Bearer key of tests"
        return web.json_response({"code": 200, "data": {"title": "Page", "content": request.path}})
    if path == "/graph/v1/snippet/search":
        assert request.headers["x-api-key"] == "key of tests"
        assert request.query["query"] == "a query & more"
    else:
        body = await request.json()
        assert "a query & more" in (body.get("q"), body.get("query"), *body.get("urls", []))
    return web.json_response(ANSWERS[path])


@pytest.mark.parametrize(
    ("name", "path", "argument", "expected"),
    [
        ("SemanticScholar", "", "a query & more", "attention"),
        ("Serper", "", "a query & more", "**Direct Answer:** 42\n\n**T**\nS\nSource: L"),
        ("MassiveDs", "/massive", "a query & more", "one\n\ntwo"),
        ("Crawl4ai", "", "a query & more", "# P\n\nraw"),
        ("Jina", "", "http://a.b/c", "# Page\n\n/http://a.b/c"),
    ],
)
def test_a_service_is_asked_in_its_way_and_its_answer_is_text(
    name: str, path: str, argument: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key := getattr(SERVICES, name).KEY:
        monkeypatch.setenv(key, "key of tests")
    said = call(name, public, argument, path, results=2)
    assert (said.text, said.error) == (expected, "")
    assert call(name, public, "  ", path).error


def test_a_busy_service_is_asked_again_and_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVICES, "WAIT_SECONDS", 0.01)
    asked: Counter[str] = Counter()

    async def busy(request: web.Request) -> web.StreamResponse:
        asked["busy"] += 1
        if asked["busy"] < 3:
            return web.Response(status=503)
        return web.json_response({"organic": []})

    async def refuses(request: web.Request) -> web.StreamResponse:
        asked["refuses"] += 1
        return web.json_response({"message": "no such key"}, status=403)

    assert call("Serper", busy, "q").text == "Nothing was found."
    refused = call("Serper", refuses, "q")
    assert "no such key" in refused.text
    assert asked == {"busy": 3, "refuses": 1}


@pytest.mark.parametrize("body", ["{", "[]", "3", json.dumps({"results": {"passages": []}}), "null"])
def test_an_answer_that_cannot_be_read_is_told(body: str) -> None:
    async def wrong(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, content_type="application/json")

    assert call("MassiveDs", wrong, "q").error


def test_a_service_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVICES, "WAIT_SECONDS", 0.01)

    async def ends(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    assert "reached" in call("MassiveDs", ends, "q").error


def test_a_service_without_its_key_or_url_ends_the_process_before_its_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="SERPER_API_KEY"):
        asyncio.run(loaded([f"{WEB}:Serper"]))
    monkeypatch.setenv("SERPER_API_KEY", "key")
    assert asyncio.run(loaded([f"{WEB}:Serper"]))
    with pytest.raises(ValueError, match="url of a server"):
        asyncio.run(loaded([{"name": f"{WEB}:Jina", "arguments": {"url": "localhost"}}]))
