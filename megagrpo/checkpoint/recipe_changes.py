"""Which parts of a recipe may change between a checkpoint and the run that continues from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megagrpo.errors import Problem, RecipeError

FIXED: Mapping[str, str] = {
    "seed": "it seeds the order of the prompts and every sample",
    "model.path": "the checkpoint holds another model's weights, and the reference policy is read from here",
    "model.revision": "the checkpoint holds another model's weights, and the reference policy is read from here",
    "model.tokenizer": "it would give the same prompts other tokens",
    "model.chat_template": "it would give the same prompts other tokens",
    "data": "the checkpoint's place in the data would mean other prompts",
    "rollout.prompts_per_step": "steps already done are counted in it",
    "rollout.samples_per_prompt": "episodes already done are counted in it",
    "reward.functions": "metrics before and after would measure different things",
    "train.lora": "the checkpoint holds these adapters, or a model without any",
    "algorithm.advantage": "metrics before and after would measure different things",
    "algorithm.reference.update_every_steps": "a checkpoint holds the reference policy only if it follows",
}
"""What must stay, and why. Everything else may change: layout, learning rate, run length, devices, evaluation, …"""


@dataclass(frozen=True)
class Change:
    """One value that differs. `where` is a dotted key, with an index for lists: data.train[0].path."""

    where: str
    saved: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.where}: {_show(self.saved)} -> {_show(self.new)}"


_ABSENT = object()


def recipe_changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every leaf that differs between two resolved recipes (as JSON values), in the order of the new one."""
    return list(_differences("", dict(saved), dict(new)))


def allow_changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The changes, if a run may continue with them. RecipeError, naming every one that may not be, otherwise."""
    changes = recipe_changes(saved, new)
    problems = [
        Problem(
            change.where,
            given=_show(change.new),
            needed=f"{_show(change.saved)}, as in the run so far: {reason}",
            fix="set it back, or give the recipe another name to start a new run",
        )
        for change in changes
        if (reason := _reason(change.where)) is not None
    ]
    if problems:
        raise RecipeError(problems)
    return changes


def _reason(where: str) -> str | None:
    return next((why for key, why in FIXED.items() if where == key or where.startswith((f"{key}.", f"{key}["))), None)


def _differences(where: str, saved: Any, new: Any) -> Iterator[Change]:
    if isinstance(saved, dict) and isinstance(new, dict):
        for key in (*new, *(key for key in saved if key not in new)):
            yield from _differences(f"{where}.{key}" if where else key, saved.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(saved, list) and isinstance(new, list) and len(saved) == len(new):
        for index, (a, b) in enumerate(zip(saved, new, strict=True)):
            yield from _differences(f"{where}[{index}]", a, b)
    elif saved != new:
        yield Change(where, saved, new)


def _show(value: Any) -> str:
    return "not given" if value is _ABSENT else repr(value)
