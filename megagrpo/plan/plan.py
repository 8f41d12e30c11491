"""Everything that a plan says of a recipe, as data: for the terminal, a page, or other programs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.plan.assumptions import Assumptions, assumptions_from
from megagrpo.plan.calibrate import calibrated
from megagrpo.plan.checks.disk import disk_advice
from megagrpo.plan.checks.impossible import memory_problems, node_problems
from megagrpo.plan.checks.unwise import advice
from megagrpo.plan.device_map import MappedDevice, Stage, device_map, stages
from megagrpo.plan.estimate import Estimate, estimate
from megagrpo.plan.machines import A_CPU, Machines, machines_of
from megagrpo.plan.memory.device_memory import memory
from megagrpo.plan.memory.parts import DeviceMemory
from megagrpo.plan.show.summary import summary
from megagrpo.plan.time.step_time import step_time
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.families.architecture import Architecture

UNITS = {
    "tokens": "tokens",
    "rows": "rows",
    "bytes_per_second": "bytes/s",
    "seconds": "s",
    "seconds_per_response": "s",
    "share": "share",
    "efficiency": "share",
    "packing": "share",
    "overlap": "share",
    "factor": "times",
    "imbalance": "times",
}


@dataclass(frozen=True)
class Assumed:
    """One assumption. `value` None: it follows from others. `origin`: default, given, counted or calibrated."""

    name: str
    value: float | None
    unit: str
    origin: str


@dataclass(frozen=True)
class Plan:
    """A recipe's plan. Without `machines` there is no estimate of time, unless a run on CPUs calibrates it."""

    recipe: AnyRecipe
    architecture: Architecture
    critic: Architecture | None  # of algorithm.critic.path; None: no critic, or one like the policy
    summary: tuple[tuple[str, str], ...]
    device: str  # "cuda" or "cpu": what is planned for
    device_map: tuple[MappedDevice, ...]
    stages: tuple[Stage, ...]
    machines: Machines | None
    memory: tuple[DeviceMemory, ...]
    estimate: Estimate | None
    assumptions: Assumptions
    assumed: tuple[Assumed, ...]
    problems: tuple[Problem, ...]  # why it cannot run there
    unwise: tuple[Problem, ...]
    unchecked: tuple[str, ...]  # what was not on this machine


def plan_of(
    recipe: AnyRecipe,
    architecture: Architecture,
    *,
    given: Collection[str] = (),
    run_directory: Path | None = None,
    unchecked: Collection[str] = (),
    critic: Architecture | None = None,
    epoch_rows: int | None = None,
) -> Plan:
    """The plan of a recipe whose rules hold. `given` are assumptions as NAME=VALUE; `run_directory` calibrates them;
    `critic` is the model of algorithm.critic.path, if it is another; `epoch_rows` what was counted in data.train.

    Raises RecipeError for an unknown GPU or a wrong assumption, ReportError for a run without measurements.
    """
    assumptions, assumed, machines = _assumptions(recipe, architecture, given, run_directory, critic, epoch_rows)
    device = planned_device(recipe)
    known = machines if device == "cuda" else None
    expected = estimate(recipe, architecture, known, assumptions, critic) if known else None
    held = (
        expected.memory
        if expected
        else memory(recipe, architecture, None, device, critic, assumptions.expert_imbalance)
    )
    if device == "cpu" and run_directory is not None:  # of CPUs nothing is known but what a run measured
        expected = Estimate(held, step_time(recipe, architecture, A_CPU, assumptions, critic), 0)
    return Plan(
        recipe=recipe,
        architecture=architecture,
        critic=critic,
        summary=tuple(summary(recipe, architecture, assumptions.epoch_rows)),
        device=device,
        device_map=device_map(recipe, device),
        stages=stages(architecture, recipe.train.layout.parallel()),
        machines=known,
        memory=held,
        estimate=expected,
        assumptions=assumptions,
        assumed=assumed,
        problems=(*node_problems(recipe), *memory_problems(recipe, architecture, held, known)),
        unwise=(
            *advice(recipe, architecture, known, expected, assumptions),
            *disk_advice(recipe, architecture, critic),
        ),
        unchecked=tuple(unchecked),
    )


def planned_device(recipe: AnyRecipe) -> str:
    """What a plan is for: GPUs, unless the recipe says CPUs. Those of this machine do not matter."""
    return "cpu" if recipe.cluster.device == "cpu" else "cuda"


def _assumptions(
    recipe: AnyRecipe,
    architecture: Architecture,
    given: Collection[str],
    run_directory: Path | None,
    critic: Architecture | None,
    epoch_rows: int | None,
) -> tuple[Assumptions, tuple[Assumed, ...], Machines | None]:
    assumptions = assumptions_from(given)
    origins = dict.fromkeys((text.partition("=")[0].strip() for text in given), "given")
    counted = {}
    if assumptions.epoch_rows is None and epoch_rows is not None:
        assumptions, counted = replace(assumptions, epoch_rows=epoch_rows), {"epoch_rows": "counted"}
    machines = machines_of(recipe, assumptions)
    if run_directory is not None:
        before = assumptions
        assumptions = calibrated(assumptions, recipe, architecture, machines, run_directory, critic)
        changed = [f.name for f in fields(before) if getattr(before, f.name) != getattr(assumptions, f.name)]
        kept = {name: getattr(before, name) for name in origins}  # what was given counts more than what was measured
        assumptions = replace(assumptions, **kept)
        origins = dict.fromkeys(changed, "calibrated") | origins
    return assumptions, tuple(_assumed(assumptions, origins | counted)), machines


def _assumed(assumptions: Assumptions, origins: dict[str, str]) -> list[Assumed]:
    return [
        Assumed(field.name, getattr(assumptions, field.name), unit_of(field.name), origins.get(field.name, "default"))
        for field in fields(assumptions)
    ]


def unit_of(assumption: str) -> str:
    """By the end of its name, as everywhere: prompt_tokens are tokens."""
    ends = [end for end in UNITS if assumption == end or assumption.endswith(f"_{end}")]
    return UNITS[max(ends, key=len)]
