"""A plan for other programs: one JSON object. docs/plan.md lists its keys, which stay as they are."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from megagrpo.plan.advice import impossible, unwise
from megagrpo.plan.case import MappedDevice
from megagrpo.plan.communication import LinkUse
from megagrpo.plan.memory import DeviceMemory, PhaseMemory
from megagrpo.plan.parameters import Stage, total_parameters
from megagrpo.plan.plan import Plan
from megagrpo.plan.schedules import ScheduleTime
from megagrpo.plan.search import Choice, Search
from megagrpo.plan.time import PhaseTime, StepTime
from megagrpo.section import Section

FORMAT = 1
DERIVED: dict[type, tuple[str, ...]] = {
    PhaseMemory: ("bytes",),
    PhaseTime: ("seconds",),
    LinkUse: ("ratio",),
    StepTime: ("seconds", "tokens_per_second_per_gpu", "days"),
    ScheduleTime: ("name",),
}
"""Properties that are written beside the fields."""


def plan_json(plan: Plan, search: Search | None = None) -> str:
    """Returns all of a plan as JSON, and of the search if there was one."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "name": plan.recipe.name,
        "kind": plan.recipe.kind,
        "model": {"family": plan.architecture.family, "parameters": total_parameters(plan.architecture)},
        "summary": plan.summary,
        "device": plan.device,
        "machines": plan.gpus,
        "axes": plan.axes,
        "stages": plan.stages,
        "devices": plan.device_map,
        "memory": plan.memory,
        "fits": plan.lacking_bytes == 0 if plan.gpus else None,
        "lacking_bytes": plan.lacking_bytes if plan.gpus else None,
        "time": plan.time,
        "schedules": plan.schedules,
        "proofs": plan.proofs,
        "assumptions": plan.assumed,
        "problems": impossible(plan),
        "unwise": unwise(plan),
        "unchecked": plan.unchecked,
        "recipe": plan.recipe.model_dump(mode="json"),
    }
    if search is not None:
        values["search"] = search
    return json.dumps(values, indent=1, allow_nan=False, default=_keys)


def _keys(value: Any) -> Any:
    """Converts values for JSON: dataclasses to their fields, but for some in forms that programs read more easily."""
    match value:
        case range():
            return [value.start, value.stop]
        case Stage():
            return {"layers": value.chunks, "embedding": value.embedding, "head": value.head}
        case Section():
            return value.model_dump(mode="json")
        case Choice():
            parts = {"overrides": value.overrides, "reason": value.reason, **vars(value)}
            return {name: part for name, part in parts.items() if name != "schedule" or part}
    keys = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, MappedDevice):
        coordinates = dict(vars(value.rank)) if value.rank else {}
        keys |= {"rank": coordinates.pop("rank", None), "coordinates": coordinates or None}
    elif isinstance(value, DeviceMemory):
        keys["fullest"] = value.fullest.phase
    return keys | {name: getattr(value, name) for name in DERIVED.get(type(value), ())}
