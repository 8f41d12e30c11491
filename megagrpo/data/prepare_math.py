"""`megagrpo prepare math`: MATH's own files (Hendrycks et al. 2021, arXiv:2103.03874) to prompt files.

They are a JSON file for each problem, in folders for splits and subjects, or parquet and JSONL files for each split.
"""

from __future__ import annotations

from pathlib import Path

from megagrpo.boxed import last_boxed
from megagrpo.data.files import Record
from megagrpo.data.prepare import Prepared, PromptRow, prompt_row, record_schema, split_files, write_splits
from megagrpo.data.rows import read
from megagrpo.errors import DataError, Problem, brief

SOURCE = "hendrycks/math"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
FOLDERS = (".", "MATH", "data", "*")
NAMES = ("{split}/*/*.json", "{split}.parquet", "{split}.jsonl", "{split}-*-of-*.parquet")


def prepare_math(source: Path, output: Path) -> Prepared:
    r"""Reads both splits from `source`, writes train.parquet and test.parquet to `output`. The ground truth is the
    content of the last \boxed{} of the solution.

    Raises DataError if a split is not found, or naming each row without a problem or a boxed answer.
    """
    problems: list[Problem] = []
    rows: dict[str, list[PromptRow]] = {}
    sources: list[Path] = []
    schema = record_schema(("problem", "solution"), _problems)
    for split in ("train", "test"):
        rows[split] = []
        paths = split_files(source, split, FOLDERS, NAMES, "MATH")
        sources += paths
        for path in paths:
            try:
                rows[split] += [_row(record, path) for record in read(path, schema)]
            except DataError as error:
                problems += error.problems
        for index, row in enumerate(rows[split]):
            row["extra_info"] |= {"split": split, "index": index}
    if problems:
        raise DataError(problems)
    return write_splits(output, sources, train=rows["train"], test=rows["test"])


def boxed_answer(solution: str) -> str | None:
    r"""Returns the content of the last \boxed{…} or \fbox{…} of a solution; None if it is missing or empty."""
    return (last_boxed(solution) or "").strip() or None


def _row(record: Record, path: Path) -> PromptRow:
    others = {name: record[name] for name in ("level", "type", "subject", "unique_id") if record.get(name) is not None}
    return prompt_row(
        question=f"{record['problem']} {INSTRUCTION}",
        ground_truth=str(boxed_answer(record["solution"])),
        data_source=SOURCE,
        ability="math",
        extra_info={**others, "problem": record["problem"], "solution": record["solution"], "file": path.name},
    )


def _problems(record: Record, where: str) -> list[Problem]:
    problem, solution = record.get("problem"), record.get("solution")
    if not isinstance(problem, str) or not problem.strip():
        return [Problem(f"{where}: no problem", given=brief(problem), needed="text in the column problem")]
    if not isinstance(solution, str) or boxed_answer(solution) is None:
        given = f"a solution that ends {brief(solution[-60:] if isinstance(solution, str) else solution)}"
        return [Problem(f"{where}: no final answer", given=given, needed=r"a \boxed{ANSWER} in it")]
    return []
