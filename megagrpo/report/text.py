"""The texts of `megagrpo report --mismatch` and `--rollout`. Reads files only."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, ReportError, brief, first_line, printable
from megagrpo.report.rollouts import read_rollouts
from megagrpo.report.run import read_yaml, require_directory
from megagrpo.track.conversation import CONVERSATION, conversation
from megagrpo.track.jsonl import MISMATCH_FIGURES, MISMATCH_FILE, MismatchRecord, WorstToken
from megagrpo.track.rollout_files import ROLLOUTS, rollout_steps

WORST_SHOWN = 10
QUANTIZED = (
    "rollout.quantization is fp8: part of every figure is rounding in the engines. On a small model that alone made\n"
    "mean 0.00038, p99 0.0022, k3 6e-05 (emulated on CPUs, docs/mismatch.md#float8). How much it is of your model, a\n"
    "run with quantization: null shows."
)
"""Text for runs with fp8 engines; benchmarks/quantization.py measured the figures."""
CHARACTERS_BEFORE = 30
CHARACTERS_AFTER = 10
KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str}


def mismatch_report(directory: Path, steps: int) -> str:
    """Reports the mismatch of train and rollout logprobs; tables show the last `steps` steps. Raises ReportError."""
    require_directory(directory)
    records, recipe = read_mismatch(directory), read_yaml(directory / "recipe.yaml")
    if not records and recipe.get("kind") == "sft":
        return f"A fine-tuning run has no rollouts to compare. Its losses are in {directory / 'metrics.jsonl'}."
    rollout = recipe.get("rollout")
    quantized = isinstance(rollout, dict) and rollout.get("quantization") == "fp8"
    return "\n".join([*_tables(records, steps), *(["", QUANTIZED] if quantized else [])])


def rollout_report(directory: Path, step: int, number: int) -> str:
    """Returns one rollout of a step as a conversation. number: from 0, among the step's kept ones, evaluations last.

    Raises ReportError.
    """
    rollouts, where = read_rollouts(directory, [step], CONVERSATION), str(directory / ROLLOUTS)
    if number < len(rollouts):
        try:
            return conversation(rollouts.slice(number, 1).to_pylist()[0])
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            needed = "a rollout as a run writes it"
            raise ReportError(Problem(f"{where}: step {step}, rollout {number}", first_line(error), needed)) from error
    steps = rollout_steps(directory)
    if not steps:
        needed = "the directory of a run that has finished a step, with track.rollouts other than null"
        raise ReportError(Problem(where, "no rollouts", needed))
    if not len(rollouts):
        there = f"one of steps {steps[0]} to {steps[-1]}"
        raise ReportError(Problem(where, f"step {step}, of which there are no rollouts", there))
    needed = f"a number from 0 to {len(rollouts) - 1}"
    raise ReportError(Problem(where, f"rollout {number} of step {step}", needed))


def read_mismatch(directory: Path) -> list[MismatchRecord]:
    """Reads every whole line of the run's mismatch.jsonl; a last line that is still being written is left out.

    Numbers that were not finite are NaN. Raises ReportError if there is no such file, or if it is not one of ours.
    """
    path = directory / MISMATCH_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        needed = f"the directory of a run that has started: each writes {MISMATCH_FILE}"
        raise ReportError(Problem(str(path), error.strerror or str(error), needed)) from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            raise ReportError(
                Problem(f"{path}:{number}", given=f"{line[:80]} ({error})", needed=f"a line that {MISMATCH_FILE} has")
            ) from error
    return records


def _tables(records: Sequence[MismatchRecord], steps: int) -> list[str]:
    """Returns lines of text: the last `steps` records, and the worst tokens of all records."""
    title = "Train-versus-rollout mismatch: train logprob - rollout logprob of the trained response tokens, in nats"
    if not records:
        return [title, "No step has trained on any token yet."]
    shown = records[-steps:]
    of = f"the last {len(shown)} of {len(records)} steps" if len(shown) < len(records) else "all steps"
    rows = [
        [str(record.step), str(record.tokens), *(_number(getattr(record, name)) for name in MISMATCH_FIGURES)]
        for record in shown
    ]
    tokens = ((record.step, token) for record in records for token in record.worst)
    worst = heapq.nlargest(WORST_SHOWN, tokens, key=lambda found: _sortable(found[1].difference))
    return [
        title,
        "",
        f"By step ({of}; mean, p99 and max of the absolute difference):",
        *_table(("step", "tokens", *MISMATCH_FIGURES), rows),
        "",
        "Worst tokens of all steps, 【marked】 in their text:",
        *_table(
            ("step", "difference", "train", "rollout", "version", "prompt", "sample", "position", "text"),
            [_token_row(step, token) for step, token in worst],
            left=("prompt", "text"),
        ),
    ]


def _token_row(step: int, token: WorstToken) -> list[str]:
    before, after = _line(token.before)[-CHARACTERS_BEFORE:], _line(token.after)[:CHARACTERS_AFTER]
    return [
        str(step),
        _number(token.difference),
        _number(token.train_logprob, ".4f"),
        _number(token.rollout_logprob, ".4f"),
        str(token.weight_version),
        _line(token.prompt_id),
        str(token.sample),
        str(token.position),
        f"{before}【{_line(token.text)}】{after}",
    ]


def _record(values: dict[str, Any]) -> MismatchRecord:
    worst = tuple(WorstToken(**_numbers(token)) for token in values["worst"])
    record = MismatchRecord(**_numbers({**values, "worst": worst}))
    parts: list[MismatchRecord | WorstToken] = [record, *worst]
    for part in parts:
        for field in fields(part):
            if not isinstance(value := getattr(part, field.name), KINDS.get(str(field.type), object)):
                raise TypeError(f"{field.name} is {brief(value)}")
    return record


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _sortable(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _number(value: float, form: str = ".3g") -> str:
    return "not finite" if math.isnan(value) else f"{value:{form}}"


def _line(text: str) -> str:
    """Returns `text` in one line."""
    return printable(text).replace("\n", "\\n")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Returns a text table, columns two spaces apart. Columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if heading in left else text.rjust(width)
            for heading, text, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in (headings, *rows)
    ]
