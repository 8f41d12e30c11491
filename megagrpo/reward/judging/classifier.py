"""Client of a classifier: calls that come while it computes go to it together, as the next batch."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megagrpo.reward.judging.asked import UnansweredError

Conversation = Sequence[Mapping[str, Any]]


class ServedClassifier(Protocol):
    """A served model with a head for sequence classification."""

    async def labels(self) -> list[str]:
        """Returns the names of the model's logits."""

    async def logits(self, conversations: Sequence[Conversation]) -> list[list[float] | str]:
        """Returns each conversation's logits, or why it has none. Raises OSError or TimeoutError without an answer."""


class ScoringModel:
    """A client of a classifier for one reward function. For one event loop."""

    def __init__(self, served: ServedClassifier) -> None:
        self._served = served
        self._waiting: list[tuple[Conversation, asyncio.Future[list[float] | str]]] = []
        self._sending: asyncio.Task[None] | None = None
        self._labels: list[str] | None = None
        self.spent: defaultdict[str, float] = defaultdict(float)

    def new_step(self) -> dict[str, float]:
        """Returns the totals that the step has spent. Begins new ones."""
        spent = {"seconds": 0.0, **self.spent}
        self.spent.clear()
        return spent

    async def close(self) -> None:
        """Does nothing: the run ends the model."""

    async def logits(self, conversation: Conversation) -> tuple[list[float], list[str]]:
        """Returns the logits of a conversation, and their labels. Raises UnansweredError if it has none."""
        answer: asyncio.Future[list[float] | str] = asyncio.get_running_loop().create_future()
        self._waiting.append((conversation, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        logits = await answer
        if isinstance(logits, str):
            self.spent["failed"] += 1
            raise UnansweredError(logits)
        return logits, self._labels or []

    async def _send(self) -> None:
        """Sends one batch after another, until nothing waits."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            began = time.monotonic()
            answers: list[list[float] | str]
            try:
                if self._labels is None:
                    self._labels = await self._served.labels()
                answers = await self._served.logits([conversation for conversation, _ in batch])
            except OSError as error:  # TimeoutError is one
                answers = [f"the reward model does not answer: {type(error).__name__}: {error}"] * len(batch)
            self.spent["seconds"] += time.monotonic() - began
            self.spent["scored"] += len(batch)
            for (_, answer), value in zip(batch, answers, strict=True):
                if not answer.done():
                    answer.set_result(value)
        self._sending = None
