"""TensorBoard event files in the run's directory. Needs megagrpo[tensorboard]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from megagrpo.track.status import Status
from megagrpo.track.tracked_run import Line, TrackedRun

FOLDER = "tensorboard"


class TensorBoard(TrackedRun):
    """The run's event files. A new writer hides earlier writers' values from its first step on."""

    title = "TensorBoard"
    field = Field(False, description="Write TensorBoard events; needs `pip install megagrpo[tensorboard]`.")
    package = "tensorboard"
    takes_repeated = True
    _writer: Any = None
    _step = -1  # of the last line in it

    def open(self) -> None:
        self._writer = None  # one that has failed is not used again

    def log(self, lines: Sequence[Line]) -> int:
        for line in lines:
            if self._writer is None or line.step <= self._step:
                self._begin(line.step)
            for name, value in line.metrics.items():
                self._writer.add_scalar(name, value, line.step, walltime=line.seconds)
            self._step = line.step
        self._writer.flush()
        return lines[-1].step

    def finish(self, status: Status) -> None:
        self._close()

    def _begin(self, step: int) -> None:
        """Opens a writer that hides what earlier ones wrote of `step` and of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._close()
        folder = self.directory / FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=step if folder.exists() else None)
        changes, written = self.delivered.changes, self.delivered.of(self.place).get("changes", ())
        for label in changes.keys() - written:
            self._writer.add_text(label, "\n\n".join(changes[label]), step)
        self._writer.flush()
        self.note(changes=sorted(changes))

    def _close(self) -> None:
        if self._writer:
            self._writer.close()
        self._writer = None
