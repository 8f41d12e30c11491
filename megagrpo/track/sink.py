"""What every tracker is told, and the two that are a few calls: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from megagrpo.recipe.schema import AnyRecipe, WandBConfig

Status = Literal["finished", "failed", "interrupted"]
"""How a run ended: at its end, with an error, or by a signal or Ctrl-C."""


@dataclass(frozen=True)
class RunStart:
    """A run that starts (resumed_step 0), or continues after `resumed_step`.

    unlogged: the run was stopped before that step was evaluated, and logs it now. number: of this start, from 1.
    changed: lines about settings that were others until then.
    """

    recipe: AnyRecipe
    directory: Path
    total_steps: int
    resumed_step: int = 0
    run_ids: Mapping[str, str] = field(default_factory=dict)  # by tracker, the id that it gave this run before
    unlogged: bool = False
    number: int = 1
    changed: Sequence[str] = ()

    @property
    def label(self) -> str:
        """What `changed` is called in trackers."""
        return f"start_{self.number}_after_step_{self.resumed_step}"


class Sink(Protocol):
    """One place that metrics go to. One thread calls the methods, in this order."""

    def start(self, run: RunStart) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, status: Status) -> None: ...


class SinkWithRun(Sink, Protocol):
    """A tracker that gives runs ids of its own."""

    @property
    def run_id(self) -> str | None:
        """Its id of this run; None if it has not answered yet."""


class TensorBoardTracker:
    """TensorBoard event files in the run's directory. Needs megagrpo[tensorboard]."""

    def start(self, run: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the points that a resumed run will make again.
        purge = run.resumed_step + 1 if run.resumed_step else None
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge)
        if run.changed:
            self._writer.add_text(run.label, "\n\n".join(run.changed), run.resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: Status) -> None:
        self._writer.close()


class WandBTracker:
    """Weights & Biases. Needs megagrpo[wandb]. wandb logs in a process of its own, so that no step waits for it."""

    def __init__(self, settings: WandBConfig) -> None:
        self._settings = settings
        self.run_id: str | None = None

    def start(self, run: RunStart) -> None:
        import wandb

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
        if run.changed:
            self._run.config.update({run.label: list(run.changed)}, allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
