"""Many rollouts of one client, in the client's own interpreter. Imports the standard library only.

stdin: {"url", "at_once", "rollouts": [{"key", "numbers"}]}. stdout: a line {"key", "said"} for each that has ended.
"""

import asyncio
import json
import sys


async def run(rollout):
    """`rollout(url, key, numbers)` returns the last answer's text."""
    asked = json.loads(sys.stdin.readline())
    places = asyncio.Semaphore(asked["at_once"])

    async def one(key, numbers):
        async with places:
            said = await rollout(asked["url"], key, numbers)
            print(json.dumps({"key": key, "said": said}), flush=True)

    await asyncio.gather(*(one(**rollout) for rollout in asked["rollouts"]))


def question(numbers):
    return "Add: " + " ".join(map(str, numbers))


def again(numbers):
    return f"That call could not be read. {question(numbers)}"


def unreadable(text):
    return "<tool_call>" in (text or "")


def add(arguments):
    try:
        return str(arguments["a"] + arguments["b"])
    except (KeyError, TypeError) as reason:
        return f"error: {reason}"
