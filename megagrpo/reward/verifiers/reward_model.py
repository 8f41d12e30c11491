"""The score of a trained reward model: a model of reward.models with a head for sequence classification."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from megagrpo.reward.answer_text import after_thinking
from megagrpo.reward.functions import Function
from megagrpo.reward.judging.client import Arguments, JudgeError
from megagrpo.section import Number, PositiveFloat, Section


class StandardConfig(Section):
    """Standardisation of a score: (score - mean) / std."""

    mean: Number
    std: PositiveFloat


class RewardModelArguments(Arguments):
    """Arguments of `reward_model`."""

    model: str
    """A classifier of reward.models."""

    label: str | int | None = None
    """The logit that is the score: a label's name or number. null: the only one."""

    shows: Literal["answer", "response"] = "answer"
    """The text that the model sees. answer: the text after the reasoning. response: all of the response."""

    normalize: Literal["none", "sigmoid"] | StandardConfig = "none"
    """sigmoid: to 0 .. 1; with several labels, the probability of `label` among them. {mean: M, std: S}: by figures of
    your own, such as those of the first evaluation."""


def make(**arguments: Any) -> Function:
    """Makes a reward function: the model's score of the prompt with the response."""
    config = RewardModelArguments.of(arguments)

    async def reward_model(
        model: ScoringModel, *, prompt: list[dict[str, Any]], prompt_text: str, response: str
    ) -> float:
        shown = after_thinking(response, prompt_text) if config.shows == "answer" else response
        logits, labels = await model.logits([*prompt, {"role": "assistant", "content": shown}])
        return score_of(logits, label_of(config.label, labels), config.normalize)

    return Function.of(reward_model, config)


def label_of(label: str | int | None, labels: Sequence[str]) -> int:
    """Returns the index of the logit that is the score. Raises JudgeError if the model has no such label."""
    if label is None and len(labels) == 1:
        return 0
    if isinstance(label, int) and 0 <= label < len(labels):
        return label
    if label in labels:
        return labels.index(str(label))
    raise JudgeError(f"label {label}, of a model with {', '.join(labels)}")


def score_of(
    logits: Sequence[float], label: int, normalize: Literal["none", "sigmoid"] | StandardConfig = "none"
) -> float:
    """Returns the score from the logits.

    >>> score_of([2.0], 0), score_of([2.0], 0, StandardConfig(mean=1.0, std=0.5))
    (2.0, 2.0)
    >>> [round(score_of(logits, 1, "sigmoid"), 3) for logits in ([0.0, 0.0], [0.0, 1.0], [1000.0, 0.0])]
    [0.5, 0.731, 0.0]
    """
    score = logits[label]
    if isinstance(normalize, StandardConfig):
        return (score - normalize.mean) / normalize.std
    if normalize == "none":
        return score
    others = [other - score for place, other in enumerate(logits) if place != label] or [-score]
    most = max(0.0, *others)
    return math.exp(-most) / (math.exp(-most) + sum(math.exp(other - most) for other in others))


# --- the model --------------------------------------------------------------------------------------------------------

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
        """Returns the logits of a conversation, and their labels. Raises JudgeError if it has none."""
        answer: asyncio.Future[list[float] | str] = asyncio.get_running_loop().create_future()
        self._waiting.append((conversation, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        logits = await answer
        if isinstance(logits, str):
            self.spent["failed"] += 1
            raise JudgeError(logits)
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
