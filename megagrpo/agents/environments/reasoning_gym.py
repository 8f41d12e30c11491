"""A task of reasoning-gym as a conversation: the policy is told that an answer is wrong, and may try again.

Runs in the run's interpreter, whose sandbox scores the answers: some of the package's scorers evaluate them as Python.
Rows are those of `data.train: [{reasoning_gym: TASK}]`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from megagrpo.agents.tool_loop import ask_policy
from megagrpo.reward.verifiers.reasoning_gym import make

THREADS = 4
"""Answers that are scored at once, each in a sandbox of its own."""


async def rollout(
    task: Any, endpoint: Any, attempts_max: int, counts: str, extract: str, wrong: str, isolation: str
) -> dict[str, Any] | None:
    """Returns the score of the last or the best answer; None if the gateway refuses the first request. The reward of a
    turn is what its answer added to the score, so that turns sum to it. Raises ValueError if the row is no entry of
    reasoning-gym."""
    messages = [dict(message) for message in task.messages]
    rewards: list[float] = []
    score = 0.0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        while len(rewards) < attempts_max and score < 1.0:
            choice = await ask_policy(client, endpoint, {"model": endpoint.model, "messages": messages})
            if choice is None:
                break
            answer = choice["message"]
            new = await asyncio.get_running_loop().run_in_executor(
                scorers(), score_of, answer["content"] or "", task, extract, isolation
            )
            new = max(score, new) if counts == "best" else new
            rewards.append(new - score)
            score = new
            messages += [answer, {"role": "user", "content": wrong}]
    if not rewards:
        return None
    return {"score": score, "turn_rewards": rewards, "attempts": len(rewards), "solved": float(score >= 1.0)}


def score_of(answer: str, task: Any, extract: str, isolation: str) -> float:
    scorer = scorer_of(extract, isolation, threading.get_ident())
    return float(scorer(response=answer, ground_truth=task.ground_truth, extra_info=task.extra_info)["score"])


@functools.cache
def scorer_of(extract: str, isolation: str, thread: int) -> Any:
    """Returns the scorer of this thread: each has a sandbox of its own."""
    return make(extract=extract, isolation=isolation)  # type: ignore[arg-type]


@functools.cache
def scorers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "scores answers")
