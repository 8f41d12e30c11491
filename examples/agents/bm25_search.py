"""A search tool of one's own: the passages of a corpus that have a query's words, by BM25 (megagrpo[search]).

    agent:
      tools:
        - {name: examples/agents/bm25_search.py:Search, arguments: {corpus: data/wiki.jsonl, results: 5}}

The index is made when agent processes start, and kept. It is memory-mapped, so that processes share its memory.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

from corpus import Corpus, CorpusSearch, Passages, indexed, whole

WORD = r"(?u)\b\w+\b"
_opening = threading.Lock()


class Search(CorpusSearch):
    """The tool: Lucene's BM25, by bm25s (https://arxiv.org/abs/2407.03618).

    Words are runs of letters and digits, lower case, without English stop words unless `stopwords` is false. `text`,
    `title` and `id` name columns of the corpus; `index` is a directory, CORPUS.bm25.index if it is not given.
    """

    def __init__(
        self,
        corpus: str,
        results: int = 3,
        index: str | None = None,
        text: str = "",
        title: str = "",
        id: str = "",
        k1: float = 1.5,
        b: float = 0.75,
        stopwords: bool = True,
    ) -> None:
        if results < 1:
            raise ValueError(f"results is {results}: at least 1 is needed")
        directory = Path(index or f"{corpus}.bm25.index")
        with _opening:
            self._scores, self._passages = _opened(directory, Corpus(Path(corpus), text, title, id), k1, b, stopwords)
        self._results, self._stopwords = results, stopwords

    def _found(self, query: str) -> list[int]:
        known = [word for word in _words([query], self._stopwords)[0] if word in self._scores.vocab_dict]
        if not known:
            return []
        count = min(self._results, self._scores.scores["num_docs"])
        numbers, scores = self._scores.retrieve([known], k=count, show_progress=False)
        return [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]


@cache
def _opened(directory: Path, corpus: Corpus, k1: float, b: float, stopwords: bool) -> tuple[Any, Passages]:
    """Returns the index of the corpus, made if it is not there."""
    try:
        import bm25s
    except ImportError:
        raise ValueError("bm25s is not installed: pip install megagrpo[search]") from None

    def build(made: Path, passages: Passages) -> None:
        scores = bm25s.BM25(k1=k1, b=b)
        words = _words([whole(passage) for passage in passages], stopwords)
        # A corpus without any word has no scores to make.
        scores.index(words if any(words) else [["", ""]] * max(1, len(words)), show_progress=False)
        scores.save(made / "bm25")

    found = indexed(directory, corpus, {"kind": "bm25", "k1": k1, "b": b, "stopwords": stopwords}, build)
    return bm25s.BM25.load(found / "bm25", mmap=True), Passages(found)


def _words(texts: list[str], stopwords: bool) -> list[list[str]]:
    import bm25s

    removed = "en" if stopwords else None
    words = bm25s.tokenize(texts, token_pattern=WORD, stopwords=removed, return_ids=False, show_progress=False)
    return list(words)
