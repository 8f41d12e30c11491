"""Rules of report/rules.py, applied while a run trains: rollout.alerts sets which of them warn and which end it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megagrpo.errors import AlertError, Problem
from megagrpo.recipe.schema.rollout import AlertName
from megagrpo.report.rules import RULES, WITH_INTERVAL
from megagrpo.report.run import read_run

READ = {name for rule in RULES.values() for name in rule.reads}


@dataclass(frozen=True)
class Raised:
    """The rules' result for a step. holding: number of rules that hold; lines: warnings of rules that newly hold;
    failure: the error of rules that end the run."""

    holding: int
    lines: tuple[str, ...] = ()
    failure: AlertError | None = None


class Alerts:
    """The metrics that rules read, of all steps so far."""

    def __init__(self, actions: Mapping[AlertName, Literal["warn", "stop", "off"]], directory: Path) -> None:
        """Reads the metrics that the run in `directory` has already logged in metrics.jsonl."""
        self._rules = {name: rule for name, rule in RULES.items() if actions.get(name) != "off"}
        self._stop = {name for name, action in actions.items() if action == "stop"}
        self._holding = set[AlertName]()
        before = read_run(directory)
        self._steps = before.steps
        self._series = {name: values for name, values in before.metrics.items() if _is_read(name)}

    def after(self, step: int, metrics: Mapping[str, float]) -> Raised:
        """Appends the step's metrics, evaluation included, and applies the rules. First drops the metrics of this step
        and of later ones, which a run repeats after a rewind."""
        count = int(np.searchsorted(self._steps, step))
        self._steps, nothing = np.append(self._steps[:count], step), np.full(count, np.nan)
        self._series = {
            name: np.append(self._series.get(name, nothing)[:count], metrics.get(name, np.nan))
            for name in {*self._series, *filter(_is_read, metrics)}
        }
        series = self._series
        holding = {name for name, rule in self._rules.items() if series and rule.holds(series)[-1]}
        begun, self._holding = sorted(holding - self._holding), holding
        lines = tuple(
            f"warning: step {step}: {RULES[name].title} ({name}). {RULES[name].meaning} {RULES[name].remedy}"
            for name in begun
            if name not in self._stop
        )
        ends = sorted(holding & self._stop)
        problems = [
            Problem(
                f"step {step}: {RULES[name].title}",
                RULES[name].meaning,
                "a run of which this does not hold",
                f"{RULES[name].remedy} To go on all the same: rollout.alerts.{name}: warn",
            )
            for name in ends
        ]
        return Raised(len(holding), lines, AlertError(problems) if problems else None)


def _is_read(metric: str) -> bool:
    return metric in READ or WITH_INTERVAL.fullmatch(metric) is not None
