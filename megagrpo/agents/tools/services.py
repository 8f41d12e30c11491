"""open-instruct's tools that ask a service over HTTP, by the same names. Each needs that service, and mostly a key.

`url` of a tool's arguments names another server with the same interface. Nothing is asked before the policy calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from megagrpo.agents.tools.tool import Arguments, CallError, Session, tool_of
from megagrpo.recipe.schema.tools import ServiceArguments, ToolConfig

TRIES_MAX = 3
WAIT_SECONDS = 0.5
"""Wait before the second try, and twice as long before the third."""
BUSY = (429, 500, 502, 503, 504)
ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Asked:
    """One HTTP request."""

    url: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    """JSON to POST; None for GET."""


@dataclass(frozen=True)
class Service:
    """A service: how to ask it and read its answer. `results` is the number of results to ask for."""

    description: str
    parameter: str
    meaning: str
    key: str
    """The environment variable that has the key; empty if it needs none."""
    asked: Callable[[str, str, str, int], Asked]
    """Called with the server's URL, the argument, the key, and `results`."""
    read: Callable[[Any, int], str]
    """The text for the policy; empty if nothing was found. Raises CallError, KeyError or TypeError."""
    url: str = ""
    """The public server; empty if there is none, and `url` has to be given."""


class ServiceTool:
    """A service's tool."""

    def __init__(self, config: ToolConfig, arguments: ServiceArguments) -> None:
        self.config = config
        self.service = SERVICES[config.name]
        self.url = (arguments.url or self.service.url).rstrip("/")
        self.results = arguments.results
        self.gate = asyncio.Semaphore(config.calls_at_once)
        meaning = {"type": "string", "description": self.service.meaning}
        name = self.service.parameter
        self.parameters = {"type": "object", "properties": {name: meaning}, "required": [name]}

    @asynccontextmanager
    async def session(self, task: Any) -> AsyncIterator[Session]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:

            async def call(given: Arguments) -> str:
                text = given.get(self.service.parameter)
                if not isinstance(text, str) or not text.strip():
                    raise CallError(f"give {self.service.parameter}, a text")
                asked = self.service.asked(self.url, text.strip(), os.environ.get(self.service.key, ""), self.results)
                return self._read(await answer_of(client, asked))

            service = self.service
            yield Session(
                [tool_of(self.config, self.gate, self.config.name, service.description, self.parameters, call)]
            )

    def _read(self, answer: Any) -> str:
        try:
            return self.service.read(answer, self.results) or "Nothing was found."
        except (KeyError, IndexError, TypeError, AttributeError):
            raise CallError("the service's answer cannot be read") from None


async def answer_of(client: aiohttp.ClientSession, asked: Asked) -> Any:
    """Returns the JSON of an answer. Retries busy servers and lost connections. Raises CallError."""
    failure = ""
    for number in range(TRIES_MAX):
        if number:
            await asyncio.sleep(WAIT_SECONDS * 2 ** (number - 1))
        method = "GET" if asked.body is None else "POST"
        try:
            async with client.request(
                method, asked.url, params=asked.query or None, json=asked.body, headers=asked.headers
            ) as response:
                data = await response.content.read(ANSWER_BYTES_MAX)
                while not response.content.at_eof() and len(data) < ANSWER_BYTES_MAX:
                    data += await response.content.read(ANSWER_BYTES_MAX - len(data))
                if response.status < 400:
                    return json.loads(data)
                failure = f"the service answered {response.status} {data[:200].decode(errors='replace')}".rstrip()
                if response.status not in BUSY:
                    break
        except aiohttp.ClientError as error:
            failure = f"the service cannot be reached: {type(error).__name__} {error}".rstrip()
        except ValueError:
            raise CallError("the service's answer is no JSON") from None
    raise CallError(failure)


# --- the services -----------------------------------------------------------------------------------------------------


def _s2(url: str, query: str, key: str, results: int) -> Asked:
    headers = {"x-api-key": key}
    return Asked(f"{url}/graph/v1/snippet/search", {"query": query, "limit": str(results)}, headers)


def _s2_read(answer: Any, results: int) -> str:
    snippets = [item.get("snippet", {}).get("text") for item in answer["data"]]
    return "\n".join(snippet for snippet in snippets if snippet)


def _serper(url: str, query: str, key: str, results: int) -> Asked:
    return Asked(f"{url}/search", headers={"X-API-KEY": key}, body={"q": query, "num": results})


def _serper_read(answer: Any, results: int) -> str:
    found = [
        f"**{item.get('title', '')}**\n{item['snippet']}\nSource: {item.get('link', '')}"
        for item in answer.get("organic", [])[:results]
        if item.get("snippet")
    ]
    box = answer.get("answerBox", {})
    if "answer" in box:
        found.insert(0, f"**Direct Answer:** {box['answer']}")
    elif "snippet" in box:
        found.insert(0, f"**Featured Snippet:** {box['snippet']}")
    return "\n\n".join(found)


def _jina(url: str, page: str, key: str, results: int) -> Asked:
    headers = {"Accept": "application/json", "Authorization": f"Bearer {key}", "X-Return-Format": "markdown"}
    return Asked(f"{url}/{urllib.parse.quote(page, safe=':/')}", headers=headers)


def _jina_read(answer: Any, results: int) -> str:
    if answer.get("code") != 200:
        raise CallError(f"the page cannot be read: {answer.get('message', 'unknown error')}")
    return _page(answer["data"].get("title"), answer["data"].get("content"))


def _crawl4ai(url: str, page: str, key: str, results: int) -> Asked:
    crawler = {
        "cache_mode": "enabled", "word_count_threshold": 10, "exclude_social_media_links": True,
        "excluded_tags": ["form", "header", "footer", "nav"], "exclude_external_links": True,
    }  # fmt: skip
    body = {
        "urls": [page],
        "browser_config": {"type": "BrowserConfig", "params": {"headless": True}},
        "crawler_config": {"type": "CrawlerRunConfig", "params": crawler},
    }
    return Asked(f"{url}/crawl", headers={"x-api-key": key}, body=body)


def _crawl4ai_read(answer: Any, results: int) -> str:
    page = (answer.get("results") or [{"error_message": answer.get("error") or "no result"}])[0]
    if not page.get("success"):
        raise CallError(f"the page cannot be read: {page.get('error_message') or page.get('error') or 'unknown error'}")
    text = page.get("markdown") or ""
    if isinstance(text, dict):
        text = text.get("fit_markdown") or text.get("raw_markdown") or ""
    return _page((page.get("metadata") or {}).get("title"), text)


def _page(title: str | None, content: str | None) -> str:
    return f"# {title}\n\n{content}" if title and content else content or ""


def _massive(url: str, query: str, key: str, results: int) -> Asked:
    return Asked(url, body={"query": query, "n_docs": results, "domains": "dpr_wiki_contriever"})


def _massive_read(answer: Any, results: int) -> str:
    passages = answer["results"]["passages"][0][:results]
    return "\n\n".join(str(passage["text"] if isinstance(passage, dict) else passage) for passage in passages)


QUERY, PAGE = "The search query.", "The URL of the page."
SERVICES: Mapping[str, Service] = {
    "s2_search": Service(
        "Searches Semantic Scholar for snippets of academic papers.", "query", QUERY, "S2_API_KEY",
        _s2, _s2_read, "https://api.semanticscholar.org",
    ),
    "serper_search": Service(
        "Searches the web with Google.", "query", QUERY, "SERPER_API_KEY",
        _serper, _serper_read, "https://google.serper.dev",
    ),
    "massive_ds": Service(
        "Searches a collection of documents.", "query", QUERY, "", _massive, _massive_read,
    ),
    "jina_browse": Service(
        "Reads a web page as Markdown.", "url", PAGE, "JINA_API_KEY", _jina, _jina_read, "https://r.jina.ai",
    ),
    "crawl4ai_browse": Service(
        "Reads a web page as Markdown.", "url", PAGE, "CRAWL4AI_API_KEY", _crawl4ai, _crawl4ai_read,
    ),
}  # fmt: skip
"""Services by their names in open-instruct's --tools; massive_ds by that of its module."""
