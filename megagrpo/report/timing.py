"""A run's time and memory: seconds by phase, idle shares, weight syncs, and the predictions of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from megagrpo.plan.units import byte_text, second_text
from megagrpo.report.curves import curves, labels
from megagrpo.report.embed import Columns, Part
from megagrpo.report.run import RunRead
from megagrpo.track.jsonl import PLAN_FILE, read_json

WITHIN_STEP = ("rollout", "reward", "save_batch", "logprobs", "update", "weight_sync")
"""Phases that seconds/step includes, in their order; the others come on top of it."""
MEMORY = "memory/allocated_max/"


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
