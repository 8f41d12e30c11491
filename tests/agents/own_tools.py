"""Tools of a user's own, for tests. The tests name this file in recipes."""

import asyncio
import threading
import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field


class Point(BaseModel):
    """A place."""

    x: int
    y: int = 0


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first one,
            which is: a whole number.
        b (int): The second one.

    Returns:
        Their sum.
    """
    return a + b


async def later(text: str, seconds: float = 0.0) -> str:
    """Says the text, after a while.

    :param text: What to say.
    :param float seconds: How long to wait.
    """
    await asyncio.sleep(seconds)
    return text


def many(
    kind: Literal["a", "b"],
    names: list[str],
    place: Point,
    weight: Annotated[float, Field(ge=0, description="In kilograms.")],
    more: dict[str, int] | None = None,
    anything=None,
) -> dict[str, Any]:
    """Takes many kinds.

    Parameters
    ----------
    names : list of str
        Some names.
    kind
        One of two.
    """
    return {"kind": kind, "names": names, "x": place.x, "weight": weight, "more": more, "anything": anything}


def of_task(task: Any, suffix: str, text: str) -> str:
    """Knows the task."""
    return f"{task.ground_truth} {text}{suffix}"


def blocks(seconds: float) -> str:
    """Blocks its thread."""
    time.sleep(seconds)
    return threading.current_thread().name


async def blocks_loop(seconds: float) -> str:
    """Blocks the loop that it runs in."""
    time.sleep(seconds)
    return threading.current_thread().name


def raises(text: str) -> None:
    """Raises."""
    raise KeyError(text)


def exits() -> None:
    """Leaves."""
    raise SystemExit(3)


def variadic(*texts: str) -> str:
    """Cannot be a tool."""
    return "".join(texts)


def no_json(place: threading.Thread) -> str:
    """Cannot be a tool."""
    return str(place)


class Counter:
    """Counts. What a rollout does is seen in that rollout only."""

    closed: ClassVar[list[str]] = []
    prepared: ClassVar[list[dict[str, int]]] = []

    def __init__(self, task: Any, start: int = 0, goal: int = 3) -> None:
        self.task, self.count, self.goal = task, start, goal
        self.running = 0

    @classmethod
    def prepare(cls, **arguments: int) -> None:
        cls.prepared.append(arguments)

    def up(self, by: int = 1) -> int:
        """Adds to the count."""
        assert self.running == 0, "two methods run at once"
        self.running = 1
        before = self.count
        time.sleep(0.01)
        self.count = before + by
        self.running = 0
        return self.count

    async def look(self) -> str:
        """Says the count."""
        assert self.running == 0, "two methods run at once"
        return f"{self.task.id}: {self.count}"

    @property
    def done(self) -> bool:
        return self.count >= self.goal

    def reward(self) -> dict[str, float]:
        return {"score": float(self.count >= self.goal), "count": self.count}

    async def close(self) -> None:
        Counter.closed.append(self.task.id)


class Walk:
    """Gives rewards of turns."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> str:
        """Takes one step."""
        self.steps += 1
        return "on"

    def reward(self) -> dict[str, Any]:
        return {"score": self.steps, "steps": self.steps, "turn_rewards": [2.0, self.steps - 2.0]}
