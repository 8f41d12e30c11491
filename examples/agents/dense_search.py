"""A search tool of one's own: the passages of a corpus whose embedding is nearest to the query's.

    agent:
      tools:
        - {name: examples/agents/dense_search.py:Search, arguments: {corpus: data/wiki.jsonl, encoder: models/e5}}

An encoder of transformers turns passages and queries into vectors. A query is compared with all passages: some 1.5 s
for a million passages of 384 dimensions on one core. The index is made when agent processes start, and kept: float16
vectors, 2 bytes a dimension and passage, memory-mapped, so that processes share their memory. The file imports torch,
in the driver as well, which reads it for the tools' schemas.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from corpus import Corpus, CorpusSearch, Passages, indexed, whole

log = logging.getLogger(__name__)
Array = np.ndarray[Any, np.dtype[np.float32]]
PASSAGES_AT_ONCE = 64
QUERIES_AT_ONCE = 64
ROWS_AT_ONCE = 262_144
"""Passages that queries are compared with at once: 1 GB of float32 at 1,024 dimensions."""
_opening = threading.Lock()


class Search(CorpusSearch):
    """The tool. `encoder` is the directory of a model that transformers can load.

    `query_prefix` and `passage_prefix` are what the encoder was trained to see before texts, such as "query: " and
    "passage: " of E5 (https://arxiv.org/abs/2212.03533). `text`, `title` and `id` name columns of the corpus; `index`
    is a directory, CORPUS.dense.index if it is not given.
    """

    def __init__(
        self,
        corpus: str,
        encoder: str,
        results: int = 3,
        index: str | None = None,
        text: str = "",
        title: str = "",
        id: str = "",
        pooling: Literal["mean", "cls", "last"] = "mean",
        query_prefix: str = "",
        passage_prefix: str = "",
        tokens_max: int = 512,
        device: str = "cpu",
    ) -> None:
        if results < 1 or pooling not in ("mean", "cls", "last"):
            raise ValueError(f"results is {results}, pooling {pooling}: at least 1 and mean, cls or last are needed")
        directory = Path(index or f"{corpus}.dense.index")
        settings = Encoding(encoder, pooling, tokens_max, device, passage_prefix)
        with _opening:
            self._index, self._passages = _opened(directory, Corpus(Path(corpus), text, title, id), settings)
        self._results, self._prefix = results, query_prefix

    def _found(self, query: str) -> Iterable[int]:
        return best(self._index.scores(self._prefix + query), self._results)


@dataclass(frozen=True)
class Encoding:
    """Way in which texts become vectors. pooling: how the encoder's last states become one."""

    encoder: str
    pooling: str
    tokens_max: int
    device: str
    passage_prefix: str


class Encoder:
    """An encoder of texts as unit vectors, float32."""

    def __init__(self, how: Encoding) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(how.encoder)
            self.model = AutoModel.from_pretrained(how.encoder, dtype=torch.float32).to(how.device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{how.encoder} is no encoder that transformers can load: {error}") from None
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # What is longer is cut behind, and the last token is told by the mask.
        self.tokenizer.padding_side = "right"
        self.how = how

    @torch.inference_mode()
    def vectors(self, texts: list[str]) -> Array:
        """Encodes texts as unit vectors, float32 [texts, dimensions]."""
        read = self.tokenizer(texts, padding=True, truncation=True, max_length=self.how.tokens_max, return_tensors="pt")
        read = {name: value.to(self.how.device) for name, value in read.items()}
        if read["input_ids"].shape[1] == 0:  # empty texts, and a tokenizer that adds nothing
            return np.zeros((len(texts), self.model.config.hidden_size), np.float32)
        hidden = self.model(**read).last_hidden_state.float()  # [texts, tokens, dimensions]
        mask = read["attention_mask"]
        counts = mask.sum(1).clamp(min=1)
        if self.how.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.how.pooling == "last":
            pooled = hidden[torch.arange(len(texts)), counts - 1]
        else:
            pooled = (hidden * mask[..., None]).sum(1) / counts[:, None]
        return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()  # type: ignore[no-any-return]


class Index:
    """The vectors of all passages. One thread encodes: queries of many rollouts that wait are encoded together."""

    def __init__(self, directory: Path, encoder: Encoder) -> None:
        self._vectors = np.load(directory / "vectors.npy", mmap_mode="r")  # [passages, dimensions], float16
        self._encoder = encoder
        self._waiting: deque[tuple[str, Future[Array]]] = deque()
        self._there = threading.Semaphore(0)
        threading.Thread(target=self._serve, name="dense search", daemon=True).start()

    def scores(self, query: str) -> Array:
        """Returns the cosines of a query with all passages, float32 [passages]."""
        scores: Future[Array] = Future()
        self._waiting.append((query, scores))
        self._there.release()
        return scores.result()

    def _serve(self) -> None:
        while True:
            self._there.acquire()
            waiting = [self._waiting.popleft()]
            while len(waiting) < QUERIES_AT_ONCE and self._there.acquire(blocking=False):
                waiting.append(self._waiting.popleft())
            try:
                scores = self._scores([query for query, _ in waiting])
            except (RuntimeError, ValueError) as error:
                for _, future in waiting:
                    future.set_exception(error)
                continue
            for number, (_, future) in enumerate(waiting):
                future.set_result(scores[number])

    def _scores(self, queries: list[str]) -> Array:
        """Returns the cosines, float32 [queries, passages]."""
        wanted = self._encoder.vectors(queries)
        parts = [
            wanted @ self._vectors[start : start + ROWS_AT_ONCE].astype(np.float32).T
            for start in range(0, len(self._vectors), ROWS_AT_ONCE)
        ]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(queries), 0), np.float32)


@cache
def _opened(directory: Path, corpus: Corpus, how: Encoding) -> tuple[Index, Passages]:
    """Returns the index of the corpus, made if it is not there."""
    encoder = Encoder(how)

    def build(made: Path, passages: Passages) -> None:
        shape = (len(passages), int(encoder.model.config.hidden_size))
        vectors = np.lib.format.open_memmap(made / "vectors.npy", "w+", np.float16, shape)
        for start in range(0, len(passages), PASSAGES_AT_ONCE):
            some = [passages[number] for number in range(start, min(len(passages), start + PASSAGES_AT_ONCE))]
            vectors[start : start + len(some)] = encoder.vectors([how.passage_prefix + whole(one) for one in some])
            if start % (1000 * PASSAGES_AT_ONCE) == 0 and start:
                log.warning("dense index: %d of %d passages are encoded", start, len(passages))
        vectors.flush()

    weights = sorted([file.name, file.stat().st_mtime_ns] for file in Path(how.encoder).glob("*.safetensors"))
    settings = {
        "kind": "dense", "encoder": how.encoder, "weights": weights, "pooling": how.pooling,
        "passage_prefix": how.passage_prefix, "tokens_max": how.tokens_max,
    }  # fmt: skip
    found = indexed(directory, corpus, settings, build)
    return Index(found, encoder), Passages(found)


def best(scores: Array, results: int) -> list[int]:
    """Returns the indices of the highest scores, best first; of equal scores, the lowest index first."""
    count = min(results, len(scores))
    if count == 0:
        return []
    # All that reach the lowest score that is taken, so that equal ones are not left to chance.
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    among = np.flatnonzero(scores >= least)
    return [int(number) for number in among[np.argsort(-scores[among], kind="stable")][:count]]
