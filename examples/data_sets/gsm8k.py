"""`python -m examples.prepare gsm8k`: GSM8K's own files (Cobbe et al. 2021, arXiv:2110.14168) to prompt files.

They are the hub's parquet export or the authors' JSONL. The ground truth is the number after `####`.
"""

from __future__ import annotations

import re
from pathlib import Path

from examples.data_sets.source import Splits
from megagrpo.data.files import Record
from megagrpo.data.prepare import PromptRow, prompt_row
from megagrpo.errors import Problem, brief

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_FINAL_ANSWER = re.compile(r"####\s*(.+?)\s*$")
_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+")


def final_answer(solution: str) -> str | None:
    """Returns the number after the last `####`, without thousands separators; None if there is none."""
    match = _FINAL_ANSWER.search(solution[solution.rfind("####") :])
    number = match.group(1).replace(",", "") if match else ""
    return number if _NUMBER.fullmatch(number) else None


def _row(record: Record, path: Path, place: dict[str, object]) -> PromptRow:
    return prompt_row(
        question=f"{record['question']} {INSTRUCTION}",
        ground_truth=str(final_answer(record["answer"])),
        data_source="openai/gsm8k",
        ability="math",
        extra_info={**place, "question": record["question"], "answer": record["answer"]},
    )


def _problems(record: Record, where: str) -> list[Problem]:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not question.strip():
        return [Problem(f"{where}: no question", given=brief(question), needed="text in the column question")]
    if not isinstance(answer, str) or final_answer(answer) is None:
        given = f"an answer that ends {brief(answer[-60:] if isinstance(answer, str) else answer)}"
        return [Problem(f"{where}: no final answer", given=given, needed="`#### NUMBER` at its end")]
    return []


prepare = Splits(
    name="GSM8K",
    folders=(".", "main", "data", "grade_school_math/data"),
    names=("{split}.parquet", "{split}.jsonl", "{split}-*-of-*.parquet"),
    columns=("question", "answer"),
    problems_of=_problems,
    row=_row,
).prepare
