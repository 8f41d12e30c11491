"""A game of two players, both the policy: in each round they choose one of two digits, and win if it is the same.

Each has a conversation of its own, sees the two in another order and never learns what the other one chose: they need a
convention.
"""

import asyncio

import aiohttp


async def rollout(task, endpoint):
    """The share of rounds that were won, and the share of answers that were one of the two as a metric."""
    first, second = [], []  # the players' messages
    won = valid = 0
    rounds = task.extra_info["rounds"]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as policy:
        for pair in rounds:
            chosen = await asyncio.gather(
                choice(policy, endpoint, first, pair),
                choice(policy, endpoint, second, pair[::-1]),
            )
            won += chosen[0] == chosen[1] and chosen[0] in pair
            valid += sum(name in pair for name in chosen)
    return {"score": won / len(rounds), "valid": valid / len(rounds) / 2}


async def choice(policy, endpoint, messages, pair):
    """Returns what a player answers. Its conversation goes on."""
    messages.append({"role": "user", "content": f"{pair[0]} or {pair[1]}?"})
    body = {"model": endpoint.model, "messages": messages}
    async with policy.post(f"{endpoint.base_url}/chat/completions", json=body) as response:
        response.raise_for_status()
        said = (await response.json())["choices"][0]["message"]["content"] or ""
    messages.append({"role": "assistant", "content": said})
    return said.strip()
