"""`megagrpo prepare`: GSM8K's own files, or a user's questions and answers, to prompt files (data/rows.py)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megagrpo.data.files import Record
from megagrpo.data.mixture import permutation
from megagrpo.data.rows import RowSchema, read, text_problems
from megagrpo.errors import DataError, Problem, brief, first_line

PromptRow = dict[str, Any]

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
# Folders and names under which a split of GSM8K is published: the hub's parquet export, and the authors' JSONL.
GSM8K_FOLDERS = (".", "main", "data", "grade_school_math/data")
GSM8K_NAMES = ("{split}.parquet", "{split}.jsonl", "{split}-*-of-*.parquet")

_FINAL_ANSWER = re.compile(r"####\s*(.+?)\s*$")
_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files written, and their rows. `test` is None if nothing was held out."""

    train: Path
    train_rows: int
    test: Path | None
    test_rows: int


def prepare_gsm8k(source: Path, output: Path) -> Prepared:
    """Reads both splits of GSM8K (Cobbe et al. 2021, arXiv:2110.14168) from `source`, writes train.parquet and
    test.parquet to `output`.

    Raises DataError if a split is not found, or naming each row without a question or a number after `####`.
    """
    files = {split: _gsm8k_files(source, split) for split in ("train", "test")}
    problems: list[Problem] = []
    rows: dict[str, list[PromptRow]] = {}
    for split, paths in files.items():
        try:
            rows[split] = _gsm8k_rows(paths, split)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    sources = [path for paths in files.values() for path in paths]
    return write_splits(output, sources, train=rows["train"], test=rows["test"])


def final_answer(solution: str) -> str | None:
    """The number after the last `####`, without thousands separators; None if there is none."""
    match = _FINAL_ANSWER.search(solution[solution.rfind("####") :])
    number = match.group(1).replace(",", "") if match else ""
    return number if _NUMBER.fullmatch(number) else None


def _gsm8k_files(source: Path, split: str) -> list[Path]:
    if not source.is_dir():
        needed = "the folder with GSM8K's own parquet or JSONL files"
        raise DataError(Problem(str(source), "no such folder", needed))
    for folder in GSM8K_FOLDERS:
        for name in GSM8K_NAMES:
            if paths := sorted((source / folder).glob(name.format(split=split))):
                return paths
    names = " or ".join(name.format(split=split) for name in GSM8K_NAMES)
    given = ", ".join(sorted(path.name for path in source.iterdir())) or "an empty folder"
    needed = f"{names} in it, or in {', '.join(GSM8K_FOLDERS[1:])}"
    raise DataError(Problem(f"{source}: no file of the {split} split", given, needed))


def _gsm8k_rows(paths: list[Path], split: str) -> list[PromptRow]:
    schema = _records(("question", "answer"), (), _gsm8k_problems)
    found: list[Record] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            found += read(path, schema)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return [
        prompt_row(
            question=f"{record['question']} {GSM8K_INSTRUCTION}",
            ground_truth=str(final_answer(record["answer"])),
            data_source=GSM8K_SOURCE,
            ability="math",
            extra_info={"split": split, "index": index, "question": record["question"], "answer": record["answer"]},
        )
        for index, record in enumerate(found)
    ]


def _gsm8k_problems(record: Record, where: str) -> list[Problem]:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not question.strip():
        return [Problem(f"{where}: no question", given=brief(question), needed="text in the column question")]
    if not isinstance(answer, str) or final_answer(answer) is None:
        given = f"an answer that ends {brief(answer[-60:] if isinstance(answer, str) else answer)}"
        return [Problem(f"{where}: no final answer", given=given, needed="`#### NUMBER` at its end")]
    return []


def prepare_jsonl(
    source: Path,
    output: Path,
    *,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    data_source: str | None = None,
    instruction: str = "",
    system_prompt: str = "",
    test_share: float = 0.0,
    seed: int = 0,
) -> Prepared:
    """Turns two columns of `source` into train.parquet and, for `test_share` > 0, test.parquet in `output`.

    The instruction is appended to every prompt after a space. All other columns go to extra_info. The held-out share is
    a share of the different prompts, so that no prompt is in both files. `data_source` defaults to the file's name.
    Raises DataError naming each bad row.
    """
    if not 0 <= test_share < 1:
        needed = "a number from 0 up to, but not, 1"
        raise DataError(Problem("the held-out share is not valid", given=str(test_share), needed=needed))

    def problems_of(record: Record, where: str) -> list[Problem]:
        problems = []
        question, answer = record.get(prompt_column), record.get(answer_column)
        if not isinstance(question, str) or not question.strip():
            problems.append(Problem(f"{where}, {prompt_column}", given=brief(question), needed="text"))
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            problems.append(Problem(f"{where}, {answer_column}", given=brief(answer), needed="text or a number"))
        elif isinstance(answer, float) and not math.isfinite(answer):
            problems.append(Problem(f"{where}, {answer_column}", given=brief(answer), needed="a finite number"))
        for column, value in ((prompt_column, question), (answer_column, answer)):
            problems += text_problems(value, f"{where}, {column}") if isinstance(value, str) else []
        return problems

    named = "the file's columns, and name yours: --prompt-column NAME, --answer-column NAME"
    found = read(source, _records((prompt_column, answer_column), None, problems_of, named))
    held_out = _held_out([record[prompt_column] for record in found], test_share, seed)
    splits: dict[str, list[PromptRow]] = {"train": [], "test": []}
    for record in found:
        question = record[prompt_column]
        rows = splits["test" if question in held_out else "train"]
        others = {name: value for name, value in record.items() if name not in (prompt_column, answer_column)}
        rows.append(
            prompt_row(
                question=f"{question} {instruction}" if instruction else question,
                ground_truth=str(record[answer_column]),
                data_source=data_source if data_source is not None else source.stem,
                system_prompt=system_prompt,
                extra_info={**others, "index": len(rows)},
            )
        )
    return write_splits(output, [source], train=splits["train"], test=splits["test"])


def _held_out(questions: list[str], share: float, seed: int) -> set[str]:
    different = list(dict.fromkeys(questions))
    count = round(share * len(different))
    if share > 0 and not 0 < count < len(different):
        given = f"{share} of {len(different)} different prompts"
        needed = "at least one prompt to train on and one held out"
        raise DataError(Problem("the held-out share leaves a file empty", given, needed))
    return {different[i] for i in permutation(len(different), seed)[:count]}


def _records(
    required: tuple[str, ...],
    optional: tuple[str, ...] | None,
    problems: Callable[[Record, str], list[Problem]],
    documentation: str = "docs/data.md",
) -> RowSchema[Record]:
    """A file whose rows are taken as they are."""
    return RowSchema(required, optional, problems, lambda record, number: record, documentation)


def prompt_row(
    *,
    question: str,
    ground_truth: str,
    data_source: str,
    ability: str = "",
    system_prompt: str = "",
    extra_info: Mapping[str, Any],
) -> PromptRow:
    """One row of a prompt file."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return {
        "data_source": data_source,
        "prompt": [*system, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def write_splits(output: Path, sources: Sequence[Path], *, train: list[PromptRow], test: list[PromptRow]) -> Prepared:
    """Writes `output`/train.parquet and, if there are held-out rows, test.parquet.

    Each is written under a temporary name first; no name changes before all are complete. Raises DataError if a source
    would be overwritten, if the folder cannot be written, or if a column has values of several types.
    """
    splits = {output / f"{name}.parquet": rows for name, rows in (("train", train), ("test", test)) if rows}
    if overwritten := {path.resolve() for path in splits} & {path.resolve() for path in sources}:
        given = ", ".join(str(path) for path in sorted(overwritten))
        where = f"{output}: the output would overwrite its own source"
        raise DataError(Problem(where, given, needed="another output folder"))
    tables = {path: _table(path, rows) for path, rows in splits.items()}
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in splits}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, table in tables.items():
            pq.write_table(table, parts[path])
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        where = f"{output}: cannot be written"
        raise DataError(Problem(where, given=str(error), needed="a folder that can be written")) from None
    finally:
        for part in parts.values():
            if part.exists():
                part.unlink()
    return Prepared(output / "train.parquet", len(train), output / "test.parquet" if test else None, len(test))


def _table(path: Path, rows: list[PromptRow]) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        given, needed = first_line(error), "the same type in every row of a column, integers below 2^63, valid Unicode"
        raise DataError(Problem(f"{path}: the rows do not form a table", given, needed)) from None
