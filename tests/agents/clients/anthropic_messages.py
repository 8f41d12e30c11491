"""Anthropic's client: messages with thinking and tools, every second rollout as a stream; tokens are counted first."""

import asyncio

import anthropic
from rollouts import add, again, question, run, unreadable

TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
shared = anthropic.AsyncAnthropic(base_url="http://127.0.0.1", api_key="-")


async def rollout(url, key, numbers):
    client = shared.with_options(base_url=url.removesuffix("/v1"), api_key=key)
    messages = [{"role": "user", "content": [{"type": "text", "text": question(numbers)}]}]
    for _ in range(30):
        asked = {"model": "policy", "system": "You add.", "messages": messages, "tools": [TOOL]}
        tokens = (await client.messages.count_tokens(**asked)).input_tokens
        asked |= {"max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 100}}
        if numbers[0] % 2:
            message = await client.messages.create(**asked)
        else:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == tokens, (message.usage, tokens)
        messages.append({"role": "assistant", "content": message.content})
        text = "".join(block.text for block in message.content if block.type == "text")
        new = [
            {"type": "tool_result", "tool_use_id": block.id, "content": add(block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        assert message.stop_reason == ("tool_use" if new else "end_turn")
        if not new and unreadable(text):
            new = [{"type": "text", "text": again(numbers)}]
        if not new:
            return text
        messages.append({"role": "user", "content": new})
    raise RuntimeError("no end")


asyncio.run(run(rollout))
