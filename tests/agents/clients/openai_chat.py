"""OpenAI's client: chat completions, every second rollout as a stream."""

import asyncio
import json

import openai
from rollouts import add, again, question, run, unreadable

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
shared = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")


async def rollout(url, key, numbers):
    client = shared.with_options(base_url=url, api_key=key)
    messages = [{"role": "user", "content": question(numbers)}]
    for _ in range(30):
        asked = {"model": "policy", "messages": messages, "tools": [TOOL], "temperature": 0.3}
        if numbers[0] % 2:
            message = (await client.chat.completions.create(**asked)).choices[0].message.model_dump(exclude_none=True)
        else:
            message = await streamed(client, asked)
        messages.append(message)
        if calls := message.get("tool_calls"):
            for call in calls:
                result = add(json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        elif unreadable(message["content"]):
            messages.append({"role": "user", "content": again(numbers)})
        else:
            return message["content"]
    raise RuntimeError("no end")


async def streamed(client, asked):
    async with client.chat.completions.stream(**asked) as stream:
        made = (await stream.get_final_completion()).choices[0].message
    message = {"role": "assistant", "content": made.content or ""}
    if made.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in made.tool_calls
        ]
    return message


asyncio.run(run(rollout))
