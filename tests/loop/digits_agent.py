"""An agent of two turns, with the standard library alone: the share of digits in its last answer is its reward."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from typing import Any


def ask(endpoint: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": endpoint.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


async def rollout(task: Any, endpoint: Any, slow: float = 0.0, forks: bool = False) -> dict[str, Any]:
    """slow: the share of rollouts that do not end. forks: every other row's go on from their first answer twice."""
    messages = begun = list(task.messages)
    for number in range(3 if forks and task.extra_info["index"] % 2 else 2):
        said = await asyncio.to_thread(ask, endpoint, messages)
        begun = begun if number else [*messages, said]
        messages = [*begun, {"role": "user", "content": f"+{number}="}]
        await asyncio.sleep(task.seed % 7 / 100)
        if task.seed % 100 < 100 * slow:
            await asyncio.to_thread(time.sleep, 1000)
        endpoint.event("tool", name="add", seconds=0.01)
    text = said["content"] or ""
    return {"score": sum(character.isdigit() for character in text) / max(len(text), 1), "length": len(text)}
