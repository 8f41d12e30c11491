"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168), from the data set's own files to prompt files."""

from __future__ import annotations

import re
from pathlib import Path

from megagrpo.data.files import Findings, brief, column_problem, columns, place, records
from megagrpo.data.prepared import Prepared, PromptRow, prompt_row, write_splits
from megagrpo.errors import DataError, Problem

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")

# Folders and names under which the split is published: the hub's parquet export, and the authors' JSONL.
FOLDERS = (".", "main", "data", "grade_school_math/data")
NAMES = ("{split}.parquet", "{split}.jsonl", "{split}-*-of-*.parquet")

_FINAL_ANSWER = re.compile(r"####\s*(.+?)\s*$")
_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+")


def prepare(source: Path, output: Path) -> Prepared:
    """Read both splits from the folder `source`, write train.parquet and test.parquet to `output`.

    Raises DataError if a split is not found, or naming each row without a question or a number after `####`.
    """
    files = {split: _find(source, split) for split in SPLITS}
    problems: list[Problem] = []
    rows: dict[str, list[PromptRow]] = {}
    for split, paths in files.items():
        try:
            rows[split] = _split_rows(paths, split)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return write_splits(
        output, [path for paths in files.values() for path in paths], train=rows["train"], test=rows["test"]
    )


def final_answer(solution: str) -> str | None:
    """The number after the last `####`, without thousands separators; None if there is none."""
    match = _FINAL_ANSWER.search(solution[solution.rfind("####") :])
    number = match.group(1).replace(",", "") if match else ""
    return number if _NUMBER.fullmatch(number) else None


def _find(source: Path, split: str) -> list[Path]:
    if not source.is_dir():
        raise DataError(
            Problem(f"{source}: no such folder", needed="the folder with GSM8K's own parquet or JSONL files")
        )
    for folder in FOLDERS:
        for name in NAMES:
            paths = sorted((source / folder).glob(name.format(split=split)))
            if paths:
                return paths
    raise DataError(
        Problem(
            f"{source}: no file of the {split} split",
            given=", ".join(sorted(path.name for path in source.iterdir())) or "an empty folder",
            needed=" or ".join(name.format(split=split) for name in NAMES) + f" in it, or in {', '.join(FOLDERS[1:])}",
        )
    )


def _split_rows(paths: list[Path], split: str) -> list[PromptRow]:
    rows: list[PromptRow] = []
    problems: list[Problem] = []
    for path in paths:
        findings = Findings(path)
        present = columns(path)
        if present:
            findings.add(column_problem(path, name, present) for name in ("question", "answer") if name not in present)
        if not findings.count:
            for number, record in records(path, ("question", "answer")):
                row = record if isinstance(record, Problem) else _row(record, split, len(rows), place(path, number))
                if isinstance(row, Problem):
                    findings.add([row])
                else:
                    rows.append(row)
        problems += findings.problems()
    if problems:
        raise DataError(problems)
    if not rows:
        raise DataError(Problem(f"{paths[0]}: the file has no rows", needed="at least one row"))
    return rows


def _row(record: dict[str, object], split: str, index: int, where: str) -> PromptRow | Problem:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not question.strip():
        return Problem(f"{where}: no question", given=brief(question), needed="text in the column question")
    ground_truth = final_answer(answer) if isinstance(answer, str) else None
    if ground_truth is None:
        given = brief(answer[-60:]) if isinstance(answer, str) else brief(answer)
        return Problem(
            f"{where}: no final answer", given=f"an answer that ends {given}", needed="`#### NUMBER` at its end"
        )
    return prompt_row(
        question=f"{question} {INSTRUCTION}",
        ground_truth=ground_truth,
        data_source=DATA_SOURCE,
        ability="math",
        extra_info={"split": split, "index": index, "question": question, "answer": answer},
    )
