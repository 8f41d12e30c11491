"""Assumptions taken from the metrics of a run: with them a plan of the run predicts the seconds that were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from megagrpo.errors import Problem, ReportError
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.case import Case, machines_of
from megagrpo.plan.parameters import known_models
from megagrpo.plan.time import step_time
from megagrpo.recipe.load import load_any
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.schema.schedule import SyncConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture

METRICS_FILE, RECIPE_FILE = "metrics.jsonl", "recipe.yaml"
Step = Mapping[str, float]
FACTORS = tuple(name for name in Assumptions.__dataclass_fields__ if name.endswith("_factor"))
METRICS: Mapping[str, Mapping[str, str]] = {
    "grpo": {
        "prompt_tokens": "prompt_tokens/mean",
        "response_tokens": "response_tokens/mean",
        "longest_response_tokens": "response_tokens/max",
        "signal_share": "groups/with_signal_share",
        "turns": "agent/turns/mean",
        "sequences": "agent/branches/mean",
    },
    "sft": {"response_tokens": "example_tokens/mean"},
}
"""By kind of recipe: the metric that measures an assumption. Packing is not there: with few microbatches it says
nothing about a larger run."""


def calibrated(case: Case, run_directory: Path) -> Assumptions:
    """Returns the case's assumptions with lengths, imbalance and phase factors from a run's metrics.jsonl. Each is a
    median over the run's steps without the first.

    A factor is the measured seconds of a phase over those predicted for the run's own recipe, which is beside the
    metrics; without that file the run counts as one of the case. The run was on the case's machines if its recipe names
    none.

    Raises ReportError if the directory has no metrics of steps, or is of another kind, of CPUs where GPUs are planned
    for, or of a model that is not there, and RecipeError if its recipe is not one of this version.
    """
    steps = read_steps(run_directory)
    known = {
        field: value for field, name in METRICS[case.recipe.kind].items() if (value := _median(steps, name)) is not None
    }
    if (uneven := _median(steps, "packing/imbalance")) is not None:
        known["imbalance"] = 1 + uneven
    known |= {name: max(1.0, known[name]) for name in ("turns", "sequences") if name in known}
    known |= _between_turns(steps, known)
    assumptions = replace(case.assumptions, **known, **dict.fromkeys(FACTORS, 1.0))

    ran = replace(case, assumptions=assumptions)
    path = run_directory / RECIPE_FILE
    if path.exists():
        own = load_any(path).recipe
        model, machines = _architecture_of_run(own, case, path), machines_of(own, assumptions)
        ran = replace(ran, recipe=own, architecture=model, machines=machines or case.machines)
    predicted = step_time(ran)

    factors = {}
    # Under other schedules seconds/rollout is what the trainer waited, not what engines took.
    in_turn = not isinstance(ran.recipe, Recipe) or ran.recipe.schedule == SyncConfig(kind="sync")
    for phase in predicted.phases:
        if phase.phase == "rollout" and not in_turn:
            continue
        seconds = _median(steps, f"seconds/{phase.phase}")
        if phase.phase == "driver":
            seconds = median(map(_between_phases, steps))
        if seconds is not None and phase.seconds > 0:
            factors[f"{phase.phase}_factor"] = seconds / phase.seconds
    return replace(assumptions, **factors)


def _between_turns(steps: Sequence[Step], known: Mapping[str, float]) -> dict[str, float]:
    """Returns the tokens and seconds between two turns of a rollout; empty if the run measured none. Of the tokens that
    the policy did not sample, each sequence has a prompt, and the rest lie between turns."""
    given, outside = _median(steps, "agent/given_tokens/mean"), _median(steps, "agent/seconds/outside_mean")
    if given is None or outside is None or (gaps := known["turns"] - 1) < 1e-9:
        return {}
    tokens = given / known["sequences"] - known["prompt_tokens"]
    return {"given_tokens": max(0.0, tokens / gaps), "tool_seconds": outside / gaps}


def _architecture_of_run(own: AnyRecipe, case: Case, path: Path) -> Architecture:
    """Returns the model of the run's own recipe. Raises ReportError if such a run cannot calibrate the case."""
    recipe = case.recipe
    if own.kind != recipe.kind:
        raise ReportError(Problem(str(path), f"a run of kind {own.kind}", f"one of kind {recipe.kind}, as the recipe"))
    ran_on, planned_for = own.cluster.device, recipe.cluster.device
    if "cpu" in (ran_on, planned_for) and ran_on != planned_for and ran_on != "auto":
        needed = "a run on the kind of device that is planned for: speeds of CPUs say nothing of GPUs"
        fix = "calibrate by a run on the cluster, or give its lengths: --assume response_tokens=N"
        raise ReportError(Problem(f"{path}: cluster.device", f"a run on {ran_on}", needed, fix))
    if own.model.path == recipe.model.path:
        return case.architecture
    directory = known_models().get(own.model.path) or Path(own.model.path)
    if not (directory / "config.json").exists():
        needed = "the run's model, or at least its config.json, where the run had it"
        fix = "plan from the same directory on the same machine, or calibrate by a run of the same model.path"
        raise ReportError(Problem(f"{path}: model.path", own.model.path, needed, fix))
    return read_architecture(directory)


def read_steps(run_directory: Path) -> list[Step]:
    """Returns the metrics of every step with an update. Drops the first, which compiles, allocates and connects, if
    there are others. Raises ReportError if there is none."""
    path = run_directory / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is being written
        steps = [
            {name: value for name, value in line.items() if type(value) in (int, float) and abs(value) < 1e300}
            for line in map(json.loads, lines)
            if "seconds/update" in line
        ]
    except OSError as error:
        needed = f"the directory of a run: each step adds to its {METRICS_FILE}"
        raise ReportError(Problem(str(path), error.strerror or str(error), needed)) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ReportError(Problem(str(path), given=str(error), needed="lines of JSON, as a run writes them")) from error
    steps = [step for step in steps if step.keys() >= {"seconds/step", "seconds/update"}]
    if not steps:
        raise ReportError(Problem(str(path), given="no step that trained the model", needed="a run of some steps"))
    return steps[1:] or steps


def _median(steps: Sequence[Step], name: str) -> float | None:
    """Returns the median of a metric; None if no step has it."""
    values = [step[name] for step in steps if name in step]
    return median(values) if values else None


def _between_phases(step: Step) -> float:
    """Returns the seconds of a step outside of the phases that it names."""
    outside = ("seconds/step", "seconds/eval", "seconds/checkpoint", "seconds/export")
    phases = sum(value for name, value in step.items() if name.startswith("seconds/") and name not in outside)
    return max(0.0, step["seconds/step"] - phases)
