"""`python -m examples.prepare livecodebench`: LiveCodeBench's own files (arXiv:2403.07974) to a prompt file.

Their private tests are text that was pickled, packed and encoded. Only text is unpickled here.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any, NoReturn

from examples.data_sets.source import records_of
from megagrpo.data.files import Record
from megagrpo.data.locations import files_of
from megagrpo.data.prepare import Prepared, PromptRow, prompt_row, write_splits
from megagrpo.errors import Problem, brief, first_line

SOURCE = "livecodebench"
STDIN = "Write a Python program that reads from standard input and writes to standard output, in a fenced code block."
STARTER = "Complete this Python code, and answer with all of it in a fenced code block:\n```python\n{code}\n```"
COLUMNS = ("question_content", "public_test_cases", "private_test_cases", "metadata")
KEPT: tuple[str, ...] = ("question_id", "platform", "difficulty", "contest_date")
TESTS_BYTES_MAX = 2**30
"""The most that the tests of one problem take, unpacked."""


def prepare(source: Path, output: Path) -> Prepared:
    """Reads the JSONL files in `source` (or that one file), writes train.parquet to `output`; its ground truths are all
    tests, as JSON.

    Raises DataError naming each row that cannot be read.
    """
    paths = list(map(Path, files_of(str(source))))
    rows = [_row(record) for _, record in records_of(paths, COLUMNS, _problems)]
    return write_splits(output, paths, train=rows, test=[])


def unpacked_tests(text: str) -> list[dict[str, Any]]:
    """Returns the test cases, from JSON or from LiveCodeBench's packed form of it. Raises ValueError."""
    try:
        cases = json.loads(text)
    except ValueError:
        cases = json.loads(_unpickled(text))
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "output" in case for case in cases):
        raise ValueError(f"{brief(cases)} is no list of test cases")
    return cases


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in it, where only text should be")


def _unpickled(text: str) -> str:
    try:
        packed = base64.b64decode(text, validate=True)
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(packed, TESTS_BYTES_MAX)
        if unpacker.unconsumed_tail:
            raise ValueError(f"more than {TESTS_BYTES_MAX:,} bytes of tests")
        value = _TextOnly(io.BytesIO(content)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError) as error:
        raise ValueError(f"neither JSON nor what LiveCodeBench makes of it: {first_line(error)}") from None
    if not isinstance(value, str):
        raise ValueError(f"{brief(value)} where text should be")
    return value


def _row(record: Record) -> PromptRow:
    tests = {
        "public_test_cases": unpacked_tests(record["public_test_cases"]),
        "private_test_cases": unpacked_tests(record["private_test_cases"]),
        "metadata": _metadata(record),
    }
    code = record.get("starter_code")
    others = {name: record[name] for name in KEPT if name in record}
    return prompt_row(
        question=f"{record['question_content']}\n\n{STARTER.format(code=code) if code else STDIN}",
        ground_truth=json.dumps(tests, ensure_ascii=False),
        data_source=SOURCE,
        ability="code",
        extra_info=others,
    )


def _metadata(record: Record) -> dict[str, Any]:
    given = record["metadata"]
    return dict((json.loads(given) if isinstance(given, str) else given) or {})


def _problems(record: Record, where: str) -> list[Problem]:
    content = record["question_content"]
    if not isinstance(content, str) or not content.strip():
        return [Problem(f"{where}: no question", given=brief(content), needed="text in the column question_content")]
    for column in ("public_test_cases", "private_test_cases"):
        try:
            unpacked_tests(record[column])
        except (ValueError, TypeError, RecursionError) as error:
            return [Problem(f"{where}, {column}", first_line(error), "test cases as LiveCodeBench publishes them")]
    try:
        _metadata(record)
    except (ValueError, TypeError, RecursionError) as error:
        return [Problem(f"{where}, metadata", first_line(error), "an object as JSON")]
    return []
