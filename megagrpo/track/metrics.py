"""The table of all metrics: metrics.yaml, which is read once it is needed. docs/metrics.md is made from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


class UndocumentedMetric(UserWarning):
    """A metric that is not in the table was logged. Tests turn this warning into an error."""


@dataclass(frozen=True)
class Metric:
    """One metric. A {placeholder} in the name stands for any text."""

    name: str
    unit: str
    meaning: str


@cache
def documented() -> tuple[Metric, ...]:
    """Reads the table."""
    text = Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")
    return tuple(Metric(*row) for row in yaml.safe_load(text))


def undocumented(names: Iterable[str]) -> list[str]:
    """Returns the names that are not in the table."""
    return [name for name in names if not _pattern().fullmatch(name)]


def metric_of(name: str) -> Metric | None:
    """Returns the table's entry for a name: the one of that name, or else the one with the longest pattern for it."""
    known = [metric for metric, pattern in _patterns() if pattern.fullmatch(name)]
    return max(known, key=lambda metric: (metric.name == name, len(metric.name)), default=None)


@cache
def described(name: str) -> str:
    """Returns meaning and unit of a metric; empty if it is not in the table."""
    if (metric := metric_of(name)) is None:
        return ""
    return f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning


@cache
def _pattern() -> re.Pattern[str]:
    return re.compile("|".join(pattern.pattern for _, pattern in _patterns()))


@cache
def _patterns() -> list[tuple[Metric, re.Pattern[str]]]:
    return [(metric, re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(metric.name)))) for metric in documented()]


def as_markdown() -> str:
    """Returns the table as docs/metrics.md has it."""
    lines = [
        "# Metrics",
        "",
        "What each step logs, to every tracker. Step 0 is the evaluation before training.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
        *(f"| `{m.name}` | {m.unit} | {m.meaning.replace('|', chr(92) + '|')} |" for m in documented()),
        "",
        "MLflow allows no `@` in a name: there `eval/gsm8k/mean@1` is `eval/gsm8k/mean_at_1`.",
        "In `metrics.jsonl` a value that is not a finite number is `null`.",
        "",
        "Written by `python -m megagrpo.track.metrics` from `megagrpo/track/metrics.yaml`.",
    ]
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
