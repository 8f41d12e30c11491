"""A dense index: an encoder of transformers turns passages and queries into vectors; the nearest passages are found by
comparing queries with all of them: some 1.5 s for a million passages of 384 dimensions on one core."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.agents.tools.corpus import Passages, indexed
from megagrpo.agents.tools.search import best, index_directory, source_of
from megagrpo.errors import ModelError, Problem, first_line
from megagrpo.recipe.schema.tools import SearchArguments

log = logging.getLogger(__name__)
PASSAGES_AT_ONCE = 64
QUERIES_AT_ONCE = 64
ROWS_AT_ONCE = 262_144
"""Passages that queries are compared with at once: 1 GB of float32 at 1,024 dimensions."""


class Encoder:
    """An encoder of texts as unit vectors, float32. One thread encodes; queries that wait are encoded together.

    Raises ModelError if the directory has no model that transformers can load.
    """

    def __init__(self, directory: str, pooling: str, tokens_max: int, device: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory)
            self.model = AutoModel.from_pretrained(directory, dtype=torch.float32).to(device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            needed = "an encoder that transformers can load"
            raise ModelError(
                Problem("agent.tools, search: encoder", f"{directory}: {first_line(error)}", needed)
            ) from None
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # What is longer is cut behind, and the last token is told by the mask.
        self.tokenizer.padding_side = "right"
        self.pooling, self.tokens_max, self.device = pooling, tokens_max, device

    @torch.inference_mode()
    def vectors(self, texts: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Encodes texts as unit vectors, float32 [texts, dimensions]."""
        read = self.tokenizer(texts, padding=True, truncation=True, max_length=self.tokens_max, return_tensors="pt")
        read = {name: value.to(self.device) for name, value in read.items()}
        if read["input_ids"].shape[1] == 0:  # empty texts, and a tokenizer that adds nothing
            return np.zeros((len(texts), self.model.config.hidden_size), np.float32)
        hidden = self.model(**read).last_hidden_state.float()  # [texts, tokens, dimensions]
        mask = read["attention_mask"]
        counts = mask.sum(1).clamp(min=1)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "last":
            pooled = hidden[torch.arange(len(texts)), counts - 1]
        else:
            pooled = (hidden * mask[..., None]).sum(1) / counts[:, None]
        return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()


class Dense:
    """The nearest passages by the cosine of their vectors with the query's. For many threads."""

    def __init__(self, directory: Path, encoder: Encoder, query_prefix: str) -> None:
        self._vectors = np.load(directory / "vectors.npy", mmap_mode="r")  # [passages, dimensions], float16
        self._encoder = encoder
        self._prefix = query_prefix
        self._waiting: deque[tuple[str, Future[np.ndarray[Any, Any]]]] = deque()
        self._there = threading.Semaphore(0)
        threading.Thread(target=self._serve, name="dense search", daemon=True).start()

    def find(self, query: str, results: int) -> list[int]:
        scores: Future[np.ndarray[Any, Any]] = Future()
        self._waiting.append((self._prefix + query, scores))
        self._there.release()
        return best(scores.result(), results)

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

    def _scores(self, queries: list[str]) -> np.ndarray[Any, Any]:
        """Returns the cosines, float32 [queries, passages]."""
        wanted = self._encoder.vectors(queries)
        parts = [
            wanted @ self._vectors[start : start + ROWS_AT_ONCE].astype(np.float32).T
            for start in range(0, len(self._vectors), ROWS_AT_ONCE)
        ]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(queries), 0), np.float32)


def dense_index(arguments: SearchArguments) -> tuple[Dense, Passages]:
    """Returns the index of the corpus, made if it is not there: float16 vectors, 2 bytes a dimension and passage.
    Raises DataError, ModelError."""
    encoder = arguments.encoder or ""
    model = Encoder(encoder, arguments.pooling, arguments.tokens_max, arguments.device)

    def build(made: Path, passages: Passages) -> None:
        count = len(passages)
        shape = (count, int(model.model.config.hidden_size))
        vectors = np.lib.format.open_memmap(made / "vectors.npy", "w+", np.float16, shape)
        for start in range(0, count, PASSAGES_AT_ONCE):
            some = [passages[number] for number in range(start, min(count, start + PASSAGES_AT_ONCE))]
            texts = [
                arguments.passage_prefix + f"{passage['title']}\n{passage['text']}".lstrip("\n") for passage in some
            ]
            vectors[start : start + len(texts)] = model.vectors(texts)
            if start % (1000 * PASSAGES_AT_ONCE) == 0 and start:
                log.warning("dense index: %d of %d passages are encoded", start, count)
        vectors.flush()

    weights = sorted((file.name, file.stat().st_mtime_ns) for file in Path(encoder).glob("*.safetensors"))
    settings = {
        "kind": "dense", "encoder": encoder, "weights": list(map(list, weights)), "pooling": arguments.pooling,
        "passage_prefix": arguments.passage_prefix, "tokens_max": arguments.tokens_max,
    }  # fmt: skip
    found = indexed(index_directory(arguments), source_of(arguments), settings, build)
    return Dense(found, model, arguments.query_prefix), Passages(found)
