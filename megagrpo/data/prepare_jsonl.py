"""A user's own questions and answers, JSONL or parquet, to prompt files."""

from __future__ import annotations

from pathlib import Path

from megagrpo.data.files import Findings, Record, brief, column_problem, columns, place, records
from megagrpo.data.order import permutation
from megagrpo.data.prepared import Prepared, prompt_row, write_splits
from megagrpo.errors import DataError, Problem


def prepare(
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
    """Turn the two columns of `source` into train.parquet and, for `test_share` > 0, test.parquet in `output`.

    The instruction is appended to every prompt after a space. All other columns go to extra_info. The held-out share is
    a share of the different prompts, so that no prompt is in both files. `data_source` defaults to the file's name.
    Raises DataError naming each bad row.
    """
    if not 0 <= test_share < 1:
        raise DataError(
            Problem(
                "the held-out share is not valid", given=str(test_share), needed="a number from 0 up to, but not, 1"
            )
        )
    read = _read(source, prompt_column, answer_column)
    held_out = _held_out([record[prompt_column] for record in read], test_share, seed)
    splits: dict[str, list[dict[str, object]]] = {"train": [], "test": []}
    for record in read:
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


def _read(source: Path, prompt_column: str, answer_column: str) -> list[Record]:
    findings = Findings(source)
    present = columns(source)
    wanted = (prompt_column, answer_column)
    if present:
        findings.add(column_problem(source, name, present) for name in wanted if name not in present)
    findings.raise_if_any()
    read: list[Record] = []
    for number, record in records(source):
        if isinstance(record, Problem):
            findings.add([record])
            continue
        problems = _row_problems(record, prompt_column, answer_column, place(source, number))
        findings.add(problems)
        if not problems:
            read.append(record)
    findings.raise_if_any()
    if not read:
        raise DataError(Problem(f"{source}: the file has no rows", needed="at least one row"))
    return read


def _row_problems(record: Record, prompt_column: str, answer_column: str, where: str) -> list[Problem]:
    problems = []
    question, answer = record.get(prompt_column), record.get(answer_column)
    if not isinstance(question, str) or not question.strip():
        problems.append(Problem(f"{where}, {prompt_column}", given=brief(question), needed="text"))
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        problems.append(Problem(f"{where}, {answer_column}", given=brief(answer), needed="text or a number"))
    return problems


def _held_out(questions: list[str], share: float, seed: int) -> set[str]:
    different = list(dict.fromkeys(questions))
    count = round(share * len(different))
    if share > 0 and not 0 < count < len(different):
        raise DataError(
            Problem(
                "the held-out share leaves a file empty",
                given=f"{share} of {len(different)} different prompts",
                needed="at least one prompt to train on and one held out",
            )
        )
    return {different[i] for i in permutation(len(different), seed)[:count]}
