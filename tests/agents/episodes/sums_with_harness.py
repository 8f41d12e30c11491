"""Tasks of verifiers 0.3 and later. Read in an interpreter that has it and nothing else."""

import re

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(re.findall(r"-?\d+", trace.last_reply)[-1:] == [self.data.answer])


def tasks(rows: int) -> list[SumTask]:
    return [SumTask(Sum(idx=i, prompt=f"Sum: {i} {i + 1}", answer=str(2 * i + 1))) for i in range(rows)]
