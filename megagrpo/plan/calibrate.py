"""Assumptions taken from a run: with them a plan predicts the seconds that the run's phases took."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from megagrpo.errors import Problem, ReportError
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import A_CPU, Machines, machines_of
from megagrpo.plan.parameters import known_models
from megagrpo.plan.time import StepTime, step_time
from megagrpo.recipe.load import load_any
from megagrpo.recipe.schema import AnyRecipe
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
    },
    "sft": {"response_tokens": "example_tokens/mean"},
}
"""By kind of recipe and assumption: the metric that measures it. Not packing: that of a run with few microbatches says
nothing."""


def calibrated(
    assumptions: Assumptions,
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines | None,
    run_directory: Path,
    critic: Architecture | None = None,
) -> Assumptions:
    """Lengths, balance and phases as in a run's metrics.jsonl: medians over its steps, but for the first one.

    Factors compare them with what is predicted for the run's own recipe, which lies beside them, and carry over to
    `recipe`: each of its phases takes as many times what is predicted as the run's did. Without that file the run is
    taken to be of `recipe`. Where the run's recipe does not name its GPUs, they are `machines`; None: CPUs (A_CPU).

    Raises ReportError if the directory has no metrics of steps, or is of another kind, of CPUs where GPUs are planned
    for, or of a model that is not there, and RecipeError if its recipe is not one of this version.
    """
    steps = read_steps(run_directory)
    known = {
        field: value for field, name in METRICS[recipe.kind].items() if (value := _median(steps, name)) is not None
    }
    if (uneven := _median(steps, "packing/imbalance")) is not None:
        known["imbalance"] = 1 + uneven
    assumptions = replace(assumptions, **known, **dict.fromkeys(FACTORS, 1.0))

    predicted = _predicted(assumptions, recipe, architecture, machines, run_directory, critic)
    phases = {phase.phase: phase.seconds for phase in predicted.phases}
    measured = {phase: _median(steps, f"seconds/{phase}") for phase in phases if phase != "driver"}
    measured["driver"] = median(_between_phases(step) for step in steps)
    factors = {
        f"{phase}_factor": seconds / phases[phase]
        for phase, seconds in measured.items()
        if seconds is not None and phases[phase] > 0
    }
    return replace(assumptions, **factors)


def _predicted(
    assumptions: Assumptions,
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines | None,
    run_directory: Path,
    critic: Architecture | None,
) -> StepTime:
    """For the run's own recipe and model, on its own machines."""
    path = run_directory / RECIPE_FILE
    if path.exists():
        own = load_any(path).recipe
        if own.kind != recipe.kind:
            raise ReportError(
                Problem(str(path), f"a run of kind {own.kind}", f"one of kind {recipe.kind}, as the recipe")
            )
        ran_on, planned_for = own.cluster.device, recipe.cluster.device
        if "cpu" in (ran_on, planned_for) and ran_on != planned_for and ran_on != "auto":
            raise ReportError(
                Problem(
                    f"{path}: cluster.device",
                    given=f"a run on {ran_on}",
                    needed="one on such devices as are planned for: speeds of CPUs say nothing of GPUs",
                    fix="calibrate by a run on the cluster, or give its lengths: --assume response_tokens=N",
                )
            )
        if own.model.path != recipe.model.path:
            architecture = _architecture(own, path)
        recipe, machines = own, machines_of(own, assumptions) or machines
    if machines is None or recipe.cluster.device == "cpu":
        machines = A_CPU
    return step_time(recipe, architecture, machines, assumptions, critic)


def _architecture(recipe: AnyRecipe, path: Path) -> Architecture:
    directory = known_models().get(recipe.model.path) or Path(recipe.model.path)
    if not (directory / "config.json").exists():
        raise ReportError(
            Problem(
                f"{path}: model.path",
                given=recipe.model.path,
                needed="the run's model, or at least its config.json, where the run had it",
                fix="plan from the same directory on the same machine, or calibrate by a run of the same model.path",
            )
        )
    return read_architecture(directory)


def read_steps(run_directory: Path) -> list[Step]:
    """The metrics of every whole step, without the first if there are others: it compiles, allocates and connects.

    Steps without an update, as those in which no group had signal, are left out. Raises ReportError if none is left.
    """
    path = run_directory / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is being written
        steps = [line for line in map(json.loads, lines) if "seconds/step" in line and "seconds/update" in line]
    except OSError as error:
        raise ReportError(
            Problem(f"{path}: {error.strerror}", needed=f"the directory of a run: each step adds to its {METRICS_FILE}")
        ) from error
    except (ValueError, TypeError) as error:
        raise ReportError(Problem(str(path), given=str(error), needed="lines of JSON, as a run writes them")) from error
    if not steps:
        raise ReportError(Problem(str(path), given="no step that trained the model", needed="a run of some steps"))
    return steps[1:] or steps


def _median(steps: Sequence[Step], name: str) -> float | None:
    """None if no step has it."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return median(values) if values else None


def _between_phases(step: Step) -> float:
    """What a step took besides the phases that it names."""
    outside = ("seconds/step", "seconds/eval", "seconds/checkpoint")
    phases = sum(value for name, value in step.items() if name.startswith("seconds/") and name not in outside)
    return max(0.0, step["seconds/step"] - phases)
