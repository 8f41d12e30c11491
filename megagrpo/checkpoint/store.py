"""The directory of a run's checkpoints: written atomically, found again, thinned out.

    checkpoints/
      step_000010/            complete: appeared here by one rename, after everything in it was on disk
        rank/                 what the training ranks wrote (megatron/state.py)
        trainer.json          what the driver remembers (TrainerState)
        MANIFEST.json         every other file with its size and checksum, written last: it tells whether all are whole
        CONFIRMED             added once the weights have made finite numbers, in a step or an evaluation
      .saving_step_000020/    being written, or left behind by a run that was killed while writing
      .deleting_step_000005/  being deleted
      .replaced_step_000010/  a damaged one, out of the way of the new step_000010

The driver calls `begin`, tells every rank to save into the directory that it returns, and calls `commit`. A complete
checkpoint is not touched before the new one is complete. One driver writes; all ranks see the same file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic

from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import CheckpointError, Problem, UnusableCheckpointError, first_line
from megagrpo.weights.files import sync_directories

MANIFEST, CONFIRMED = "MANIFEST.json", "CONFIRMED"
MANIFEST_FORMAT = 1
READERS = 8
"""Files whose checksums are computed at the same time."""
RANK = "rank"
TRAINER = "trainer.json"
SAVING, DELETING, REPLACED = ".saving_", ".deleting_", ".replaced_"
COMPLETE_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint, as it was when written. `path` is relative to the checkpoint, with forward slashes."""

    path: str
    size_bytes: int
    blake2b: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `warnings` says which newer ones were passed over, and why."""

    path: Path
    state: TrainerState
    warnings: tuple[str, ...] = ()

    @property
    def rank_directory(self) -> Path:
        return self.path / RANK


class CheckpointStore:
    """The checkpoints of one run under `directory`: the newest `keep_last`, and the best by `keep_best`.

    The newest that `confirm` has confirmed stays as well; the oldest, if none was confirmed.

    `keep_best` names a metric in TrainerState.evaluation (larger is better); None keeps only the newest.
    """

    def __init__(self, directory: Path, *, keep_last: int, keep_best: str | None = None) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._confirmed = False
        self.verify: Callable[[Path], list[str]] = damage
        """Returns the faults of a directory's checkpoint. Reads it in this process; a run on several nodes on all."""

    def begin(self, step: int) -> Path:
        """Makes the empty directory into which the ranks save `step`, and returns it. Raises CheckpointError.

        Removes leftovers of earlier attempts first, because they take disk space.
        """
        rank_directory = self._path(step, SAVING) / RANK
        try:
            self.remove_leftovers()
            rank_directory.mkdir(parents=True)
        except OSError as error:
            raise _not_written(step, self.directory, error) from error
        return rank_directory

    def commit(self, state: TrainerState, rank_files: Iterable[SavedFile]) -> Checkpoint:
        """Completes the checkpoint of `state.step`, then deletes those no longer kept.

        `rank_files` are the descriptions that the ranks returned, with paths relative to the rank directory.
        Raises CheckpointError; the attempt is then removed and older checkpoints are as they were.
        """
        saving, final = self._path(state.step, SAVING), self._path(state.step)
        try:
            write_durably(saving / TRAINER, state.to_json())
            files = [SavedFile(f"{RANK}/{file.path}", file.size_bytes, file.blake2b) for file in rank_files]
            write_manifest(saving, [*files, describe(saving, saving / TRAINER)])
            wrong = damage(saving, checksums=False)
            if wrong:
                raise CheckpointError([Problem(f"checkpoint of step {state.step}", given=line) for line in wrong])
            sync_directories([saving / RANK, saving])
            if final.exists():
                final.rename(self._path(state.step, REPLACED))
            saving.rename(final)
            sync_directories([self.directory])
        except OSError as error:
            raise _not_written(state.step, self.directory, error) from error
        finally:
            shutil.rmtree(saving, ignore_errors=True)
        shutil.rmtree(self._path(state.step, REPLACED), ignore_errors=True)
        self._confirmed = False
        self._thin_out()
        return Checkpoint(final, state)

    def confirm(self) -> None:
        """Confirms the newest checkpoint, once its weights have made finite numbers in a step or an evaluation: finite
        weights may fail to. Deletes the one that was confirmed before it, unless it is to be kept."""
        if not self._confirmed and (newest := self.newest()):
            with contextlib.suppress(OSError):  # a full disk: the one before stays
                (newest / CONFIRMED).touch()
            self._confirmed = True
            self._thin_out()

    def since_confirmed(self) -> tuple[Path | None, list[Path]]:
        """Returns the newest confirmed checkpoint, if there is one, and all that are newer."""
        paths = [self._path(step) for step in self._steps()]
        confirmed = [index for index, path in enumerate(paths) if (path / CONFIRMED).exists()]
        return (paths[confirmed[-1]], paths[confirmed[-1] + 1 :]) if confirmed else (None, paths)

    def abandon(self, step: int) -> None:
        """Removes what an attempt to save `step` has written, after a rank failed."""
        shutil.rmtree(self._path(step, SAVING), ignore_errors=True)

    def latest_complete(self, before: int | None = None) -> Checkpoint | None:
        """Returns the newest checkpoint, of a step before `before`, whose files are all as they were written; None if
        there is no such checkpoint at all.

        Damaged ones are passed over with a warning. If all are damaged: CheckpointError with a problem for each.
        """
        steps = [step for step in self._steps() if before is None or step < before]
        problems: list[Problem] = []
        for step in reversed(steps):
            path = self._path(step)
            wrong = self.verify(path)
            if not wrong:
                try:
                    state = TrainerState.read(path / TRAINER)
                except CheckpointError as error:
                    problems.extend(error.problems)
                    continue
                return Checkpoint(path, state, tuple(f"{p.where} was passed over: {p.given}" for p in problems))
            problems.append(Problem(str(path), given="; ".join(wrong)))
        if problems:
            fix = f"restore the files, or remove {self.directory} to start the run again from its first step"
            raise UnusableCheckpointError([Problem(p.where, p.given, "a whole checkpoint", fix) for p in problems])
        return None

    def newest(self) -> Path | None:
        """Returns the newest complete checkpoint's directory, without a look at its files; None if there is none."""
        steps = self._steps()
        return self._path(steps[-1]) if steps else None

    def best(self) -> float | None:
        """Returns the largest value of `keep_best` among the complete checkpoints; None if no checkpoint has one."""
        return max((value for step in self._steps() if (value := self._evaluation(step)) is not None), default=None)

    def remove_leftovers(self) -> None:
        """Removes what killed runs left half written or half deleted; restores a checkpoint that was being replaced.

        For the one driver that writes here, before `latest_complete`: another process may be looking for checkpoints
        too.
        """
        if not self.directory.is_dir():
            return
        for path in self.directory.glob(f"{REPLACED}step_*"):
            final = self.directory / path.name.removeprefix(REPLACED)
            if not final.exists():
                path.rename(final)
        for prefix in (SAVING, DELETING, REPLACED):
            for path in self.directory.glob(f"{prefix}step_*"):
                shutil.rmtree(path, ignore_errors=True)

    def _thin_out(self) -> None:
        steps = self._steps()
        confirmed = [step for step in steps if (self._path(step) / CONFIRMED).exists()]
        kept = {*steps[-self.keep_last :], *(confirmed or steps[:1])[-1:]}
        if self.keep_best is not None:
            values = {step: value for step in steps if (value := self._evaluation(step)) is not None}
            if values:
                kept.add(max(values, key=lambda step: (values[step], step)))
        for step in steps:
            if step not in kept:
                # Renamed first: a checkpoint that is half deleted must not look like a damaged one.
                doomed = self._path(step, DELETING)
                with contextlib.suppress(OSError):  # tried again after the next save
                    self._path(step).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _evaluation(self, step: int) -> float | None:
        try:
            state = TrainerState.read(self._path(step) / TRAINER)
        except CheckpointError:
            return None
        value = (state.evaluation or {}).get(self.keep_best or "")
        return value if value is not None and not math.isnan(value) else None

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = [COMPLETE_NAME.fullmatch(path.name) for path in self.directory.iterdir() if (path / MANIFEST).exists()]
        return sorted(int(name[1]) for name in names if name)

    def _path(self, step: int, prefix: str = "") -> Path:
        return self.directory / f"{prefix}step_{step:06d}"


def _not_written(step: int, directory: Path, error: OSError) -> CheckpointError:
    fix = "free disk space or set checkpoint.directory; checkpoints already complete are untouched"
    return CheckpointError(Problem(f"checkpoint of step {step} in {directory}", given=str(error), fix=fix))


def describe(root: Path, path: Path) -> SavedFile:
    """Returns size and checksum of the file `path` under the checkpoint directory `root`. Raises OSError."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))  # type: ignore[arg-type]
        size = os.fstat(stream.fileno()).st_size
    return SavedFile(path.relative_to(root).as_posix(), size, digest.hexdigest())


def write_manifest(root: Path, files: Iterable[SavedFile]) -> None:
    """Writes MANIFEST.json and forces it to disk. Raises OSError."""
    listed = sorted(files, key=lambda file: file.path)
    content = {"format": MANIFEST_FORMAT, "files": [asdict(file) for file in listed]}
    write_durably(root / MANIFEST, json.dumps(content, indent=2))


def read_manifest(root: Path) -> list[SavedFile]:
    """Reads the files that a checkpoint should have. Raises OSError, or ValueError if the manifest is damaged."""
    if (root / MANIFEST).exists() and not (root / MANIFEST).is_file():
        raise ValueError(f"{MANIFEST} is a directory, a device or a pipe")
    try:
        content = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        files = pydantic.TypeAdapter(list[SavedFile]).validate_python(content["files"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {first_line(error)}") from error
    if content["format"] != MANIFEST_FORMAT:
        raise ValueError(f"{MANIFEST} has format {content['format']}, this version reads {MANIFEST_FORMAT}")
    return files


def damage(root: Path, *, checksums: bool = True) -> list[str]:
    """Returns the faults of the checkpoint at `root`, a line for each file; an empty list if it is whole.

    Sizes are always compared; `checksums` reads every byte as well, several files at a time.
    """
    try:
        expected = read_manifest(root)
    except (OSError, ValueError) as error:
        return [str(error)]
    return damaged(root, expected, checksums=checksums)


def damaged(root: Path, expected: Iterable[SavedFile], *, checksums: bool = True) -> list[str]:
    """Returns a line for each of these files that is not as it was written."""
    with ThreadPoolExecutor(READERS) as readers:
        return [line for line in readers.map(lambda file: _file_damage(root, file, checksums), expected) if line]


def _file_damage(root: Path, expected: SavedFile, checksums: bool) -> str:
    path = root / expected.path
    try:
        size = path.stat().st_size
        if not path.is_file():
            return f"{expected.path} is a directory, a device or a pipe"
        if size != expected.size_bytes:
            return f"{expected.path} has {size} bytes instead of {expected.size_bytes}"
        if checksums and describe(root, path) != expected:
            return f"{expected.path} has another checksum than when it was written"
    except OSError as error:
        return f"{expected.path}: {error.strerror or error}"
    except ValueError as error:  # a name with NUL, or one outside of the checkpoint
        return f"{expected.path}: {error}"
    return ""


def write_durably(path: Path, text: str) -> None:
    """Writes a text file and forces it to disk. Raises OSError."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
