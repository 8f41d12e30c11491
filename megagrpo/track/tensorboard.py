"""TensorBoard event files in the run's directory. Needs megagrpo[tensorboard]. track/behind.py calls it."""

from __future__ import annotations

from typing import Any

from megagrpo.track.delivered import Delivered
from megagrpo.track.metric_lines import MetricLines
from megagrpo.track.sink import RunStart, Status

FOLDER = "tensorboard"


class TensorBoardRemote:
    """The run's event files. Each writer hides earlier writers' values of the steps that it writes."""

    def __init__(self, run: RunStart, delivered: Delivered, *, live: bool) -> None:
        """Sets the first step to write. live: the run continues after run.resumed_step; else it has ended."""
        self._run, self._delivered = run, delivered
        brought = int(delivered.of(FOLDER).get("step", -1))
        kept = run.resumed_step - run.unlogged if run.resumed_step else -1
        self._lines = MetricLines(run.directory / "metrics.jsonl", min(brought, kept) if live else brought)
        self._note()
        self._writer: Any = None
        self.brought = 0
        """Steps sent."""

    def bring(self) -> None:
        writer, self._writer = self._writer, None  # one that fails is not used again
        while lines := self._lines.ahead():
            writer = writer or self._new_writer()
            for line in lines:
                for name, value in line.metrics.items():
                    writer.add_scalar(name, value, line.step, walltime=line.seconds)
            writer.flush()
            count = len(lines)
            self._lines.take(count)
            self.brought += count
            self._note()
        self._writer = writer

    def rewind(self, step: int) -> None:
        self._close()
        self._lines.again(min(self._lines.after, step))
        self._note()

    def finish(self, status: Status) -> None:
        self._close()

    def _new_writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        run, folder = self._run, self._run.directory / FOLDER
        writer = SummaryWriter(str(folder), purge_step=self._lines.after + 1 if folder.exists() else None)
        if run.changed:
            writer.add_text(run.label, "\n\n".join(run.changed), run.resumed_step)
        return writer

    def _note(self) -> None:
        """Notes the last step that was written; after a rewind, the step from which a later sync continues."""
        self._delivered.note(FOLDER, step=self._lines.after)

    def _close(self) -> None:
        if self._writer:
            self._writer.close()
        self._writer = None
