"""OpenAI's client: responses, by previous_response_id, with all items, as a stream and not, in turn."""

import asyncio
import json

import openai
from rollouts import add, again, question, run, unreadable

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
shared = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")


async def rollout(url, key, numbers):
    client = shared.with_options(base_url=url, api_key=key)
    by_id, as_stream = numbers[0] % 2 == 0, numbers[0] % 3 == 0
    given, before = [{"role": "user", "content": question(numbers)}], openai.omit
    for _ in range(30):
        asked = {
            "model": "policy",
            "instructions": "You add.",
            "input": given,
            "tools": [TOOL],
            "previous_response_id": before,
        }
        if as_stream:
            async with client.responses.stream(**asked) as stream:
                response = await stream.get_final_response()
        else:
            response = await client.responses.create(**asked)
        items = [item.model_dump(exclude_none=True) for item in response.output]
        new = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": add(json.loads(item["arguments"]))}
            for item in items
            if item["type"] == "function_call"
        ]
        if not new and unreadable(response.output_text):
            new = [{"role": "user", "content": again(numbers)}]
        if not new:
            return response.output_text
        given, before = (new, response.id) if by_id else ([*given, *(clean(item) for item in items), *new], openai.omit)
    raise RuntimeError("no end")


def clean(item):
    """Drops what the SDK's helpers add to an answer and do not send back."""
    return {name: value for name, value in item.items() if name not in ("parsed_arguments", "parsed")}


asyncio.run(run(rollout))
