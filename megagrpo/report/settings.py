"""The settings of runs: recipes, versions and starts, each beside those of the other runs; and final values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from megagrpo.report.curves import curves, labels
from megagrpo.report.embed import Part
from megagrpo.report.run import RunRead, Start, starts_of
from megagrpo.track.jsonl import leaves

LAST = 10  # values of a metric that the final one is the mean of
FINAL = ("entropy", "response_tokens/truncated_share", "tokens_per_second", "seconds/step")
"""Metrics of the table of final values, beside those of a run's health."""
OF_A_START = ("time", "command", "directory")
"""Entries of environment.json that differ at each start, so that they are no change to tell."""


def settings_parts(runs: Sequence[RunRead]) -> list[Part]:
    """Returns recipes, versions and starts; with several runs, final values first."""
    names = labels(runs)
    recipes = [json_by_path(run.recipe) for run in runs]
    paths = list(dict.fromkeys(path for recipe in recipes for path in recipe))
    values = {"runs": names, "paths": paths, "values": [[recipe.get(path) for path in paths] for recipe in recipes]}
    final = [Part("final", "Final values", _final(runs, names))] if len(runs) > 1 else []
    versions = _compared([json_by_path(run.environment) for run in runs], names)
    starts = "".join(
        f"{f'<h3>{escape(name)}</h3>' if len(runs) > 1 else ''}{_starts(starts_of(run))}"
        for run, name in zip(runs, names, strict=True)
    )
    recipe = Part("recipe", "Recipe", data={"recipe": values}, scripts=("settings.js",))
    return [*final, recipe, Part("versions", "Versions", versions), Part("starts", "Starts", starts)]


def json_by_path(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns each leaf of nested values as JSON, by its path."""
    return {path: json.dumps(value, ensure_ascii=False, default=str) for path, value in leaves(values)}


def _final(runs: Sequence[RunRead], names: Sequence[str]) -> str:
    """Returns a row for each metric: its final value in each run, and the difference from the first run's."""
    metrics = sorted({name for run in runs for name in run.metrics})
    patterns = (*(curve["metric"] for kind in ("grpo", "sft") for curve in curves()[kind]), *FINAL)
    rows = []
    for name in dict.fromkeys(name for pattern in patterns for name in metrics if re.fullmatch(pattern, name)):
        values = [_last(run, name) for run in runs]
        cells = [_cell(value, values[0] if number else None) for number, value in enumerate(values)]
        rows.append((f"<code>{escape(name)}</code>", *cells))
    note = f"Mean of the last {LAST} values of a metric that every step has; otherwise the last."
    note += " In brackets: the difference to the first run."
    steps = ("steps", *(f"{run.steps[-1]:,}" if len(run.steps) else "0" for run in runs))
    return f"<p class='soft small'>{note}</p>{_table(('metric', *map(escape, names)), [steps, *rows])}"


def _last(run: RunRead, name: str) -> float | None:
    values = run.known(name)[1]
    if not len(values):
        return None
    return float(np.mean(values[-LAST:] if len(values) > len(run.steps) / 2 else values[-1:]))


def _cell(value: float | None, first: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" + (f" <span class=soft>({value - first:+.3g})</span>" if first is not None else "")


def _compared(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """Returns a row for each path. facts: of each run, JSON by path. Rows in which runs differ are marked."""
    rows, kinds = [], []
    for path in dict.fromkeys(path for fact in facts for path in fact):
        values = [fact.get(path, "–").strip('"') for fact in facts]
        rows.append((escape(path), *map(escape, values)))
        kinds.append("differs" if len({*values}) > 1 and path not in OF_A_START else "")
    if not rows:
        return "<p class=soft>This directory has no environment.json.</p>"
    return _table(("", *map(escape, names)) if len(names) > 1 else (), rows, kinds)


def _starts(starts: Sequence[Start]) -> str:
    """Returns a row for each start: its time, its first step, and the changes since the start before."""
    if not starts:
        return "<p class=soft>This directory has no numbered recipes.</p>"
    rows = []
    for number, start in enumerate(starts):
        before = starts[number - 1] if number else start
        pairs = ((before.recipe, start.recipe), (before.environment, start.environment))
        changed = "<br>".join(
            f"<code>{escape(path)}</code>: {escape(old.get(path, '–'))} → {escape(new.get(path, '–'))}"
            for old, new in (map(json_by_path, pair) for pair in pairs)
            for path in dict.fromkeys((*old, *new))
            if path not in OF_A_START and old.get(path) != new.get(path)
        )
        rows.append(
            (
                str(start.number),
                f"<span class=name>{escape(str(start.environment.get('time', '–')))}</span>",
                "–" if start.first is None else f"{start.first:,}",
                f"<code>{escape(str(start.environment.get('command', '–')))}</code>",
                changed or ("nothing" if number else "–"),
            )
        )
    return _table(("start", "time", "first step", "command", "changed since the start before"), rows)


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """Returns a table in HTML. Cells are HTML. kinds: a class for each row."""
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = ""
    for number, row in enumerate(rows):
        kind = f" class={kinds[number]}" if kinds and kinds[number] else ""
        body += f"<tr{kind}><td class=name>{row[0]}</td>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>"
    shown = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<div class=scroll><table>{shown}<tbody>{body}</tbody></table></div>"
