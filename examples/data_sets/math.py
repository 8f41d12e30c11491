r"""`python -m examples.prepare math`: MATH's own files (Hendrycks et al. 2021, arXiv:2103.03874) to prompt files.

They are a JSON file for each problem, in folders for splits and subjects, or parquet and JSONL files for each split.
The ground truth is the content of the last \boxed{} of the solution.
"""

from __future__ import annotations

from pathlib import Path

from examples.data_sets.source import Splits
from megagrpo.data.files import Record
from megagrpo.data.prepare import PromptRow, prompt_row
from megagrpo.errors import Problem, brief
from megagrpo.reward.answer_text import last_boxed

INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
KEPT = ("level", "type", "subject", "unique_id")


def boxed_answer(solution: str) -> str | None:
    r"""Returns the content of the last \boxed{…} or \fbox{…} of a solution; None if it is missing or empty."""
    return (last_boxed(solution) or "").strip() or None


def _row(record: Record, path: Path, place: dict[str, object]) -> PromptRow:
    others = {name: record[name] for name in KEPT if record.get(name) is not None}
    texts = {"problem": record["problem"], "solution": record["solution"], "file": path.name}
    return prompt_row(
        question=f"{record['problem']} {INSTRUCTION}",
        ground_truth=str(boxed_answer(record["solution"])),
        data_source="hendrycks/math",
        ability="math",
        extra_info={**others, **texts, **place},
    )


def _problems(record: Record, where: str) -> list[Problem]:
    problem, solution = record.get("problem"), record.get("solution")
    if not isinstance(problem, str) or not problem.strip():
        return [Problem(f"{where}: no problem", given=brief(problem), needed="text in the column problem")]
    if not isinstance(solution, str) or boxed_answer(solution) is None:
        given = f"a solution that ends {brief(solution[-60:] if isinstance(solution, str) else solution)}"
        return [Problem(f"{where}: no final answer", given=given, needed=r"a \boxed{ANSWER} in it")]
    return []


prepare = Splits(
    name="MATH",
    folders=(".", "MATH", "data", "*"),
    names=("{split}/*/*.json", "{split}.parquet", "{split}.jsonl", "{split}-*-of-*.parquet"),
    columns=("problem", "solution"),
    problems_of=_problems,
    row=_row,
).prepare
