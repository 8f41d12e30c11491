"""Prompt files (data/rows.py), written of rows, or of a user's questions and answers."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megagrpo.data.files import Record
from megagrpo.data.locations import suffix_of
from megagrpo.data.mixture import permutation
from megagrpo.data.overlap import same_text
from megagrpo.data.rows import read, simple_schema, text_problems
from megagrpo.errors import DataError, Problem, brief, first_line

PromptRow = dict[str, Any]
FOR_PARQUET = "one type in all rows of a column, no object without fields, integers below 2^63, valid Unicode"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files written, and their rows. `test` is None if nothing was held out."""

    train: Path
    train_rows: int
    test: Path | None
    test_rows: int

    def __str__(self) -> str:
        held_out = "" if self.test is None else f"\n{self.test_rows} rows in {self.test}"
        return f"{self.train_rows} rows in {self.train}{held_out}"


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

    def row_of(record: Record, number: int, where: str) -> tuple[str, Record] | list[Problem]:
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
        return problems or (where, record)

    named = "the file's columns, and name yours: --prompt-column NAME, --answer-column NAME"
    located = read(source, simple_schema((prompt_column, answer_column), row_of, named))
    if problems := list(_column_problems(located, answer_column)):
        raise DataError(problems)
    records = [record for _, record in located]
    held_out = _held_out([record[prompt_column] for record in records], test_share, seed)
    splits: dict[str, list[PromptRow]] = {"train": [], "test": []}
    for record in records:
        question = record[prompt_column]
        rows = splits["test" if same_text(question) in held_out else "train"]
        others = {name: value for name, value in record.items() if name != answer_column}
        given = record.get("data_source")
        named = given if isinstance(given, str) and given.strip() else source.name.removesuffix(suffix_of(source.name))
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


def _column_problems(located: Sequence[tuple[str, Record]], answer_column: str) -> Iterator[Problem]:
    """Yields a problem for each column that parquet cannot hold, at the first row whose value conflicts with those
    before it. Answers may be of any kind."""
    for name in dict.fromkeys(name for _, record in located for name in record if name != answer_column):
        values = [record.get(name) for _, record in located]
        if _fits(values):
            continue
        first = bisect_left(range(len(values)), True, key=lambda last: not _fits(values[: last + 1]))
        where, record = located[first]
        given, fix = brief(record.get(name)), "make them texts (JSON), or leave the column out"
        yield Problem(f"{where}, {name}", f"{given}, which parquet cannot hold here", FOR_PARQUET, fix)


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
        raise DataError(Problem(f"{output}: the output would overwrite its own source", given, "another output folder"))
    if not test and (older := output / "test.parquet").exists():
        given = "a file of held-out rows that is here already, and none to replace it"
        fix = "remove it, or name another output folder"
        raise DataError(Problem(str(older), given, "no rows that may be trained on too", fix))
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in splits}
    tables: dict[Path, pa.Table] = {}
    try:
        for path, rows in splits.items():
            tables[path] = pa.Table.from_pylist(rows)
        output.mkdir(parents=True, exist_ok=True)
        for path, table in tables.items():
            pq.write_table(table, parts[path])
        for path, part in parts.items():
            part.replace(path)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise DataError(Problem(f"{path}: parquet cannot hold the rows", first_line(error), FOR_PARQUET)) from None
    except OSError as error:
        raise DataError(Problem(f"{output}: cannot be written", str(error), "a folder that can be written")) from None
    finally:
        for part in parts.values():
            if part.exists():
                part.unlink()
    return Prepared(output / "train.parquet", len(train), output / "test.parquet" if test else None, len(test))
