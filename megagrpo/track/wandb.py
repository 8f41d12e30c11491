"""Weights & Biases. Needs megagrpo[wandb]. wandb has a process of its own, so that no step waits for it."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from megagrpo.recipe import schema
from megagrpo.track.sink import RunStart, Status


class WandBTracker:
    def __init__(self, settings: schema.WandBConfig) -> None:
        self._settings = settings
        self.run_id: str | None = None

    def start(self, run: RunStart) -> None:
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=run.recipe.name,
            id=run.run_ids.get("wandb"),
            resume="allow",
            dir=str(run.directory),
            config=run.recipe.model_dump(mode="json"),
        )
        self.run_id = self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
