"""The tool `search`: a local corpus, by words (BM25) or by the nearness of embeddings (a dense index)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megagrpo.agents.tools.corpus import Passages, Source, indexed
from megagrpo.agents.tools.off_loop import in_thread
from megagrpo.agents.tools.tool import Arguments, CallError, Session, Tool, tool_of
from megagrpo.errors import MachineError, Problem
from megagrpo.recipe.schema.tools import SearchArguments, ToolConfig

log = logging.getLogger(__name__)
DESCRIPTION = "Searches a collection of documents and returns the passages that fit the query best."
PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "The search query."}},
    "required": ["query"],
}
WORD = r"(?u)\b\w+\b"


class Index(Protocol):
    """An index whose `find` returns the numbers of passages, best first."""

    def find(self, query: str, results: int) -> Sequence[int]: ...


class Search:
    """The provider: all rollouts have the same tool."""

    def __init__(self, tool: Tool) -> None:
        self._session = Session([tool])

    def session(self, task: Any) -> AbstractAsyncContextManager[Session]:
        return nullcontext(self._session)


async def search_tool(config: ToolConfig, arguments: SearchArguments) -> Search:
    """Makes the tool over a file of passages; its index is made if it is not there. Raises DataError, MachineError,
    ModelError."""
    start = time.monotonic()
    made: Index
    if arguments.kind == "bm25":
        made, passages = await in_thread(lambda: bm25_index(arguments))
    else:
        from megagrpo.agents.tools.dense import dense_index  # imports torch and transformers, which takes seconds

        made, passages = await in_thread(lambda: dense_index(arguments))
    seconds = time.monotonic() - start
    log.warning("search: %d passages of %s (%s) after %.1f s", len(passages), arguments.corpus, arguments.kind, seconds)

    async def call(given: Arguments) -> str:
        query = given.get("query")
        if not isinstance(query, str) or not query.strip():
            raise CallError('give a query: {"query": "..."}')
        return await in_thread(lambda: shown(passages[number] for number in made.find(query, arguments.results)))

    return Search(described(config, call))


def described(config: ToolConfig, call: Callable[[Arguments], Awaitable[str]]) -> Tool:
    """Returns the tool as the policy sees it; `call` answers its calls."""
    return tool_of(config, asyncio.Semaphore(config.calls_at_once), "search", DESCRIPTION, PARAMETERS, call)


def source_of(arguments: SearchArguments) -> Source:
    return Source(Path(arguments.corpus), arguments.text, arguments.title, arguments.id)


def index_directory(arguments: SearchArguments) -> Path:
    return Path(arguments.index or f"{arguments.corpus}.{arguments.kind}.index")


def shown(passages: Iterable[Mapping[str, str]]) -> str:
    """Returns the text of passages for the policy."""
    texts = (f"{passage['title']}\n{passage['text']}".lstrip("\n") for passage in passages)
    return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1)) or "Nothing was found."


class Bm25:
    """Lucene's BM25, by bm25s (https://arxiv.org/abs/2407.03618). Words are runs of letters and digits, lower
    case, without English stop words unless `stopwords` is false."""

    def __init__(self, directory: Path, stopwords: bool) -> None:
        import bm25s

        self._scores = bm25s.BM25.load(directory / "bm25", mmap=True)
        self._stopwords = stopwords

    def find(self, query: str, results: int) -> list[int]:
        words = _tokens([query], self._stopwords)[0]
        known = [word for word in words if word in self._scores.vocab_dict]
        if not known:
            return []
        count = min(results, self._scores.scores["num_docs"])
        numbers, scores = self._scores.retrieve([known], k=count, show_progress=False)
        return [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]


def bm25_index(arguments: SearchArguments) -> tuple[Bm25, Passages]:
    """Returns the index of the corpus, made if it is not there. Raises DataError, and MachineError without bm25s."""
    if find_spec("bm25s") is None:
        fix = "pip install megagrpo[search]"
        raise MachineError(Problem("agent.tools, search", "bm25s is not installed", "bm25s 0.3", fix))

    def build(made: Path, passages: Passages) -> None:
        import bm25s

        scores = bm25s.BM25(k1=arguments.k1, b=arguments.b)
        words = _tokens([f"{passage['title']}\n{passage['text']}" for passage in passages], arguments.stopwords)
        # A corpus without any word has no scores to make.
        scores.index(words if any(words) else [["", ""]] * max(1, len(words)), show_progress=False)
        scores.save(made / "bm25")

    settings = {"kind": "bm25", "k1": arguments.k1, "b": arguments.b, "stopwords": arguments.stopwords}
    found = indexed(index_directory(arguments), source_of(arguments), settings, build)
    return Bm25(found, arguments.stopwords), Passages(found)


def _tokens(texts: list[str], stopwords: bool) -> list[list[str]]:
    import bm25s

    words = bm25s.tokenize(
        texts, token_pattern=WORD, stopwords="en" if stopwords else None, return_ids=False, show_progress=False
    )
    return list(words)


def best(scores: np.ndarray[Any, Any], results: int) -> list[int]:
    """Returns the indices of the highest scores, best first; of equal scores, the lowest index first."""
    count = min(results, len(scores))
    if count == 0:
        return []
    # All that reach the lowest score that is taken, so that equal ones are not left to chance.
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    among = np.flatnonzero(scores >= least)
    return [int(number) for number in among[np.argsort(-scores[among], kind="stable")][:count]]
