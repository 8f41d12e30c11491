"""The trace of an agent's rollout, for rollouts/, MLflow and `megagrpo report`: bounded in size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megagrpo.types import AgentRun

EVENTS_MAX = 200
TEXT_CHARACTERS = 8_000
TRACE_CHARACTERS = 200_000
NAME_CHARACTERS = 64
DEPTH_MAX = 24
LEFT_OUT = "left_out"
"""Kind of an event that stands for many."""
LAST = ("given", "arguments", "result")
"""Fields that may be large: they take the room that the rest of an event has left."""


def trace(run: AgentRun) -> dict[str, Any]:
    """Returns JSON values: error, counts, sequences, rewards and events (their kinds are in agents/turns.py), each
    turn's event with its reward.

    Keeps the first and the last of many events. All texts together have about TRACE_CHARACTERS characters at most: each
    event may take its share of the characters that earlier events have left.
    """
    turns = {turn.number: {"reward": turn.reward, "sequence": turn.branch} for turn in run.turns}
    kept: list[Any] = list(run.events)
    if len(kept) > EVENTS_MAX:
        half = EVENTS_MAX // 2
        kept[half:-half] = [{"kind": LEFT_OUT, "at": kept[half]["at"], "events": len(kept) - 2 * half}]
    left, events = TRACE_CHARACTERS, []
    for index, event in enumerate(kept):
        room = _Room(left // (len(kept) - index))
        left -= room.left
        made = {name[:NAME_CHARACTERS]: room.fitted(event[name]) for name in sorted(event, key=LAST.__contains__)}
        left += max(0, room.left)
        events.append(made | turns.get(event.get("number"), {}) if event["kind"] == "turn" else made)
    return {
        "error": run.error[:TEXT_CHARACTERS],
        "reward": None if run.reward is None else {name: float(value) for name, value in run.reward.items()},
        "counts": {name: float(value) for name, value in run.counts.items()},
        "sequences": [{"tokens": len(b.tokens), "trained": int(b.trained.sum())} for b in run.branches],
        "events": events,
    }


def shortened(text: str, characters: int) -> str:
    """Returns `text`; of a longer text its beginning and its end."""
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[: characters - half]} [... {len(text) - characters} characters ...] {text[len(text) - half :]}"


@dataclass
class _Room:
    """The characters left for an event. Any program may have reported the event, of any size and depth."""

    left: int

    def fitted(self, value: Any, depth: int = 0) -> Any:
        self.left -= 10  # about its name and marks
        if isinstance(value, dict | list | tuple) and (depth > DEPTH_MAX or self.left < 0):
            return "..."
        if isinstance(value, dict):
            return {str(name)[:NAME_CHARACTERS]: self.fitted(item, depth + 1) for name, item in self._some(value)}
        if isinstance(value, list | tuple):
            return [self.fitted(item, depth + 1) for _, item in self._some(dict(enumerate(value)))]
        if isinstance(value, str):
            value = shortened(value, max(0, min(TEXT_CHARACTERS, self.left)))
            self.left -= len(value)
        return value

    def _some(self, value: dict[Any, Any]) -> list[tuple[Any, Any]]:
        """Returns as many items as there may be room for."""
        return list(value.items())[: max(0, self.left // 10) + 1]
