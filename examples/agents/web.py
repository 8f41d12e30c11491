"""Tools of one's own that ask a service over HTTP: open-instruct's, by the same names.

    agent:
      tools:
        - {name: examples/agents/web.py:Serper, arguments: {results: 5}, calls_at_once: 8}
      environment: [SERPER_API_KEY]

A key is read from the environment, so agent.environment names it. `url` is another server with the same interface.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

import aiohttp

TRIES_MAX = 3
WAIT_SECONDS = 0.5
"""Wait before the second try, and twice as long before the third."""
BUSY = (429, 500, 502, 503, 504)
ANSWER_BYTES_MAX = 64 << 20


class ServiceError(Exception):
    """A request that got no answer. The policy reads the text."""


class Service:
    """A service: its key's environment variable, empty if it needs none, and its public server, empty if there is none.

    `results` is the number of results of a search.
    """

    KEY = ""
    URL = ""

    def __init__(self, url: str = "", results: int = 5) -> None:
        self._url, self._results = (url or self.URL).rstrip("/"), results
        self._key = os.environ.get(self.KEY, "")
        if results < 1:
            raise ValueError(f"{type(self).__name__}: results is {results}, and at least 1 is needed")
        if not self._url.startswith(("http://", "https://")):
            raise ValueError(f"{type(self).__name__}: give the url of a server, http:// or https://")
        if self.KEY and not self._key and not url:
            raise ValueError(f"{self.KEY} is not set, or agent.environment does not name it")

    @classmethod
    def prepare(cls, **arguments: Any) -> None:
        """Ends the run before any rollout if a key or a URL is missing."""
        cls(**arguments)

    def _read(self, answer: Any) -> str:
        """Returns the text for the policy; empty if nothing was found."""
        raise NotImplementedError

    async def _asked(
        self,
        path: str = "",
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Asks the server, by POST if there is a body, and reads its answer. Raises ServiceError."""
        answer = await answer_of(self._url + path, body, query, headers)
        try:
            return self._read(answer) or "Nothing was found."
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ServiceError("the service's answer cannot be read") from None


async def answer_of(
    url: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None, headers: Mapping[str, str] | None
) -> Any:
    """Returns the JSON of an answer. Retries busy servers and lost connections. Raises ServiceError."""
    method, failure = "GET" if body is None else "POST", ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        for number in range(TRIES_MAX):
            if number:
                await asyncio.sleep(WAIT_SECONDS * 2 ** (number - 1))
            try:
                async with client.request(method, url, params=query, json=body, headers=headers) as response:
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
                raise ServiceError("the service's answer is no JSON") from None
    raise ServiceError(failure)


def given(text: str) -> str:
    """Returns the policy's argument without blanks around it. Raises ValueError if nothing is left."""
    if not text.strip():
        raise ValueError("the argument is empty")
    return text.strip()


class SemanticScholar(Service):
    """Snippets of papers, by Semantic Scholar."""

    KEY, URL = "S2_API_KEY", "https://api.semanticscholar.org"

    async def s2_search(self, query: str) -> str:
        """Searches Semantic Scholar for snippets of academic papers.

        Args:
            query: The search query.
        """
        asked = {"query": given(query), "limit": str(self._results)}
        return await self._asked("/graph/v1/snippet/search", query=asked, headers={"x-api-key": self._key})

    def _read(self, answer: Any) -> str:
        snippets = [item.get("snippet", {}).get("text") for item in answer["data"]]
        return "\n".join(snippet for snippet in snippets if snippet)


class Serper(Service):
    """Google's results, by Serper."""

    KEY, URL = "SERPER_API_KEY", "https://google.serper.dev"

    async def serper_search(self, query: str) -> str:
        """Searches the web with Google.

        Args:
            query: The search query.
        """
        body = {"q": given(query), "num": self._results}
        return await self._asked("/search", body, headers={"X-API-KEY": self._key})

    def _read(self, answer: Any) -> str:
        found = [
            f"**{item.get('title', '')}**\n{item['snippet']}\nSource: {item.get('link', '')}"
            for item in answer.get("organic", [])[: self._results]
            if item.get("snippet")
        ]
        box = answer.get("answerBox", {})
        if "answer" in box:
            found.insert(0, f"**Direct Answer:** {box['answer']}")
        elif "snippet" in box:
            found.insert(0, f"**Featured Snippet:** {box['snippet']}")
        return "\n\n".join(found)


class OwnServer(Service):
    """A service without a public server, so that `url` has to be given."""

    def __init__(self, url: str, results: int = 5) -> None:
        super().__init__(url, results)


class MassiveDs(OwnServer):
    """Passages of a retrieval server, as MassiveDS has it."""

    async def massive_ds(self, query: str) -> str:
        """Searches a collection of documents.

        Args:
            query: The search query.
        """
        body = {"query": given(query), "n_docs": self._results, "domains": "dpr_wiki_contriever"}
        return await self._asked(body=body)

    def _read(self, answer: Any) -> str:
        passages = answer["results"]["passages"][0][: self._results]
        return "\n\n".join(str(passage["text"] if isinstance(passage, dict) else passage) for passage in passages)


class Jina(Service):
    """Web pages as Markdown, by Jina's reader."""

    KEY, URL = "JINA_API_KEY", "https://r.jina.ai"

    async def jina_browse(self, url: str) -> str:
        """Reads a web page as Markdown.

        Args:
            url: The URL of the page.
        """
        headers = {
            "Accept": "application/json",
            "Authorization": f"Bearer {self._key}",
            "X-Return-Format": "markdown",
        }
        return await self._asked(f"/{urllib.parse.quote(given(url), safe=':/')}", headers=headers)

    def _read(self, answer: Any) -> str:
        if answer.get("code") != 200:
            raise ServiceError(f"the page cannot be read: {answer.get('message', 'unknown error')}")
        return page(answer["data"].get("title"), answer["data"].get("content"))


class Crawl4ai(OwnServer):
    """Web pages as Markdown, by a server of Crawl4AI."""

    KEY = "CRAWL4AI_API_KEY"

    async def crawl4ai_browse(self, url: str) -> str:
        """Reads a web page as Markdown.

        Args:
            url: The URL of the page.
        """
        crawler = {
            "cache_mode": "enabled", "word_count_threshold": 10, "exclude_social_media_links": True,
            "excluded_tags": ["form", "header", "footer", "nav"], "exclude_external_links": True,
        }  # fmt: skip
        body = {
            "urls": [given(url)],
            "browser_config": {"type": "BrowserConfig", "params": {"headless": True}},
            "crawler_config": {"type": "CrawlerRunConfig", "params": crawler},
        }
        return await self._asked("/crawl", body, headers={"x-api-key": self._key})

    def _read(self, answer: Any) -> str:
        found = (answer.get("results") or [{"error_message": answer.get("error") or "no result"}])[0]
        if not found.get("success"):
            reason = found.get("error_message") or found.get("error") or "unknown error"
            raise ServiceError(f"the page cannot be read: {reason}")
        text = found.get("markdown") or ""
        if isinstance(text, dict):
            text = text.get("fit_markdown") or text.get("raw_markdown") or ""
        return page((found.get("metadata") or {}).get("title"), text)


def page(title: str | None, content: str | None) -> str:
    """Returns a web page as Markdown, under its title."""
    return f"# {title}\n\n{content}" if title and content else content or ""
