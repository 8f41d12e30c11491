"""A conversion in units, which resumes after a kill and whose result appears all at once.

.NAME.partial/          beside the directory NAME that will be made
  journal               what is being made from what; then a line for each unit that is on disk
  output/               renamed to NAME when every unit is in it
NAME/converted.json     what it was made from: the mark of a directory that `--overwrite` may replace
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from megagrpo.checkpoint.torch_dist import Chunk
from megagrpo.convert.source import CONFIG, Source
from megagrpo.errors import CheckpointError, ModelError, Problem, UnusableCheckpointError
from megagrpo.progress import progress
from megagrpo.weights.families.parts.part import Tensor
from megagrpo.weights.files import publish, sync_directories

FORMAT = 3
"""The format of a conversion under way. A conversion that another version has begun is not continued."""
MARK = "converted.json"
PIECE_BYTES = 8 * 1024**2
"""Bytes that are read, cast and written at once."""
CONTINUES = "finished parts are kept: the same command resumes there"

Part = TypeVar("Part", Tensor, Chunk)
Advance = Callable[[int], None]
"""Adds a number of bytes to the finished ones."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion. `left_out` are stored tensors of the source that the model does not have."""

    directory: Path
    tensors: int
    bytes: int
    left_out: tuple[str, ...]
    continued: int
    """Units (layers, mostly) that an earlier attempt had already done."""


class Target(ABC):
    """The writer of a conversion's directory. Its functions raise OSError if the disk does not take it."""

    unit_bytes: Sequence[int]
    """Bytes of each unit. A unit is a part of the work, such as a layer, that is done again if it was not finished."""

    def __init__(self, source: Source, dtype: str | None) -> None:
        """Plans the files. `dtype` is that of the model; None keeps each tensor's own."""
        self._source, self._dtypes = source, dict(source.dtypes)
        if dtype is not None:
            self._dtypes = {tensor.name: tensor.stored_as(dtype) for tensor in source.tensors}

    @abstractmethod
    def begin(self, directory: Path) -> None:
        """Makes what must be there before the first unit, in an empty directory."""

    @abstractmethod
    def write(self, index: int, directory: Path, advance: Advance) -> Any:
        """Writes unit `index` and forces it to disk. Returns what `finish` needs to know about it, as JSON values."""

    def finish(self, directory: Path, written: Sequence[Any]) -> None:  # noqa: B027
        """Completes the directory, if units leave anything to do; `written` is what `write` returned for each unit."""


@torch.no_grad()
def convert(
    source: Source, output: Path, target: type[Target], dtype: str | None, kind: str, *options: str, overwrite: bool
) -> Converted:
    """Converts all of `source` to `output`. `kind` and `options` are the other settings that decide its bytes.

    An earlier attempt at the same output from the same source is continued, any other is removed. With `overwrite`,
    an earlier conversion in `output` is replaced at the very end; anything else there is refused. Raises ModelError or
    CheckpointError; `output` is as it was then, and what is done is kept unless the source cannot be converted at all.
    """
    output = output.absolute()
    _check_output(output, source, overwrite)
    writer, decided = target(source, dtype), [kind, dtype, *options]
    config = (source.model_directory / CONFIG).read_text(encoding="utf-8")
    # Sizes and times tell whether a file of the source has changed since an earlier attempt.
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    identity = json.dumps([FORMAT, decided, str(source.directory), files, config])
    partial = output.with_name(f".{output.name}.partial")
    sizes = writer.unit_bytes
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / "journal").open("a+", encoding="utf-8", errors="replace") as journal:
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(Problem(f"output {output}", "another process is making it")) from None
            making = partial / "output"
            written = _entries(journal, identity) if making.is_dir() else []
            if not written:
                shutil.rmtree(making, ignore_errors=True)
                making.mkdir()
                writer.begin(making)
                journal.truncate(0)
                _append(journal, identity, 0)
            earlier = len(written)
            title = f"{source.directory.name} to {output.name}"
            with progress(title, sum(sizes), "bytes", sum(sizes[:earlier])) as work:
                for index in range(earlier, len(sizes)):
                    written.append(writer.write(index, making, work.advance))
                    _append(journal, written[-1], index + 1)
            writer.finish(making, written)
            made_from = {"source": str(source.directory), "options": decided}
            (making / MARK).write_text(json.dumps(made_from, indent=2), encoding="utf-8")
            _sync_files(making)
            publish(making, output)
        shutil.rmtree(partial, ignore_errors=True)
    except (ModelError, UnusableCheckpointError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        given = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        begun = os.path.isdir(partial)  # where Path.is_dir may raise
        fix = CONTINUES if begun else "choose another place"
        problem = Problem(f"output {output}", given, "a place that can be written", fix)
        raise (CheckpointError if begun else UnusableCheckpointError)(problem) from error
    return Converted(output, len(source.tensors), sum(sizes), source.left_out, earlier)


def _check_output(output: Path, source: Source, overwrite: bool) -> None:
    """Raises CheckpointError if `output` holds the source, or anything but an earlier conversion to be replaced."""
    where, place = f"output {output}", output.resolve()
    for read in {source.directory, source.model_directory, *(file.parent for file in source.files)}:
        if read.resolve().is_relative_to(place):
            given = "the source itself" if read.resolve() == place else f"a directory that holds the source, {read}"
            raise UnusableCheckpointError(Problem(where, given, "another directory"))
    if not output.is_symlink() and not output.exists():
        return
    if output.is_symlink() or not (output / MARK).is_file():
        needed = f"a directory that does not exist, or one that an earlier conversion made (with {MARK})"
        raise UnusableCheckpointError(
            Problem(where, "it exists", needed, "choose another place, or remove it yourself")
        )
    if not overwrite:
        fix = "choose another place, or --overwrite to replace it"
        raise UnusableCheckpointError(Problem(where, "it exists", "a directory that does not", fix))


def by_layer(parts: Iterable[Part], name_of: Callable[[Part], str]) -> list[list[Part]]:
    """Collects the parts of each layer, in their order; parts outside of layers are collected by name."""
    units: dict[int | str, list[Part]] = {}
    for part in parts:
        units.setdefault(name_of(part) if part.layer is None else part.layer, []).append(part)
    return list(units.values())


def _entries(journal: IO[str], identity: str) -> list[Any]:
    """Reads the units recorded as done. A last line without its end was being written when the process died."""
    journal.seek(0)
    entries, length = [], 0
    for number, line in enumerate(journal.read().splitlines(keepends=True)):
        text = line.partition(" ")[2].removesuffix("\n")
        if line != _line(text, number):  # the line is damaged
            break
        entries.append(json.loads(text))
        length += len(line.encode("utf-8"))
    if entries[:1] != [identity]:
        return []
    journal.truncate(length)
    return entries[1:]


def _append(journal: IO[str], entry: Any, number: int) -> None:
    journal.write(_line(json.dumps(entry), number))
    journal.flush()
    os.fsync(journal.fileno())


def _line(text: str, number: int) -> str:
    """Returns a line of the journal: a checksum of its number and text, and the text."""
    return f"{hashlib.blake2b(f'{number} {text}'.encode(), digest_size=8).hexdigest()} {text}\n"


def _sync_files(directory: Path) -> None:
    folders = [directory]
    for path in directory.rglob("*"):
        if path.is_dir():
            folders.append(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directories(folders)
