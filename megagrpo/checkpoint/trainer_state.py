"""The driver's state with which a run resumes, and the parts of the recipe that may change before it resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic

from megagrpo.errors import Problem, RecipeError, UnusableCheckpointError, brief, first_line

STEP_MAX = 10**9
Count = Annotated[int, pydantic.Field(ge=0, le=10**18)]

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
    "reward.by_source": "metrics before and after would measure different things",
    "train.optimizer.kind": "the checkpoint holds the state of this optimizer",
    "train.lora": "the checkpoint holds these adapters, or a model without any",
    "algorithm.advantage": "metrics before and after would measure different things",
    "algorithm.reference.update_every_steps": "a checkpoint holds the reference policy only if it follows",
}
"""Settings that must not change, and why. All others may: layout, learning rate, run length, devices, evaluation, …"""


@dataclass(frozen=True)
class TrainerState:
    """The driver's state after `step` steps. Plain JSON values only. A field that came later has a default."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")

    step: Annotated[int, pydantic.Field(ge=0, le=STEP_MAX)]
    """Steps finished; the next one is step + 1."""

    weight_version: Count
    """Version of the weights that the engines hold after the last sync."""

    data_cursor: Mapping[str, Any]
    """The place in the prompts, as the data cursor describes it."""

    recipe: Mapping[str, Any]
    """The resolved recipe of the run, to be compared on resume (allow_changes)."""

    episodes: Count = 0
    """Responses generated for training so far."""

    kl_coefficient: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] | None = None
    """Weight of the KL penalty in the next step; None without a penalty, as in fine-tuning."""

    evaluation: Mapping[str, float] | None = None
    """Metrics of an evaluation of these weights; None if they were not evaluated."""

    unlogged: Mapping[str, float] | None = None
    """Metrics of this step, if the run stopped before the evaluation with which they are logged; None if logged."""

    best_evaluation: float | None = None
    """Best value so far of the metric that early stopping watches."""

    evaluations_without_best: Count = 0
    """Evaluations since that best value."""

    tracker_runs: Mapping[str, str] | None = None
    """Run id of each tracker (mlflow, wandb), so that a resumed run continues in the same one."""

    def to_json(self) -> str:
        """Returns readable JSON. Raises TypeError or ValueError for what JSON cannot hold (NaN is allowed)."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def read(cls, path: Path) -> TrainerState:
        """Reads the file of a checkpoint. Raises CheckpointError."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UnusableCheckpointError(Problem(str(path), error.strerror or str(error), "a file")) from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "trainer.json") -> TrainerState:
        """Reads the JSON of to_json, as text or as a file's bytes. Raises CheckpointError, naming `where`, for anything
        else."""
        try:
            return pydantic.TypeAdapter(cls).validate_python(
                json.loads(text if isinstance(text, str) else text.decode("utf-8"))
            )
        except pydantic.ValidationError as error:
            named = [(".".join(map(str, mistake["loc"])), mistake) for mistake in error.errors()]
            raise UnusableCheckpointError(
                Problem(f"{where}: {name}" if name else where, brief(mistake["input"]), mistake["msg"])
                for name, mistake in named
            ) from None
        except (ValueError, RecursionError) as error:
            raise UnusableCheckpointError(Problem(where, given=first_line(error), needed="JSON")) from error


WRITTEN_OF_EVERY_ADVANTAGE = tuple(
    f"algorithm.advantage.{key}" for key in ("standard_deviation", "epsilon", "discount", "trace")
)
"""Settings that earlier versions wrote for every advantage, even for those that do not read them."""

BEFORE_IT_WAS_WRITTEN = {"train.optimizer.kind": "adam"}
"""Values that earlier versions had without writing them."""

_ABSENT = object()


def allow_changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Compares two resolved recipes (as JSON values). Raises RecipeError naming every change that is not allowed."""
    problems = [
        Problem(
            where,
            given=_show(given),
            needed=f"{_show(before)}, as in the run so far: {reason}",
            fix="set it back, or give the recipe another name to start a new run",
        )
        for where, before, given in _changes("", dict(saved), dict(new))
        if (reason := _reason(where)) is not None
        and not (given is _ABSENT and where in WRITTEN_OF_EVERY_ADVANTAGE)
        and not (before is _ABSENT and BEFORE_IT_WAS_WRITTEN.get(where) == given)
    ]
    if problems:
        raise RecipeError(problems)


def changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the differences between two resolved recipes (as JSON values), a line for each setting."""
    return [
        f"{where}: {_show(before)} -> {_show(given)}" for where, before, given in _changes("", dict(saved), dict(new))
    ]


def _reason(where: str) -> str | None:
    return next((why for key, why in FIXED.items() if where == key or where.startswith((f"{key}.", f"{key}["))), None)


def _changes(where: str, saved: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields every leaf that differs: its dotted key, with an index for lists (data.train[0].path), and both values."""
    if isinstance(saved, dict) and isinstance(new, dict):
        for key in (*new, *(key for key in saved if key not in new)):
            yield from _changes(f"{where}.{key}" if where else key, saved.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(saved, list) and isinstance(new, list) and len(saved) == len(new):
        for index, (before, given) in enumerate(zip(saved, new, strict=True)):
            yield from _changes(f"{where}[{index}]", before, given)
    elif saved != new:
        yield where, saved, new


def _show(value: Any) -> str:
    return "not given" if value is _ABSENT else repr(value)
