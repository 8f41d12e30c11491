"""A plan for other programs: one JSON object. docs/plan.md lists its keys, which stay as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from megagrpo.errors import Problem
from megagrpo.plan.device_map import MappedDevice, axes
from megagrpo.plan.estimate import Estimate
from megagrpo.plan.memory.parts import DeviceMemory
from megagrpo.plan.parameters import total_parameters
from megagrpo.plan.plan import Plan
from megagrpo.plan.search.search import Search
from megagrpo.plan.time.seconds import StepTime

FORMAT = 1


def plan_json(plan: Plan, search: Search | None = None) -> str:
    """Everything in a plan, and in the search if there was one."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "name": plan.recipe.name,
        "kind": plan.recipe.kind,
        "model": {"family": plan.architecture.family, "parameters": total_parameters(plan.architecture)},
        "summary": dict(plan.summary),
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
        "fits": plan.estimate.fits if plan.estimate and plan.machines else None,
        "lacking_bytes": plan.estimate.lacking_bytes if plan.estimate and plan.machines else None,
        "time": _time(plan.estimate.time) if plan.estimate else None,
        "assumptions": [asdict(assumed) for assumed in plan.assumed],
        "problems": _problems(plan.problems),
        "unwise": _problems(plan.unwise),
        "unchecked": list(plan.unchecked),
        "recipe": plan.recipe.model_dump(mode="json"),
    }
    if search is not None:
        values["search"] = _search(search)
    return json.dumps(values, indent=1, allow_nan=False)


def _device(mapped: MappedDevice) -> dict[str, Any]:
    return {
        "device": mapped.device,
        "node": mapped.node,
        "gpu": mapped.gpu,
        "rank": mapped.rank.rank if mapped.rank else None,
        "coordinates": _coordinates(mapped),
        "engines": list(mapped.engines),
        "engine_rank": mapped.engine_rank,
    }


def _coordinates(mapped: MappedDevice) -> Mapping[str, int] | None:
    return {axis: index for axis, index in vars(mapped.rank).items() if axis != "rank"} if mapped.rank else None


def _memory(held: Iterable[DeviceMemory]) -> list[dict[str, Any]]:
    return [
        {
            "name": kind.name,
            "devices": list(kind.devices),
            "fullest": kind.fullest.phase,
            "phases": [
                {
                    "phase": phase.phase,
                    "bytes": phase.bytes,
                    "parts": [
                        {"name": part.name, "bytes": part.bytes, "lowered_by": list(part.lowered_by)}
                        for part in phase.parts
                    ],
                }
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


def _search(search: Search) -> dict[str, Any]:
    return {
        "gpus": search.gpus,
        "legal": search.legal,
        "estimated": search.estimated,
        "choices": [
            {"overrides": list(choice.overrides), "reason": choice.reason, **_estimate(choice.estimate)}
            for choice in search.choices
        ],
        "nearest": {
            "overrides": list(search.nearest.overrides),
            "reason": search.nearest.reason,
            **_estimate(search.nearest.estimate),
        }
        if search.nearest
        else None,
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "lacking_bytes": estimate.lacking_bytes,
        "memory": _memory(estimate.memory),
        "time": _time(estimate.time),
    }
