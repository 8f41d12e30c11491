"""An environment of the verifiers package (0.2): questions, the calculator as its tool, and a rubric."""

from pathlib import Path

import verifiers as vf
from calculator import calculate
from datasets import Dataset


def load_environment(folder: str):
    """`folder`: the questions that `python -m examples.prepare agents` wrote, train.parquet and test.parquet."""

    def questions(split: str) -> Dataset:
        rows = Dataset.from_parquet(str(Path(folder) / f"{split}.parquet"))
        found = [(row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]) for row in rows]
        return Dataset.from_list([{"question": question, "answer": answer} for question, answer in found])

    async def right(completion, answer) -> float:
        return float(completion[-1].get("content") == answer)

    rubric = vf.Rubric(funcs=[right])
    data, held_out = questions("train"), questions("test")
    return vf.ToolEnv(dataset=data, eval_dataset=held_out, tools=[calculate], rubric=rubric, max_turns=4)
