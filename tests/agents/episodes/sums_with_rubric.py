"""Environments of verifiers up to 0.2. Read in an interpreter that has it and nothing else."""

import re

import verifiers
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def right(completion, answer) -> float:
    return float(re.findall(r"-?\d+", str(completion[-1].content or ""))[-1:] == [answer])


def with_tool(rows: int, held_out: int = 0) -> verifiers.Environment:
    def data(begin: int, end: int) -> Dataset:
        numbers = range(begin, end)
        questions = [[{"role": "user", "content": f"Add: {i} {i + 1} {2 * i}"}] for i in numbers]
        return Dataset.from_dict({"prompt": questions, "answer": [str(4 * i + 1) for i in numbers]})

    evaluated = {"eval_dataset": data(rows, rows + held_out)} if held_out else {}
    rubric = verifiers.Rubric(funcs=[right])
    return verifiers.ToolEnv(dataset=data(0, rows), tools=[add], rubric=rubric, max_turns=8, **evaluated)


class Countdown(verifiers.MultiTurnEnv):
    """The policy is to say the number below the last one, until 0. Each right one gets 0.5 at once."""

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "Go on."}]

    async def add_trajectory_step(self, state, trajectory_step):
        await super().add_trajectory_step(state, trajectory_step)
        expected = int(state["answer"]) - len(state["trajectory"])
        trajectory_step["reward"] = 0.5 * (str(trajectory_step["completion"][-1].content) == str(expected))
        state["over"] = expected == 0

    @verifiers.stop
    async def over(self, state) -> bool:
        return state.get("over", False)


def countdown() -> verifiers.Environment:
    def total(state) -> float:
        return sum(step["reward"] for step in state["trajectory"])

    unused = Dataset.from_dict({"question": ["-"], "answer": ["-"]})
    return Countdown(dataset=unused, rubric=verifiers.Rubric(funcs=[total]))
