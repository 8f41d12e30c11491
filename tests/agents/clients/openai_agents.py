"""OpenAI's Agents SDK: its own loop with a tool and a session, over chat completions and over responses in turn."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from rollouts import again, question, run, unreadable

shared = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


async def rollout(url, key, numbers):
    client = shared.with_options(base_url=url, api_key=key)
    kind = OpenAIChatCompletionsModel if numbers[0] % 2 else OpenAIResponsesModel
    settings = ModelSettings(temperature=0.5)
    agent = Agent(
        name="adder", instructions="You add.", tools=[add], model=kind("policy", client), model_settings=settings
    )
    session = SQLiteSession(key)
    said = (await Runner.run(agent, question(numbers), session=session, max_turns=20)).final_output
    for _ in range(5):
        if not unreadable(said):
            return said
        said = (await Runner.run(agent, again(numbers), session=session, max_turns=20)).final_output
    raise RuntimeError("no end")


asyncio.run(run(rollout))
