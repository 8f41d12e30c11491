"""A server's answer to one request, of any engine, read part by part: tokens, logprobs, versions, kept sets, routes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.requests import after_begun
from megagrpo.routes import Routes
from megagrpo.types import FinishReason, KeptSets, Request, Sample

FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


ReadRoutes = Callable[[str, str, int], Routes]
"""Reads the routes of a sequence: from an engine's answer, a place for errors, and the number of tokens. Raises
EngineError if they cannot be its routes."""


class Answer(ABC):
    """An answer to one request. Each token comes once.

    `version`: of all tokens, whatever the server calls its weights; None: as the server reports for each token.
    `read_routes`: None if no routes were asked for.
    """

    def __init__(self, request: Request, version: int | None = None, read_routes: ReadRoutes | None = None) -> None:
        self.request, self._version, self._read_routes = request, version, read_routes
        self._tokens, self._logprobs, self._sets = array("i"), array("f"), list[np.ndarray]()
        self._versions: np.ndarray | None = np.zeros(0, np.int32)
        """Versions of the first tokens, as far as the server has reported. None: one is missing or is not a number."""
        self._agree = True
        """Tokens and logprobs belong together, as far as the engine says of which token a logprob is."""
        self._finish = ""
        """The engine's name of the reason for the end."""
        self._routed: str | None = None
        """The routes as the engine sent them."""
        self._reported: Any = None
        """The end as the engine sent it, for an error."""

    @abstractmethod
    def add(self, part: Mapping[str, Any]) -> None:
        """Adds a part of the answer."""

    def _add_versions(self, spans: Sequence[Mapping[str, Any]] | None) -> None:
        """Notes the versions of all tokens so far; None: this part does not tell them."""
        if self._version is not None:
            spans = [{"version": self._version, "start": 0, "end": self.count}]
        if spans is not None:
            self._versions = versions_of(spans, self.count)

    @property
    def count(self) -> int:
        """Returns the number of tokens."""
        return len(self._tokens)

    @property
    def ended(self) -> bool:
        return bool(self._finish)

    def so_far(self) -> Sample:
        """Returns the tokens whose versions are known, after those of `request.begun`, without text."""
        versions = np.zeros(0, np.int32) if self._versions is None else self._versions
        return self._after_begun(versions, "abort" if not self.ended else "length")

    def sample(
        self, text_of: Callable[[np.ndarray, FinishReason], str], engine: str, stops: Collection[int] = ()
    ) -> Sample:
        """Returns the whole sample, once the answer has ended. stops: tokens that end every response.

        Raises EngineError if tokens, logprobs and weight versions do not belong together.
        """
        finish, versions = FINISHES.get(self._finish), self._versions
        where = f"{engine}: sample {self.request.index} of prompt {self.request.prompt_id}"
        if self.request.sampling.kept_sets:
            KeptSets.of(self._sets).require(np.array(self._tokens), where)
        agree = self._agree and len(self._logprobs) == self.count and np.isfinite(np.array(self._logprobs)).all()
        if finish is None or versions is None or len(versions) != self.count or not agree:
            raise EngineError(
                Problem(
                    f"{engine}: an answer for prompt {self.request.prompt_id}",
                    given=f"{self.count} tokens, {len(self._logprobs)} logprobs (or some of other tokens, or some that "
                    f"are not finite), {self._reported}",
                    needed="a finite logprob for each token, a known end, and a weight version of this run for each",
                )
            )
        # An engine reports abort even if the last token ends the response: resumed, it would have tokens after its end.
        if finish == "abort" and self.count and self._tokens[-1] in (*stops, *self.request.sampling.stop_tokens):
            finish = "stop"
        elif finish == "abort" and self.count == self.request.tokens_left:
            finish = "length"
        routes, tokens = None, len(self.request.read) + self.count
        # There are no routes of an aborted request.
        if self._read_routes is not None and (self._routed is not None or FINISHES[self._finish] != "abort"):
            routes = self._read_routes(self._routed or "", where, tokens)
        sample = self._after_begun(versions, finish, routes)
        return replace(sample, text=text_of(sample.tokens, finish))

    def _after_begun(self, versions: np.ndarray, finish: FinishReason, routes: Routes | None = None) -> Sample:
        request, kept = self.request, None
        if request.sampling.kept_sets:
            kept = KeptSets.of(self._sets[: len(versions)])
            versions = versions[: len(kept.ends)]
        known = len(versions)
        tokens, logprobs = np.array(self._tokens[:known], np.int32), np.array(self._logprobs[:known], np.float32)
        sample = Sample(request.prompt_id, request.index, tokens, logprobs, versions, finish, "", None, routes, kept)
        return after_begun(request, sample)


def versions_of(spans: Sequence[Mapping[str, Any]], count: int) -> np.ndarray | None:
    """Returns the version of each token, int32 [count], or None if one is missing or is not a number."""
    versions = np.full(count, -1, dtype=np.int32)
    for span in spans:
        if span["end"] > span["start"]:
            if not str(span["version"]).isdecimal():
                return None
            versions[span["start"] : span["end"]] = int(span["version"])
    return None if (versions < 0).any() else versions
