"""A run in Weights & Biases. Needs megagrpo[wandb]. track/behind.py calls it; wandb sends in a process of its own."""

from __future__ import annotations

import os
from typing import Any

from megagrpo.processes.lifetime import let_family_idle
from megagrpo.recipe.schema import WandBConfig
from megagrpo.track.delivered import Delivered
from megagrpo.track.metric_lines import MetricLines
from megagrpo.track.sink import RunStart, Status

NAME = "wandb"
COLUMNS = (
    "step", "prompt_id", "sample", "prompt", "response", "ground_truth", "score", "parts", "answer", "error",
    "advantage", "finish", "tokens",
)  # fmt: skip


START_SECONDS, FINISH_SECONDS = 120, 50.0
"""Timeouts of wandb's own process: on a busy machine it starts slowly; at the end, a server may be gone."""


class WandBRemote:
    """One run in W&B, created with the first step. wandb takes no step twice, and none before the last."""

    def __init__(self, run: RunStart, settings: WandBConfig, delivered: Delivered) -> None:
        self._run, self._settings, self._delivered = run, settings, delivered
        known = delivered.of(NAME)
        self._lines = MetricLines(run.directory / "metrics.jsonl", int(known.get("step", -1)))
        self._samples_step = int(known.get("samples_step", -1))
        self._wandb: Any = None
        self.brought = 0
        """Steps sent."""

    def bring(self) -> None:
        while lines := self._lines.ahead():
            if self._wandb is None:
                self._begin()
                continue
            line = lines[0]
            before = self._lines.after
            self._wandb.log(line.metrics, step=line.step)
            self._lines.take(1)
            self.brought += 1
            # wandb keeps a step open until the next one: after a kill it may lack the last.
            self._delivered.note(NAME, step=before)
            self._bring_samples()
        if self._wandb:
            self._bring_samples()

    def rewind(self, step: int) -> None:
        """Reads metrics.jsonl anew. wandb keeps its values of these steps."""
        self._lines.again(self._lines.after)

    def finish(self, status: Status) -> None:
        if self._wandb:
            self._wandb.finish(exit_code=0 if status == "finished" else 1)
            self._delivered.note(NAME, step=self._lines.after)

    def _begin(self) -> None:
        os.environ.setdefault("WANDB__SERVICE_WAIT", str(START_SECONDS))
        os.environ["WANDB_SILENT"] = "true"  # else it asks on the terminal for a key that it does not have
        run = self._run
        for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # else below the home directory: it may not be writable
            os.environ.setdefault(variable, str(run.directory / "wandb" / "cache"))
        import wandb

        self._wandb = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=run.recipe.name,
            id=run.run_ids.get(NAME) or self._delivered.run,
            resume="allow",
            dir=str(run.directory),
            config=run.recipe.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", quiet=True, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True
            ),
        )
        let_family_idle(os.getpid())  # wandb has started processes, each in a session of its own
        self._delivered.note(NAME, run_id=self._wandb.id)
        self._lines.again(max(self._lines.after, self._wandb.step - 1))
        if run.changed:
            self._wandb.config.update({run.label: list(run.changed)}, allow_val_change=True)

    def _bring_samples(self) -> None:
        """Sends a table of the samples whose files exist by now: of the last step, and of others that were late."""
        import wandb

        from megagrpo.track.rollout_files import first_rows, rollout_file

        if found := self._missing_samples():
            paths = (rollout_file(self._run.directory, step) for step in found)
            try:
                count = self._settings.samples_per_step
                rows = [row for path in paths for row in first_rows(path, count, COLUMNS)]
            except FileNotFoundError:
                return  # a rewind has removed one meanwhile: the run repeats these steps
            rows = [row | {"parts": str(dict(row["parts"] or ()))} for row in rows]
            data = [[row[name] for name in COLUMNS] for row in rows]
            self._wandb.log({"samples": wandb.Table(columns=list(COLUMNS), data=data)}, step=self._lines.after)
            self._samples_step = found[-1]
            self._delivered.note(NAME, samples_step=found[-1])

    def _missing_samples(self) -> list[int]:
        """Returns the steps whose metrics wandb has, but whose samples it lacks."""
        from megagrpo.track.rollout_files import steps_between  # imports pyarrow

        wanted = self._settings.samples_per_step and self._run.recipe.track.rollouts
        return steps_between(self._run.directory, self._samples_step, self._lines.after) if wanted else []

    @property
    def lacks(self) -> str:
        """Returns the part that wandb no longer accepts, or "": samples that came after the last step's metrics."""
        missing = len(self._missing_samples())
        return f"the samples of {missing} steps, which came too late: W&B takes nothing after its last step" * bool(
            missing
        )
