"""The curves of a page: the five that show a run's health, with the rules that fire; every other metric; and a run's
time and memory: seconds by phase, idle shares, weight syncs, and the predictions of its plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megagrpo.plan.units import byte_text, second_text
from megagrpo.report.embed import Columns, Part
from megagrpo.report.rules import HELD_OUT, RULES, firings
from megagrpo.report.run import RunRead, starts_of
from megagrpo.track.jsonl import PLAN_FILE, finite, read_json
from megagrpo.track.metrics import metric_of

KEPT = np.float32  # seven digits are more than a curve shows
WITHIN_STEP = ("rollout", "reward", "save_batch", "logprobs", "update", "weight_sync")
"""Phases that seconds/step includes, in their order; the others come on top of it."""
MEMORY = "memory/allocated_max/"


@dataclass(frozen=True)
class Curve:
    """A chart. metric: a pattern of whole names, all of which it draws. sentence: its healthy values.

    lacking: the text of a chart without a value.
    """

    title: str
    metric: str
    sentence: str
    lacking: str = ""
    log: bool = False
    unit: str = ""


@cache
def curves() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Reads the charts of curves.yaml by part, as a page's script gets them."""
    text = Path(__file__).with_name("curves.yaml").read_text(encoding="utf-8")
    return {part: [vars(Curve(**row)) for row in rows] for part, rows in yaml.safe_load(text).items()}


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
    heads = "<th>phase</th><th class=number>seconds, median</th><th class=number>planned</th>"
    heads += "<th class=number>tensors of a rank, most</th><th class=number>planned</th>"
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td class=number>{cell}</td>' for cell in cells)}</tr>"
        for name, *cells in _against_plan(run, plan)
    )
    table = f"<div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(text))}</dd>" for name, text in _mapping(plan.get("summary")).items()
    )
    summary = f"<details><summary>The plan</summary><dl>{terms}</dl></details>" if terms else ""
    return (
        f"{f'<h3>{escape(label)}</h3>' if several else ''}{table if rows else ''}"
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
