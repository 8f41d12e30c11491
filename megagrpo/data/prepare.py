"""`megagrpo prepare`: GSM8K's own files, or a user's questions and answers, to prompt files (data/rows.py)."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megagrpo.data.files import Record
from megagrpo.data.locations import suffix_of
from megagrpo.data.mixture import permutation
from megagrpo.data.overlap import same_text
from megagrpo.data.rows import SchemaOf, read, simple_schema, text_problems
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
    files = {split: split_files(source, split, GSM8K_FOLDERS, GSM8K_NAMES, "GSM8K") for split in ("train", "test")}
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
    """Returns the number after the last `####`, without thousands separators; None if there is none."""
    match = _FINAL_ANSWER.search(solution[solution.rfind("####") :])
    number = match.group(1).replace(",", "") if match else ""
    return number if _NUMBER.fullmatch(number) else None


def split_files(source: Path, split: str, folders: Sequence[str], names: Sequence[str], what: str) -> list[Path]:
    """Returns the files of a split: all matches of the first of `names` that has any, in the first of `folders`.

    Raises DataError if there is none.
    """
    if not source.is_dir():
        needed = f"the folder with {what}'s own files"
        raise DataError(Problem(str(source), "no such folder", needed))
    for folder in folders:
        for name in names:
            if paths := sorted(source.glob(f"{folder}/{name.format(split=split)}")):
                return paths
    tried = " or ".join(name.format(split=split) for name in names)
    given = ", ".join(sorted(path.name for path in source.iterdir())) or "an empty folder"
    needed = f"{tried} in it, or in {', '.join(folders[1:])}"
    raise DataError(Problem(f"{source}: no file of the {split} split", given, needed))


def _gsm8k_rows(paths: list[Path], split: str) -> list[PromptRow]:
    schema = record_schema(("question", "answer"), _gsm8k_problems)
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
    """Converts two columns of `source` into train.parquet and, for `test_share` > 0, test.parquet in `output`.

    The instruction is appended to every prompt after a space. The unchanged question and all other columns go to
    extra_info, with an `index` if they have none. `test_share` is a share of the prompts that differ in more than case
    and white space, so that no prompt is in both files. `data_source` defaults to the row's own, else the file's name.
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
    located = read(source, _located((prompt_column, answer_column), problems_of, named))
    if problems := list(_column_problems(located, answer_column)):
        raise DataError(problems)
    found = [record for _, record in located]
    held_out = _held_out([record[prompt_column] for record in found], test_share, seed)
    splits: dict[str, list[PromptRow]] = {"train": [], "test": []}
    for record in found:
        question = record[prompt_column]
        rows = splits["test" if same_text(question) in held_out else "train"]
        others = {name: value for name, value in record.items() if name != answer_column}
        own = record.get("data_source")
        named = own if isinstance(own, str) and own.strip() else source.name.removesuffix(suffix_of(source.name))
        rows.append(
            prompt_row(
                question=f"{question} {instruction}" if instruction else question,
                ground_truth=str(record[answer_column]),
                data_source=data_source if data_source is not None else named,
                system_prompt=system_prompt,
                extra_info={"index": len(rows), **others},
            )
        )
    return write_splits(output, [source], train=splits["train"], test=splits["test"])


def _located(
    required: tuple[str, ...], problems: Callable[[Record, str], list[Problem]], documentation: str
) -> SchemaOf[tuple[str, Record]]:
    """Returns the schema of record_schema with rows (place, record)."""
    return simple_schema(
        required, lambda record, number, where: problems(record, where) or (where, record), documentation
    )


def _column_problems(located: Sequence[tuple[str, Record]], answer_column: str) -> Iterator[Problem]:
    """Yields a problem for each column that parquet cannot hold, at the first row whose value conflicts with those
    before it. Answers may be of any kind."""
    for name in dict.fromkeys(name for _, record in located for name in record if name != answer_column):
        values = [record.get(name) for _, record in located]
        if _fits(values):
            continue
        first = bisect_left(range(len(values)), True, key=lambda last: not _fits(values[: last + 1]))
        where, record = located[first]
        needed = "one type in all rows of a column, objects with fields, integers below 2^63, valid Unicode"
        fix = "make them texts (JSON), or leave the column out"
        yield Problem(f"{where}, {name}", f"{brief(record.get(name))}, which parquet cannot hold here", needed, fix)


def _fits(values: Sequence[Any]) -> bool:
    try:
        pq.write_table(pa.table({"column": values}), pa.BufferOutputStream())
    except (pa.ArrowException, OverflowError, UnicodeError):
        return False
    return True


def _held_out(questions: list[str], share: float, seed: int) -> set[str]:
    """Returns the `same_text` forms of the prompts that are held out."""
    different = list(dict.fromkeys(map(same_text, questions)))
    count = round(share * len(different))
    if share > 0 and not 0 < count < len(different):
        given = f"{share} of {len(different)} different prompts"
        needed = "at least one prompt to train on and one held out"
        raise DataError(Problem("the held-out share leaves a file empty", given, needed))
    return {different[i] for i in permutation(len(different), seed)[:count]}


def record_schema(
    required: tuple[str, ...],
    problems: Callable[[Record, str], list[Problem]],
    documentation: str = "docs/data.md",
) -> SchemaOf[Record]:
    """Returns the schema of a file whose rows are kept unchanged."""
    return simple_schema(required, lambda record, number, where: problems(record, where) or record, documentation)


def prompt_row(
    *,
    question: str,
    ground_truth: str,
    data_source: str,
    ability: str = "",
    system_prompt: str = "",
    extra_info: Mapping[str, Any],
) -> PromptRow:
    """Returns one row of a prompt file."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return {
        "data_source": data_source,
        "prompt": [*system, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info) or None,  # parquet has no objects without fields
    }


def write_splits(output: Path, sources: Sequence[Path], *, train: list[PromptRow], test: list[PromptRow]) -> Prepared:
    """Writes `output`/train.parquet and, if there are held-out rows, test.parquet.

    Each is written under a temporary name first; no name changes before all are complete. Raises DataError if a source
    would be overwritten, if an older test.parquet would stay beside the new rows, if the folder cannot be written, or
    if a column has values of several types.
    """
    splits = {output / f"{name}.parquet": rows for name, rows in (("train", train), ("test", test)) if rows}
    if overwritten := {path.resolve() for path in splits} & {path.resolve() for path in sources}:
        given = ", ".join(str(path) for path in sorted(overwritten))
        where = f"{output}: the output would overwrite its own source"
        raise DataError(Problem(where, given, needed="another output folder"))
    if not test and (older := output / "test.parquet").exists():
        given = "a file of held-out rows that is here already, and none to replace it"
        fix = "remove it, or name another output folder"
        raise DataError(Problem(str(older), given, "no rows that may be trained on too", fix))
    tables = {path: _table(path, rows) for path, rows in splits.items()}
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in splits}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, table in tables.items():
            pq.write_table(table, parts[path])
        for path, part in parts.items():
            part.replace(path)
    except pa.ArrowException as error:
        given, needed = first_line(error), "columns that parquet can hold: no objects without fields"
        raise DataError(Problem(f"{output}: the rows cannot be written as parquet", given, needed)) from None
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
