"""Requests to a server for the logprobs of given tokens, as a teacher gives them, and the checks of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, Problem, brief
from megagrpo.types import TeacherTokens

ROUNDING = 1e-4
"""Largest logprob that is read as 0: sums of probabilities are rounded."""
TokenLogprobs = tuple[Any, Any, Any, Any]
"""For each token in question: the token that the server read [t], its logprob [t], the most likely ids in its place
[t, k], most likely first, and their logprobs [t, k]."""


@dataclass(frozen=True)
class TokenScores:
    """An engine's requests and answers, with logprobs at temperature 1 over the whole vocabulary.

    tokens: a sequence, of which the tokens from `first` on, 1 or later, are in question; k: number of ids of each.
    """

    path: str
    body: Callable[[Sequence[int], int, int], dict[str, Any]]
    """Makes what is posted to `path`, from tokens, first and k."""
    parts: Callable[[Any, Sequence[int], int, int], TokenLogprobs]
    """Reads an answer to that, and may raise any error of a malformed one."""

    def read(self, answer: Any, tokens: Sequence[int], first: int, k: int) -> TeacherTokens:
        """Returns the logprobs of the tokens in question. Raises EngineError if the answer has those of other tokens,
        or some that are no logprobs."""
        try:
            read, logprobs, ids, ids_logprobs = self.parts(answer, tokens, first, k)
            read, ids = np.asarray(read, np.int64), np.asarray(ids, np.int64)
            logprobs, ids_logprobs = np.asarray(logprobs, np.float32), np.asarray(ids_logprobs, np.float32)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._unusable(f"{brief(answer)} ({type(error).__name__}: {error})") from error
        count = len(tokens) - first
        shapes = [array.shape for array in (read, logprobs, ids, ids_logprobs)]
        if shapes != [(count,), (count,), (count, k), (count, k)]:
            raise self._unusable(f"arrays of shapes {shapes} for {count} tokens and k {k}")
        if len(other := np.flatnonzero(read != np.asarray(tokens[first:]))):
            at = int(other[0])
            raise self._unusable(f"token {read[at]} in the place of {tokens[first + at]}, token {first + at}")
        for name, values in (("token", logprobs), ("most likely id", ids_logprobs)):
            if len(wrong := values[~(np.isfinite(values) & (values <= ROUNDING))]):
                raise self._unusable(f"{wrong[0]} as the logprob of a {name}")
        if ids.min(initial=0) < 0 or (np.diff(ids_logprobs) > 0).any():
            raise self._unusable("most likely ids that are negative or not in order")
        return TeacherTokens(np.minimum(logprobs, 0), ids.astype(np.int32), np.minimum(ids_logprobs, 0))

    def _unusable(self, given: str) -> EngineError:
        return EngineError(Problem(f"an answer of {self.path}", given, "a logprob for each of the given tokens"))
