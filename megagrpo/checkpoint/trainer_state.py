"""What the driver itself must remember to continue a run: everything that is not on the training ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from megagrpo.errors import CheckpointError, Problem


@dataclass(frozen=True)
class TrainerState:
    """The driver's state after `step` steps. Plain JSON values only."""

    step: int
    """Steps finished; the next one is step + 1."""

    weight_version: int
    """Version of the weights that the engines hold after the last sync."""

    data_cursor: Mapping[str, Any]
    """Where the prompts stand, as the data cursor describes itself."""

    recipe: Mapping[str, Any]
    """The resolved recipe of the run, to be compared on resume (recipe_changes)."""

    episodes: int = 0
    """Responses generated for training so far."""

    kl_coefficient: float | None = None
    """Weight of the KL penalty in the next step; None where there is no such penalty, as in fine-tuning."""

    evaluation: Mapping[str, float] | None = None
    """Metrics of an evaluation of exactly these weights; None if they were not evaluated."""

    unlogged: Mapping[str, float] | None = None
    """Metrics of this step that wait for its evaluation, before which the run was stopped; None if they are logged."""

    best_evaluation: float | None = None
    """Best value so far of the metric that early stopping watches."""

    evaluations_without_best: int = 0
    """Evaluations since that best value."""

    tracker_runs: Mapping[str, str] | None = None
    """Run id of each tracker (mlflow, wandb), so that a resumed run goes on in the same one."""

    def to_json(self) -> str:
        """Readable JSON. Raises TypeError or ValueError for what JSON cannot hold (NaN among them is allowed)."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str = "trainer.json") -> TrainerState:
        """The inverse of to_json. Raises CheckpointError, naming `where`, for anything else."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointError(Problem(where, given=str(error), needed="JSON")) from error
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}  # what came later has a default
        if not isinstance(values, dict) or not needed <= set(values) <= known:
            given = sorted(values) if isinstance(values, dict) else type(values).__name__
            keys = f"the keys {sorted(needed)}, and of others only {sorted(known - needed)}"
            raise CheckpointError(Problem(where, given=f"{given}", needed=keys))
        return cls(**values)
