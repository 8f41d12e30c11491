"""One request to SGLang's /generate, and its answer: whole, or in parts as they are sampled (SGLang 0.5.23)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.requests import after_begun
from megagrpo.types import FinishReason, Request, Sample

TOKENS_PER_PART = 50
"""Tokens per part of a stream. SGLang's scheduler sends as many at once to its HTTP server if nothing is streamed."""
FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def generate_body(request: Request, rid: str, version: int, *, streams: bool) -> dict[str, Any]:
    """Returns the body of /generate for one sample; the answer comes in parts if it `streams`. It shares keys and
    values of its prompt only with requests of the same weight version: others' may be of other weights. With n > 1, all
    samples of a prompt would have the seed of the first, could not be aborted alone, and would be answered together."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.read),
        "return_logprob": True,
        "extra_key": str(version),
        "stream": streams,
        "sampling_params": {
            "max_new_tokens": request.tokens_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_tokens),
            "sampling_seed": request.seed,
            "stream_interval": TOKENS_PER_PART,
        },
    }


class Answer:
    """A server's answer to one request. A server with incremental_streaming_output sends each token once.

    `version`: of all tokens, whatever the server calls its weights; None: as the server reports for each token.
    """

    def __init__(self, request: Request, version: int | None = None) -> None:
        self.request, self._version = request, version
        self._tokens, self._logprobs = array("i"), array("f")
        self._versions: np.ndarray | None = np.zeros(0, np.int32)
        """Versions of the first tokens, as far as the server has reported. None: one is missing or is not a number."""
        self._meta: Mapping[str, Any] = {}
        self._agree = True

    def add(self, part: Mapping[str, Any]) -> None:
        meta = self._meta = part["meta_info"]
        # SGLang ends a request that waits with tokens that it has sent before, after those that it has not.
        new = meta["completion_tokens"] - len(self._tokens)
        tokens, entries = part["output_ids"][:new], (meta.get("output_token_logprobs") or [])[:new]
        self._agree &= len(tokens) == new and [entry[1] for entry in entries] == tokens
        self._tokens.extend(tokens)
        self._logprobs.extend(entry[0] for entry in entries)
        spans = meta.get("weight_versions")
        if self._version is not None:
            spans = [{"version": self._version, "start": 0, "end": len(self._tokens)}]
        elif spans is None and self.ended:
            spans = [{"version": meta.get("weight_version"), "start": 0, "end": len(self._tokens)}]
        if spans is not None:
            self._versions = _versions(spans, len(self._tokens))

    @property
    def count(self) -> int:
        """Returns the number of tokens."""
        return len(self._tokens)

    @property
    def ended(self) -> bool:
        return bool(self._meta.get("finish_reason"))

    def so_far(self) -> Sample:
        """Returns the tokens whose versions are known, after those of `request.begun`, without text."""
        versions = np.zeros(0, np.int32) if self._versions is None else self._versions
        return self._after_begun(versions, "abort" if not self.ended else "length")

    def sample(
        self, text_of: Callable[[np.ndarray, FinishReason], str], engine: str, stops: Collection[int] = ()
    ) -> Sample:
        """Returns the whole sample, once the answer has ended. stops: the model's own tokens that end a response.

        Raises EngineError if tokens, logprobs and weight versions do not belong together.
        """
        meta = self._meta
        finish = FINISHES.get((meta.get("finish_reason") or {}).get("type", ""))
        versions = self._versions
        agree = self._agree and np.isfinite(np.array(self._logprobs)).all()
        if finish is None or versions is None or len(versions) != self.count or not agree:
            raise EngineError(
                Problem(
                    f"{engine}: an answer for prompt {self.request.prompt_id}",
                    given=f"{self.count} tokens, {len(self._logprobs)} logprobs (or some of other tokens, or some that "
                    f"are not finite), finish_reason {meta.get('finish_reason')}, "
                    f"weight_versions {meta.get('weight_versions')}",
                    needed="a finite logprob for each token, a known end, and a weight version of this run for each",
                )
            )
        if finish == "abort":
            finish = self._finish_if_complete(stops)
        sample = self._after_begun(versions, finish)
        return replace(sample, text=text_of(sample.tokens, finish))

    def _finish_if_complete(self, stops: Collection[int]) -> FinishReason:
        """Returns the finish reason of an aborted request. SGLang reports abort even if the last token ends the
        response: if such a response were resumed, it would have tokens after its end."""
        if self.count and self._tokens[-1] in (*stops, *self.request.sampling.stop_tokens):
            return "stop"
        return "length" if self.count == self.request.tokens_left else "abort"

    def _after_begun(self, versions: np.ndarray, finish: FinishReason) -> Sample:
        request, known = self.request, len(versions)
        tokens, logprobs = np.array(self._tokens[:known], np.int32), np.array(self._logprobs[:known], np.float32)
        return after_begun(request, Sample(request.prompt_id, request.index, tokens, logprobs, versions, finish, ""))


def _versions(spans: Sequence[Mapping[str, Any]], count: int) -> np.ndarray | None:
    """Returns the version of each token, int32 [count], or None if one is missing or is not a number."""
    versions = np.full(count, -1, dtype=np.int32)
    for span in spans:
        if span["end"] > span["start"]:
            if not str(span["version"]).isdecimal():
                return None
            versions[span["start"] : span["end"]] = int(span["version"])
    return None if (versions < 0).any() else versions
