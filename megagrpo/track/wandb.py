"""A run in Weights & Biases. Needs megagrpo[wandb]. wandb sends in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from megagrpo.section import NonNegativeInt, Section
from megagrpo.track.status import Status
from megagrpo.track.tracked_run import Line, TrackedRun

COLUMNS = (
    "step", "prompt_id", "sample", "prompt", "response", "ground_truth", "score", "parts", "answer", "error",
    "advantage", "finish", "tokens",
)  # fmt: skip
START_SECONDS, FINISH_SECONDS = 120, 50.0
"""Timeouts of wandb's own process: on a busy machine it starts slowly; at the end, a server may be gone."""


class WandBConfig(Section):
    """Weights & Biases tracking; needs `pip install megagrpo[wandb]`."""

    project: str = "megagrpo"
    """Project's name."""

    entity: str | None = None
    """Team or user; the default is wandb's own."""

    samples_per_step: NonNegativeInt = 8
    """Samples of each step in a table."""


class WandB(TrackedRun):
    """One run in W&B, created with the first step. wandb takes no step twice, and none before the last."""

    title = "Weights & Biases"
    package = "wandb"
    section = WandBConfig
    field = Field(None, description="Off unless given.")
    settings: WandBConfig
    _wandb: Any = None
    _step = -1  # the last one that wandb has; it may keep that one open

    def log(self, lines: Sequence[Line]) -> int:
        if self._wandb is None:
            self._begin()
        kept = self._step
        for line in lines:
            if line.step > self._step:
                self._wandb.log(line.metrics, step=line.step)
                # wandb keeps a step open until the next one: after a kill it may lack the last.
                kept, self._step = self._step, line.step
                self.update(line.step)
        return kept

    def finish(self, status: Status) -> None:
        if self._wandb:
            self._wandb.finish(exit_code=0 if status == "finished" else 1)

    def _begin(self) -> None:
        record = self.delivered
        os.environ.setdefault("WANDB__SERVICE_WAIT", str(START_SECONDS))
        os.environ["WANDB_SILENT"] = "true"  # else it asks on the terminal for a key that it does not have
        for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # else below the home directory: it may not be writable
            os.environ.setdefault(variable, str(self.directory / "wandb" / "cache"))
        import wandb

        from megagrpo.processes.lifetime import let_family_idle

        run = wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            name=self.recipe.name,
            id=next(iter(record.run_ids(self.name)), record.run),
            resume="allow",
            dir=str(self.directory),
            config=self.recipe.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", quiet=True, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True
            ),
        )
        let_family_idle(os.getpid())  # wandb has started processes, each in a session of its own
        self.note(run_id=run.id)
        self._step = max(int(record.of(self.place).get("step", -1)), run.step - 1)
        for label, changed in record.changes.items():
            run.config.update({label: changed}, allow_val_change=True)
        self._wandb = run

    def update(self, step: int) -> None:
        """Sends a table of the samples whose files exist by now: of the last step, and of others that were late."""
        if self._wandb is None or not (steps := self._missing_samples()):
            return
        import wandb

        from megagrpo.track.rollout_files import first_rows, rollout_file

        count, paths = self.settings.samples_per_step, (rollout_file(self.directory, missing) for missing in steps)
        try:
            rows = [row for path in paths for row in first_rows(path, count, COLUMNS)]
        except FileNotFoundError:
            return  # a rewind has removed one meanwhile: the run repeats these steps
        rows = [row | {"parts": str(dict(row["parts"] or ()))} for row in rows]
        data = [[row[name] for name in COLUMNS] for row in rows]
        self._wandb.log({"samples": wandb.Table(columns=list(COLUMNS), data=data)}, step=self._step)
        self.note(samples_step=steps[-1])

    def _missing_samples(self) -> list[int]:
        """Returns the steps whose metrics wandb has, but whose samples it lacks."""
        from megagrpo.track.rollout_files import steps_between  # imports pyarrow

        if not self.settings.samples_per_step or not self.recipe.track.rollouts:
            return []
        known = self.delivered.of(self.place)
        last = max(self._step, int(known.get("step", -1)))
        return steps_between(self.directory, int(known.get("samples_step", -1)), last)

    @property
    def lacks(self) -> str:
        """Returns a text about samples that came after the last step's metrics, or ""."""
        if not (missing := len(self._missing_samples())):
            return ""
        return f"the samples of {missing} steps, which came too late: W&B takes nothing after its last step"
