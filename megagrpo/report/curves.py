"""The curves of a page: the five that show a run's health, with the rules that fire, and every other metric."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megagrpo.report.embed import Columns, Part
from megagrpo.report.rules import HELD_OUT, RULES, firings
from megagrpo.report.run import RunRead, starts_of
from megagrpo.track.jsonl import finite
from megagrpo.track.metrics import metric_of

KEPT = np.float32  # seven digits are more than a curve shows


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
