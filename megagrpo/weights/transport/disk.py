"""A checkpoint on a file system that training ranks and engines share, loaded by the engine's server itself.

Every training rank writes its boxes into the files of `directory/version_<n>`; nothing is gathered. The first training
rank lays the files out, and gives the directory its name when all have written, so that no process sees half a
checkpoint. A marker file in it says that a weight sync made it: a directory without the marker is neither replaced nor
removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megagrpo.errors import CheckpointError, EngineError, MegagrpoError, Problem, WeightSyncError
from megagrpo.weights.boxes import Manifest, classes_of
from megagrpo.weights.digest import sent_digests
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.export import Export, begin, finish_export, lay_out, write_part
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.transport.rendezvous import Rendezvous, Sync

MARKER = "megagrpo_sync.json"
"""The file that says that a directory holds weights for engines, and may be removed after them."""
LEADER = 0
"""The source that lays out the files and names the directory."""

Post = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""post(path, body): one request to the engine's server; its answer. Raises EngineError, naming the engine."""


@dataclass(frozen=True)
class DiskFiles:
    """The directory of checkpoints. Each is a whole model, with the config and tokenizer of `model_directory`."""

    directory: Path
    model_directory: Path
    dtype: str
    """The dtype in config.json; each tensor has the dtype in which the engines hold it."""

    def version(self, version: int) -> Path:
        return self.directory.absolute() / f"version_{version}"


def plan_for_files(sources: Sequence[Manifest], destinations: Sequence[Manifest], files: DiskFiles) -> WeightPlan:
    """Plans transfers from training ranks to the files of a checkpoint, each tensor in the engine ranks' dtype."""
    dtypes: dict[str, str] = {}
    for of_class in classes_of(destinations):
        for placement in of_class.manifest.placements:
            dtypes.setdefault(placement.box.tensor, of_class.manifest.storages[placement.storage].dtype)
    return make_plan(sources, checkpoint.new_files(read_architecture(files.model_directory), dtypes))


class DiskSender:
    """The end of the `source`-th training rank of `plan`. It needs the whole plan."""

    def __init__(self, plan: WeightPlan, source: int, rendezvous: Rendezvous, files: DiskFiles) -> None:
        self._for_engines = plan.part_for_source(source)
        self._plan = plan_for_files(plan.sources, plan.destinations, files)
        self._source, self._files = source, files
        self._member = rendezvous.join(plan.sources[source].holder)
        self._member.announce()

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes this rank's part of the checkpoint, under the contract of BucketSender.send."""
        export = Export(self._files.version(version), self._plan.destinations)
        needed, fix = "room for one more checkpoint of the model", "free some, or set another weights.directory"
        with self._member.attend(version) as sync:
            try:
                if self._source == LEADER:
                    self._lead(sync, export, tensors)
                else:
                    missing = self._missing("the files to be laid out", [LEADER])
                    self._member.next_message(f"source {self._source}", tuple[str, int], lambda: missing)
                    write_part(export, self._plan, self._source, tensors)
                    self._member.push(f"source {LEADER}", ["written", self._source])
            except CheckpointError as error:
                problems = [Problem(p.where, p.given, p.needed or needed, p.fix or fix) for p in error.problems]
                raise WeightSyncError(problems) from error

    def digests(self, tensors: Mapping[str, torch.Tensor], active: Sequence[int]) -> dict[int, dict[str, int]]:
        """Returns this rank's part of the digests expected at each of the `active` destinations."""
        return sent_digests(self._for_engines, self._source, tensors, active)

    def bucket_digests(
        self, tensors: Mapping[str, torch.Tensor], tensor: str, active: frozenset[int]
    ) -> dict[str, int]:
        """Returns an empty dict: files have no buckets."""
        return {}

    def close(self) -> None:
        """Does nothing: nothing is kept between syncs."""

    def _lead(self, sync: Sync, export: Export, tensors: Mapping[str, torch.Tensor]) -> None:
        others = set(range(len(self._plan.sources))) - {LEADER}
        for destination in sync.destinations:
            self._member.push(f"destination {destination}", ["begun", str(export.directory)])
        try:
            self._begin(export)
            for source in sorted(others):
                self._member.push(f"source {source}", ["laid out", LEADER])
            write_part(export, self._plan, LEADER, tensors)
            while others:
                pop = partial(self._member.pop, f"source {LEADER}", tuple[str, int])
                _, source = self._member.wait(pop, partial(self._missing, "their parts of the files", others))
                others.discard(source)
            finish_export(export)
        except MegagrpoError:
            shutil.rmtree(export.partial, ignore_errors=True)  # a full disk gets its room back
            raise
        for destination in sync.destinations:
            self._member.push(f"destination {destination}", ["ready", str(export.directory)])

    def _begin(self, export: Export) -> None:
        if export.directory.exists() and not (export.directory / MARKER).is_file():
            given, needed = f"it is there and has no {MARKER}: no weight sync made it", "a directory of its own"
            raise CheckpointError(Problem(str(export.directory), given, needed, "set another weights.directory"))

        def make() -> None:
            (export.partial / MARKER).write_text("{}\n", encoding="utf-8")
            lay_out(export.partial, export.files, self._files.model_directory, self._files.dtype)

        begin(export, make)

    def _missing(self, what: str, sources: Iterable[int]) -> Problem:
        names = ", ".join(self._plan.sources[source].holder for source in sorted(sources))
        return self._member.late(f"{self._member.name} waits for {what}", f"nothing from {names}")


class DiskReceiver:
    """The end of an engine, beside its server. Its ranks are these destinations of the plan. `load` makes the server load
    a directory, and raises EngineError if it refuses. `loaded` is the directory that the server has loaded."""

    def __init__(
        self, destinations: Sequence[int], rendezvous: Rendezvous, load: Callable[[Path], None], name: str
    ) -> None:
        self._destinations, self._load = destinations, load
        self._member = rendezvous.join(name)
        self._member.announce()
        self.loaded: Path | None = None

    def receive(self, version: int) -> None:
        """Makes the server load the checkpoint of the open sync, with or without an update open on the server."""
        where = f"{self._member.name}: weights of version {version}"
        missing = self._member.late(where, "no checkpoint by the training ranks")
        with self._member.attend(version):
            for destination in self._destinations:
                kind = ""
                while kind != "ready":
                    queue = f"destination {destination}"
                    kind, directory = self._member.next_message(queue, tuple[str, str], lambda: missing)
            self.loaded = Path(directory)
            with server_errors(f"{self._member.name}: {directory}"):
                self._load(self.loaded)


@contextmanager
def server_errors(where: str) -> Iterator[None]:
    """Raises a server's refusal as a WeightSyncError: the engine is then asked again before it is restarted."""
    try:
        yield
    except EngineError as error:
        problems = [replace(problem, where=f"{where}: {problem.where}") for problem in error.problems]
        raise WeightSyncError(problems) from error


def remove_older(directory: Path, version: int) -> None:
    """Removes the checkpoints of weights before `version`, which every engine has committed, and unfinished ones.

    The next call removes files that a slow file system keeps now. Files that DiskSender did not write stay.
    """
    for entry, of_version, whole in _written(directory):
        if of_version < version or not whole:
            _remove(entry)


def remove_all(directory: Path) -> None:
    """Removes everything that DiskSender wrote there, and the directory if nothing else is in it. Raises nothing."""
    for entry, _, _ in _written(directory):
        _remove(entry)
    with suppress(OSError):
        directory.rmdir()


def _written(directory: Path) -> Iterator[tuple[Path, int, bool]]:
    """Yields the checkpoints that DiskSender wrote: path, version, and whether the checkpoint is whole."""
    for entry in directory.glob("*version_*"):
        match = re.fullmatch(r"\.?version_(\d+)(\.partial|\.replaced)?", entry.name)
        if match and (entry / MARKER).is_file():
            yield entry, int(match[1]), not match[2]


def _remove(entry: Path) -> None:
    """Removes a checkpoint, its marker last: until then the rest is known as a weight sync's."""
    with suppress(OSError):
        for inside in entry.iterdir():
            if inside.name != MARKER:
                shutil.rmtree(inside) if inside.is_dir() and not inside.is_symlink() else inside.unlink()
        shutil.rmtree(entry)
