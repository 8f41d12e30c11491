"""A plan for other programs: one JSON object. docs/plan.md lists its keys, which stay as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megagrpo.errors import Problem
from megagrpo.plan.device_map import MappedDevice, axes
from megagrpo.plan.memory import DeviceMemory
from megagrpo.plan.parameters import total_parameters
from megagrpo.plan.plan import Plan
from megagrpo.plan.search import Choice, Search
from megagrpo.plan.time import StepTime

FORMAT = 1


def plan_json(plan: Plan, search: Search | None = None) -> str:
    """Everything in a plan, and in the search if there was one."""
    judged = plan.estimate if plan.machines else None
    values: dict[str, Any] = {
        "format": FORMAT,
        "name": plan.recipe.name,
        "kind": plan.recipe.kind,
        "model": {"family": plan.architecture.family, "parameters": total_parameters(plan.architecture)},
        "summary": plan.summary,
        "device": plan.device,
        "machines": asdict(plan.machines) if plan.machines else None,
        "axes": [asdict(axis) for axis in axes(plan.recipe, plan.architecture)],
        "stages": [
            {
                "layers": [[chunk.start, chunk.stop] for chunk in stage.chunks],
                "embedding": stage.embedding,
                "head": stage.head,
            }
            for stage in plan.stages
        ],
        "devices": [_device(mapped) for mapped in plan.device_map],
        "memory": _memory(plan.memory),
        "fits": judged.fits if judged else None,
        "lacking_bytes": judged.lacking_bytes if judged else None,
        "time": _time(plan.estimate.time) if plan.estimate else None,
        "assumptions": [vars(assumed) for assumed in plan.assumed],
        "problems": _problems(plan.problems),
        "unwise": _problems(plan.unwise),
        "unchecked": plan.unchecked,
        "recipe": plan.recipe.model_dump(mode="json"),
    }
    if search is not None:
        values["search"] = {
            "gpus": search.gpus,
            "legal": search.legal,
            "estimated": search.estimated,
            "choices": [_choice(choice) for choice in search.choices],
            "nearest": _choice(search.nearest) if search.nearest else None,
        }
    return json.dumps(values, indent=1, allow_nan=False)


def _device(mapped: MappedDevice) -> dict[str, Any]:
    coordinates = dict(vars(mapped.rank)) if mapped.rank else {}
    return {**vars(mapped), "rank": coordinates.pop("rank", None), "coordinates": coordinates or None}


def _memory(held: Iterable[DeviceMemory]) -> list[dict[str, Any]]:
    return [
        {
            "name": kind.name,
            "devices": kind.devices,
            "fullest": kind.fullest.phase,
            "phases": [
                {"phase": phase.phase, "bytes": phase.bytes, "parts": [vars(part) for part in phase.parts]}
                for phase in kind.phases
            ],
        }
        for kind in held
    ]


def _time(time: StepTime) -> dict[str, Any]:
    return {
        "seconds": time.seconds,
        "tokens": time.tokens,
        "gpus": time.gpus,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "steps": time.steps,
        "days": time.days,
        "phases": [
            {"phase": phase.phase, "seconds": phase.seconds, "parts": dict(phase.parts)} for phase in time.phases
        ],
    }


def _problems(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"where": p.where, "given": p.given, "needed": p.needed, "fix": p.fix} for p in problems]


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "overrides": choice.overrides,
        "reason": choice.reason,
        "lacking_bytes": choice.estimate.lacking_bytes,
        "memory": _memory(choice.estimate.memory),
        "time": _time(choice.estimate.time),
    }
