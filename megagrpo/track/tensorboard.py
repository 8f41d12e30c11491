"""TensorBoard event files in the run's directory. Needs megagrpo[tensorboard]."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from megagrpo.track.sink import RunStart, Status


class TensorBoardTracker:
    def start(self, run: RunStart) -> None:
        # purge_step hides the points that a resumed run will make again.
        purge = run.resumed_step + 1 if run.resumed_step else None
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: Status) -> None:
        self._writer.close()
