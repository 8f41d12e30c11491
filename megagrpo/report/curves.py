"""The curves of a page: the five that show a run's health, with the rules that fire, and every other metric."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megagrpo.report.embed import Columns, Part
from megagrpo.report.rules import HELD_OUT, RULES, Rule, firings
from megagrpo.report.run import RunRead, starts_of
from megagrpo.track.metrics import metric_of

KEPT = np.float32  # seven digits are more than a curve shows


@dataclass(frozen=True)
class Curve:
    """A chart. metric: matches whole names; several matches are drawn into one chart. sentence: its healthy values.

    lacking: the text of a chart without a value.
    """

    title: str
    metric: str
    sentence: str
    lacking: str = ""
    log: bool = False
    unit: str = ""


GRADIENTS = Curve(
    "Gradient norm",
    "grad_norm",
    "Healthy: it stays within a factor of ten; single spikes come back at once. A climb, or spikes that come more"
    " often, precede a collapse.",
    "No step has trained yet.",
    log=True,
)
HEALTH = {
    "grpo": (
        GRADIENTS,
        Curve(
            "KL from the reference policy",
            "kl/mean",
            "Healthy: it grows slowly, levels off, and the reward grows with it. Growth without reward is drift.",
            "This run has no reference policy to compare with (algorithm.kl).",
            log=True,
        ),
        Curve(
            "Reward",
            "reward/mean",
            "Healthy: it rises, then levels off below what is possible. A jump is more often a hole in the reward than"
            " a discovery.",
            "No step has scored responses yet.",
        ),
        Curve(
            "Response length",
            "response_tokens/mean",
            "Healthy: it changes slowly and stays well below the limit. Length that grows without held-out score is"
            " padding; a fall to almost nothing is a collapse.",
            "No step has sampled yet.",
        ),
        Curve(
            "Held-out score",
            HELD_OUT.pattern,
            "Healthy: it rises with the reward. If it falls, or stays, while the reward rises, the policy learns the"
            " training prompts or the reward's holes.",
            "No evaluation yet: eval.sets and eval.every_steps give one.",
        ),
    ),
    "sft": (
        Curve("Loss", "loss/tokens", "Healthy: it falls fast, then slowly.", "No step has trained yet."),
        Curve(
            "Held-out loss",
            "eval/loss",
            "Healthy: it falls with the loss. Once it rises, further steps only learn the examples by heart.",
            "No evaluation yet: this recipe has no held-out conversations.",
        ),
        GRADIENTS,
        Curve("Learning rate", "lr", "It follows train.optimizer's schedule.", "No step has trained yet."),
    ),
}


def curve_parts(runs: Sequence[RunRead]) -> list[Part]:
    """Returns the part to read first, and the part with every metric."""
    kind = str(runs[0].recipe.get("kind", "grpo"))
    health = [vars(curve) for curve in HEALTH.get(kind, HEALTH["grpo"])]
    summaries = [_summary(run, label) for run, label in zip(runs, labels(runs), strict=True)]
    first = Part(
        "health",
        "Health",
        data={
            "runs": {"runs": summaries},
            "metrics": _metrics(runs),
            "health": {"curves": health},
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
    total = run.recipe.get("train", {}).get("total_steps") if isinstance(run.recipe.get("train"), dict) else None
    scores = [name for name in run.metrics if HELD_OUT.fullmatch(name)]
    heads = [("reward/mean", "reward"), ("loss/tokens", "loss"), ("eval/loss", "held-out loss")]
    heads += [(name, name) for name in scores[:3]] + [("tokens_per_second", "tokens/s")]
    known = {title: run.known(name)[1] for name, title in heads}
    return {
        "name": label,
        "directory": str(run.directory),
        "step": int(run.steps[-1]) if len(run.steps) else 0,
        "total": total if isinstance(total, int) else None,
        "began": _finite(run.times[:1]),
        "last": _finite(run.times[-1:]),
        "starts": _started_again(run),
        "figures": {title: [float(values[0]), float(values[-1])] for title, values in known.items() if len(values)},
    }


def _started_again(run: RunRead) -> list[int]:
    """Returns the steps at which the run, or its lost training ranks, restarted."""
    steps, restarts = run.known("restarts")
    of_ranks = steps[np.diff(restarts, prepend=0.0) > 0]
    return sorted({*of_ranks.tolist(), *(start.first for start in starts_of(run)[1:] if start.first is not None)})


def _finite(values: np.ndarray) -> float | None:
    """Returns the first value; None if there is none or it is not finite."""
    return float(values[0]) if len(values) and np.isfinite(values[0]) else None


def _metrics(runs: Sequence[RunRead]) -> Columns:
    """Returns every metric of every run, by the run's index."""
    with np.errstate(over="ignore"):
        return {
            str(number): {"steps": run.steps, "values": {name: v.astype(KEPT) for name, v in run.metrics.items()}}
            for number, run in enumerate(runs)
        }


def _fired(runs: Sequence[RunRead]) -> Columns:
    """Returns the steps at which rules fire, by run and rule, and the meaning of each of these rules."""
    names = sorted({name for run in runs for name in run.metrics})
    reads = {name: _read_by(rule, names) for name, rule in RULES.items()}
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


def _read_by(rule: Rule, names: Iterable[str]) -> list[str]:
    """Returns the metrics in `names` that a rule reads."""
    patterns = [re.sub(r"\\{\w+\\}", "[^/]+", re.escape(read)) for read in rule.reads]
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)]
