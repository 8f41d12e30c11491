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
FIRST_CAPACITY = 1024


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
        read = {
            name: values for name, values in before.metrics.items() if name in READ or WITH_INTERVAL.fullmatch(name)
        }
        self._steps, self._count = _grown(before.steps.astype(np.float64), FIRST_CAPACITY), len(before.steps)
        self._columns = {name: _grown(values, FIRST_CAPACITY) for name, values in read.items()}

    def after(self, step: int, metrics: Mapping[str, float]) -> Raised:
        """Appends the step's metrics, evaluation included, and applies the rules. First drops the metrics of this step
        and of later ones, which a run repeats after a rewind."""
        self._count = int(np.searchsorted(self._steps[: self._count], step))
        self._add(step, metrics)
        series = {name: column[: self._count] for name, column in self._columns.items()}
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

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._count == len(self._steps):
            self._steps = _grown(self._steps, 2 * self._count)
            self._columns = {name: _grown(column, 2 * self._count) for name, column in self._columns.items()}
        read = {name: value for name, value in metrics.items() if _is_read(name)}
        for name in read.keys() - self._columns.keys():
            self._columns[name] = np.full(len(self._steps), np.nan)
        self._steps[self._count] = step
        for name, column in self._columns.items():
            column[self._count] = read.get(name, np.nan)
        self._count += 1


def _is_read(metric: str) -> bool:
    return metric in READ or WITH_INTERVAL.fullmatch(metric) is not None


def _grown(values: np.ndarray, capacity: int) -> np.ndarray:
    """Returns `values` padded with NaN: float64, length at least `capacity`."""
    return np.concatenate([values, np.full(max(0, capacity - len(values)), np.nan)])
