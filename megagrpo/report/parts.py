"""The parts of a page, except its samples, and the columns that a page carries.

The five curves that show a run's health, with the rules that fire; every other metric; a run's time and memory, beside
the predictions of its plan; recipes, versions and starts, each beside those of the other runs; and final values.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from typing import Any

import numpy as np

from megagrpo.plan.units import byte_text, second_text
from megagrpo.report.rules import HELD_OUT, RULES, firings
from megagrpo.report.run import RunRead, Start, starts_of
from megagrpo.section import table_beside
from megagrpo.track.jsonl import PLAN_FILE, finite, leaves, read_json
from megagrpo.track.metrics import metric_of

Columns = Mapping[str, Any]
"""Values of JSON, and numpy arrays as values of this mapping or of mappings in it. NaN may be in arrays only."""

ARRAY = "$array"
ALIGNMENT = 8  # bytes; a typed array begins at a multiple of its item's size
TYPES = {"f4": "Float32Array", "f8": "Float64Array", "i4": "Int32Array", "i2": "Int16Array", "i1": "Int8Array",
         "u4": "Uint32Array", "u2": "Uint16Array", "u1": "Uint8Array"}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A section of the page.

    anchor: its id. html: its content, before its script if it has one. data: columns by name; a name is unique in the
    page, and report.load(name) gives them to scripts of any part. late: the same, encoded already, for columns that a
    page reads on demand. scripts: files of this folder, which call report.part(anchor, start). styles: the
    same in CSS.
    """

    anchor: str
    title: str
    html: str = ""
    data: Mapping[str, Columns] = field(default_factory=dict)
    late: Mapping[str, bytes] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()


def encode(columns: Columns) -> bytes:
    """Encodes columns for a page's script: gzip of the length of the JSON (uint32), the JSON, then the arrays' bytes.

    In the JSON an array is {"$array": [its JavaScript type, first byte behind the JSON, items]}. int64 and bool arrays,
    which JavaScript lacks, become float64 and uint8. Raises ValueError if a number outside of arrays is not finite.
    """
    arrays, size = list[bytes](), 0

    def place(value: object) -> object:
        nonlocal size
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} is neither JSON nor an array")
        kind = {"i8": "f8", "u8": "f8", "b1": "u1", "f2": "f4"}.get(value.dtype.str[1:], value.dtype.str[1:])
        raw = np.ascontiguousarray(value, dtype=f"<{kind}").tobytes()
        mark = {ARRAY: [TYPES[kind], size, value.size]}
        arrays.append(raw + bytes(-len(raw) % ALIGNMENT))
        size += len(arrays[-1])
        return mark

    text = json.dumps(columns, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=place)
    header = text.encode(errors="replace")
    header += b" " * (-(4 + len(header)) % ALIGNMENT)
    return gzip.compress(b"".join((struct.pack("<I", len(header)), header, *arrays)), compresslevel=6, mtime=0)


def digest(encoded: bytes) -> str:
    """Returns a digest by which an open page sees that its columns have changed."""
    return hashlib.sha256(encoded).hexdigest()[:16]


def embed(name: str, encoded: bytes) -> str:
    """Returns the element that carries encoded columns in a page; `await report.load(name)` gives them to a script."""
    text = base64.b64encode(encoded).decode()
    kind = 'type="application/octet-stream"'
    return f'<script {kind} data-name="{escape(name)}" data-digest="{digest(encoded)}">{text}</script>\n'


# --- curves -----------------------------------------------------------------------------------------------------------

CHART = {"lacking": "", "log": False, "unit": ""}
"""Values of a chart for keys that curves.yaml leaves out."""
KEPT = np.float32  # seven digits are more than a curve shows
WITHIN_STEP = ("rollout", "reward", "save_batch", "logprobs", "update", "weight_sync")
"""Phases that seconds/step includes, in their order; the others come on top of it."""
MEMORY = "memory/allocated_max/"


@cache
def curves() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Reads the charts of curves.yaml by part, as a page's script gets them."""
    return {part: [CHART | row for row in rows] for part, rows in table_beside(__file__, "curves.yaml").items()}


def curve_parts(runs: Sequence[RunRead]) -> list[Part]:
    """Returns the part to read first, and the part with every metric."""
    kind = "sft" if runs[0].recipe.get("kind") == "sft" else "grpo"
    with np.errstate(over="ignore"):
        metrics = {
            str(number): {"steps": run.steps, "values": {name: v.astype(KEPT) for name, v in run.metrics.items()}}
            for number, run in enumerate(runs)
        }
    first = Part(
        "health",
        "Health",
        data={
            "runs": {"runs": [_summary(run, label) for run, label in zip(runs, labels(runs), strict=True)]},
            "metrics": metrics,
            "health": {"curves": curves()[kind]},
            "firings": _fired(runs),
        },
        scripts=("curves.js",),
    )
    known = {name: metric_of(name) for name in sorted({name for run in runs for name in run.metrics})}
    meanings = {name: [metric.unit, metric.meaning] if metric else ["", ""] for name, metric in known.items()}
    return [first, Part("metrics", "All metrics", data={"meanings": meanings}, scripts=("curves.js",))]


def labels(runs: Sequence[RunRead]) -> list[str]:
    """Returns the name of each run in the page: its own, or its directory where several share a name."""
    names = [run.name for run in runs]
    return [str(run.directory) if names.count(run.name) > 1 else run.name for run in runs]


def _summary(run: RunRead, label: str) -> Mapping[str, Any]:
    """Returns the figures to read first of a run."""
    began, last = (finite(float(run.times[at])) if len(run.times) else None for at in (0, -1))
    total = run.setting("train.total_steps")
    scores = [name for name in run.metrics if HELD_OUT.fullmatch(name)]
    heads = [("reward/mean", "reward"), ("loss/tokens", "loss"), ("eval/loss", "held-out loss")]
    heads += [(name, name) for name in scores[:3]] + [("tokens_per_second", "tokens/s")]
    known = {title: run.known(name)[1] for name, title in heads}
    steps, restarts = run.known("restarts")  # of lost training ranks
    restarted = {*steps[np.diff(restarts, prepend=0.0) > 0].tolist(), *(start.first for start in starts_of(run)[1:])}
    return {
        "name": label,
        "directory": str(run.directory),
        "step": int(run.steps[-1]) if len(run.steps) else 0,
        "total": total if isinstance(total, int) else None,
        "began": began,
        "last": last,
        "starts": sorted(restarted - {None}),
        "figures": {title: [float(values[0]), float(values[-1])] for title, values in known.items() if len(values)},
    }


def _fired(runs: Sequence[RunRead]) -> Columns:
    """Returns the steps at which rules fire, by run and rule, and the meaning of each of these rules."""
    metrics, reads = sorted({name for run in runs for name in run.metrics}), dict[str, list[str]]()
    for name, rule in RULES.items():
        patterns = "|".join(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(read)) for read in rule.reads)
        reads[name] = [metric for metric in metrics if re.fullmatch(patterns, metric)]
    ranges = [{"run": at, **vars(firing)} for at, run in enumerate(runs) for firing in firings(run.steps, run.metrics)]
    return {
        "firings": ranges,
        "rules": {
            name: {"title": rule.title, "meaning": rule.meaning, "remedy": rule.remedy, "reads": reads[name]}
            for name, rule in RULES.items()
            if any(firing["rule"] == name for firing in ranges)
        },
        "known": [rule.title for name, rule in RULES.items() if reads[name]],
    }


# --- time and memory --------------------------------------------------------------------------------------------------


def timing_parts(runs: Sequence[RunRead]) -> list[Part]:
    """Returns curves of time and memory, and both beside the plan's predictions."""
    named = zip(runs, labels(runs), strict=True)
    phases = {str(number): phases_of(run) for number, run in enumerate(runs)}
    timing = {"curves": curves()["time"], "runs": phases}
    planned = "".join(_html(run, label, len(runs) > 1) for run, label in named)
    drawn = Part("time", "Time and memory", data={"timing": timing}, scripts=("timing.js",))
    return [drawn, Part("plan", "Beside the plan", planned)]


def phases_of(run: RunRead) -> Columns:
    """Returns the steps with seconds/step, int64 [n], and their `seconds` by phase, each float32 [n].

    Seconds of a step outside of its phases are "other"; phases that come on top of seconds/step are last.
    """
    timed = np.isfinite(run.metrics.get("seconds/step", np.full(len(run.steps), np.nan)))
    spent = {
        name.removeprefix("seconds/"): np.nan_to_num(values[timed], posinf=0.0)
        for name, values in run.metrics.items()
        if name.startswith("seconds/")
    }
    whole = spent.pop("step", np.empty(0))
    phases = {name: spent.pop(name) for name in WITHIN_STEP if name in spent}
    phases["other"] = np.maximum(whole - sum(phases.values(), np.zeros_like(whole)), 0.0)
    phases |= {f"{name}, after the step": values for name, values in spent.items()}
    return {"steps": run.steps[timed], "seconds": {name: values.astype(np.float32) for name, values in phases.items()}}


def _html(run: RunRead, label: str, several: bool) -> str:
    """Returns one run's seconds and memory beside its plan, and the plan's summary, in HTML."""
    plan = read_json(run.directory / PLAN_FILE)
    heads = ("phase", "seconds, median", "planned", "tensors of a rank, most", "planned")
    rows = [(escape(name), *cells) for name, *cells in _against_plan(run, plan)]
    table = _table(heads, rows, others=" class=number") if rows else ""
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(text))}</dd>" for name, text in _mapping(plan.get("summary")).items()
    )
    summary = f"<details><summary>The plan</summary><dl>{terms}</dl></details>" if terms else ""
    return (
        f"{f'<h3>{escape(label)}</h3>' if several else ''}{table}"
        f"<p class='soft small'>{' '.join(_notes(run, plan))}</p>{summary}"
    )


def _against_plan(run: RunRead, plan: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each phase: its name, its seconds and a rank's bytes of tensors, measured and planned."""
    phases = _mappings(_mapping(plan.get("time")).get("phases"))
    seconds = {str(phase.get("phase")): phase.get("seconds") for phase in phases}
    held: dict[str, int] = {}
    for kind in _mappings(plan.get("memory")):
        for phase in _mappings(kind.get("phases")):
            of_rank = [part.get("bytes") for part in _mappings(phase.get("parts")) if part.get("of_rank")]
            if size := sum(size for size in of_rank if isinstance(size, int)):
                held[str(phase.get("phase"))] = max(held.get(str(phase.get("phase")), 0), size)
    measured = [name.removeprefix("seconds/") for name in run.metrics if name.startswith("seconds/")]
    for name in dict.fromkeys((*WITHIN_STEP, *seconds, *held, *sorted(measured))):
        known, peak = run.known(f"seconds/{name}")[1], run.known(f"{MEMORY}{name}")[1]
        if not (len(known) or name in seconds or name in held):
            continue
        planned = seconds.get(name)
        yield (
            name,
            second_text(float(np.median(known))) if len(known) else "–",
            second_text(float(planned)) if isinstance(planned, int | float) else "–",
            byte_text(int(peak.max())) if len(peak) else "–",
            byte_text(held[name]) if name in held else "–",
        )


def _notes(run: RunRead, plan: Mapping[str, Any]) -> Iterator[str]:
    if not plan:
        yield f"There is no plan beside this run ({PLAN_FILE})."
    elif not plan.get("time"):
        yield "The plan predicts no seconds on CPUs, unless <code>--calibrate</code> gives it measured ones."
    if not any(name.startswith(MEMORY) for name in run.metrics):
        yield "Memory is measured on GPUs only: this run has none of it."


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# --- recipes, versions, starts and final values -----------------------------------------------------------------------

LAST = 10  # values of a metric that the final one is the mean of
FINAL = ("entropy", "response_tokens/truncated_share", "tokens_per_second", "seconds/step")
"""Metrics of the table of final values, beside those of a run's health."""
OF_A_START = ("time", "command", "directory")
"""Entries of environment.json that differ at each start, and so are not reported as changes."""


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


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] = (), others: str = "") -> str:
    """Returns a table in HTML. Cells are HTML. kinds: a class for each row; others: attributes of columns but the
    first."""
    head = "".join(f"<th{others if number else ''}>{text}</th>" for number, text in enumerate(heads))
    body = ""
    for number, row in enumerate(rows):
        kind = f" class={kinds[number]}" if kinds and kinds[number] else ""
        body += f"<tr{kind}><td class=name>{row[0]}</td>{''.join(f'<td{others}>{cell}</td>' for cell in row[1:])}</tr>"
    shown = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<div class=scroll><table>{shown}<tbody>{body}</tbody></table></div>"
