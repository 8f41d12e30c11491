"""Where a conversion reads: any checkpoint as boxes of its model's Hugging Face tensors, a part at a time."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megagrpo.checkpoint.integrity import damage
from megagrpo.checkpoint.store import RANK, TRAINER, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.convert.safetensors_file import read_region
from megagrpo.convert.torch_checkpoint import METADATA, TorchCheckpoint
from megagrpo.errors import CheckpointError, ModelError, Problem
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement
from megagrpo.weights.coverage import check_sources
from megagrpo.weights.families import read_architecture, tensors_of
from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.sides import checkpoint, torch_dist
from megagrpo.weights.views import box_view, torch_dtype

Kind = Literal["hugging face", "torch_dist", "training checkpoint"]
TRACKER = "latest_checkpointed_iteration.txt"
COMPANION_MODEL = "hugging_face"
"""Beside a torch_dist checkpoint that was converted: the config and tokenizer of the model."""
MAIN_WEIGHTS = "param."
"""How a training checkpoint calls the weights (megatron/state.py); the moments of Adam are not converted."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from. `model_directory` has the config.json that belongs to it, and the tokenizer."""

    kind: Kind
    directory: Path
    model_directory: Path
    architecture: Architecture
    dtypes: Mapping[str, str]
    left_out: tuple[str, ...]
    """Names of stored tensors that are not of the model."""
    files: tuple[Path, ...]
    _placements: Mapping[str, Sequence[Placement]]
    _region: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]
    _forget: Callable[[], None]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tensors_of(self.architecture)

    def dtypes_as(self, dtype: str | None) -> dict[str, str]:
        """Of each tensor in a model of `dtype`; None: as stored."""
        if dtype is None:
            return dict(self.dtypes)
        return {tensor.name: tensor.stored_as(dtype) for tensor in self.tensors}

    def read(self, box: Box) -> torch.Tensor:
        """The values of `box`, in its shape and the dtype that dtypes[box.tensor] says.

        Raises CheckpointError if they cannot be read.
        """
        values = torch.empty(box.shape, dtype=torch_dtype(self.dtypes[box.tensor]))
        for placement in self._placements[box.tensor]:
            common = placement.box.intersect(box)
            if common is None:
                continue
            part = placement.part(common)
            region = self._region(part.storage, part.at, part.local_shape)
            whole = Placement(part.storage, (0,) * len(part.at), part.axes, common)
            at = (slice(s - b, s - b + n) for s, b, n in zip(common.start, box.start, common.shape, strict=True))
            values[tuple(at)].copy_(box_view(region, whole))
        return values

    def forget(self) -> None:
        """Frees what was kept because neighbouring tensors lie in the same place."""
        self._forget()


def open_source(path: Path, model: Path | None = None, *, otherwise: Path | None = None) -> Source:
    """The checkpoint at `path`, of whatever kind.

    `model` is the Hugging Face directory with its config, for kinds that have none: by default the one that it was
    converted or trained from, and failing that `otherwise`.

    Raises: ModelError or CheckpointError if it is not a checkpoint, is not whole, or is of another model.
    """
    path = path.absolute()
    if (path / METADATA).is_file():
        return _torch_source(path, path.parent, model, otherwise)
    if (path / TRAINER).is_file() and (path / RANK).is_dir():
        return _training_source(path, model, otherwise)
    if (path / TRACKER).is_file():
        return _torch_source(_latest_iteration(path), path, model, otherwise)
    if (path / "config.json").is_file():
        return _hugging_face_source(path, model)
    if any(path.glob("step_*")):
        latest = CheckpointStore(path, keep_last=1).latest_complete()
        if latest is not None:
            return _training_source(latest.path, model, otherwise)
    given = "no such directory" if not path.is_dir() else "a directory with none of them"
    needed = (
        "a Hugging Face model (config.json), a Megatron-LM torch_dist checkpoint "
        f"({TRACKER} or {METADATA}), or a training checkpoint of megagrpo (step_*)"
    )
    raise CheckpointError(Problem(str(path), given, needed))


def pieces(box: Box, item_bytes: int, limit_bytes: int) -> list[Box]:
    """The box as runs of rows of at most `limit_bytes` each, or of one row where a row is longer."""
    if not box.shape:
        return [box]
    row_bytes = math.prod(box.shape[1:]) * item_bytes
    step = max(1, limit_bytes // row_bytes)
    return [
        Box(
            box.tensor,
            (box.start[0] + low, *box.start[1:]),
            (min(step, box.shape[0] - low), *box.shape[1:]),
        )
        for low in range(0, box.shape[0], step)
    ]


def whole(tensor: Tensor) -> Box:
    return Box(tensor.name, (0,) * len(tensor.shape), tensor.shape)


# --- kinds ------------------------------------------------------------------------------------------------------------


def _hugging_face_source(path: Path, model: Path | None) -> Source:
    if model is not None and model.absolute() != path:
        given = f"{model}, and {path} is a Hugging Face model itself"
        raise ModelError(Problem("model", given, "nothing: its own config.json is used", "leave it out"))
    arch = read_architecture(path)
    files = checkpoint.manifests(path)
    headers = {file.holder: checkpoint.read_header(path / file.holder) for file in files}
    where = {name: file.holder for file in files for name in file.storages}
    left_out = [name for header in headers.values() for name in header if name not in where]

    def region(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        file = where[name]
        return read_region(path / file, headers[file][name], start, shape)

    return _source(
        "hugging face", path, path, arch, files, left_out, (path / file.holder for file in files), region, lambda: None
    )


def _torch_source(path: Path, root: Path, model: Path | None, otherwise: Path | None) -> Source:
    stored = TorchCheckpoint(path)
    if any(key.startswith(MAIN_WEIGHTS) for key in stored.tensors):
        if (path.parent / TRAINER).is_file():
            return _training_source(path.parent, model, otherwise)
        return _stored_training_source(path, stored, _model_of(path, model, otherwise))
    directory = _model_of(path, model, root / COMPANION_MODEL, otherwise)
    arch = read_architecture(directory)
    manifest = torch_dist.stored_manifest(arch, stored.tensors, str(path))
    known = torch_dist.other_names(arch)
    return _source(
        "torch_dist",
        path,
        directory,
        arch,
        [manifest],
        [key for key in stored.tensors if key not in known],
        stored.files,
        stored.read,
        stored.forget,
    )


def _training_source(path: Path, model: Path | None, otherwise: Path | None) -> Source:
    if wrong := damage(path, checksums=False):
        raise CheckpointError([Problem(str(path), line, "a whole checkpoint") for line in wrong])
    state = TrainerState.from_json((path / TRAINER).read_text(encoding="utf-8"), str(path / TRAINER))
    trained_from = Path(str(state.recipe["model"]["path"])) if "model" in state.recipe else None
    directory = _model_of(path, model, trained_from, otherwise)
    return _stored_training_source(path, TorchCheckpoint(path / RANK), directory)


def _stored_training_source(path: Path, stored: TorchCheckpoint, model: Path) -> Source:
    arch = read_architecture(model)
    names = {tensor.name: tensor for tensor in tensors_of(arch)}
    problems, storages, placements = [], {}, []
    for tensor in names.values():
        found = stored.tensors.get(MAIN_WEIGHTS + tensor.name)
        if found is None or found.shape != tensor.shape:
            given = "no such tensor" if found is None else str(list(found.shape))
            problems.append(Problem(f"{path}: {tensor.name}", given, f"{list(tensor.shape)} by config.json"))
            continue
        storages[found.name] = found
        box = whole(tensor)
        placements.append(Placement(found.name, box.start, tuple(range(len(box.shape))), box))
    if problems:
        raise ModelError(problems)
    left_out = [
        key for key in stored.tensors if key.startswith(MAIN_WEIGHTS) and key.removeprefix(MAIN_WEIGHTS) not in names
    ]
    manifest = Manifest(str(path), storages, tuple(placements))
    return _source(
        "training checkpoint", path, model, arch, [manifest], left_out, stored.files, stored.read, stored.forget
    )


def _source(
    kind: Kind,
    path: Path,
    model: Path,
    arch: Architecture,
    manifests: Sequence[Manifest],
    left_out: Sequence[str],
    files: Iterable[Path],
    region: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor],
    forget: Callable[[], None],
) -> Source:
    check_sources(tensors_of(arch), manifests)
    placements: dict[str, list[Placement]] = defaultdict(list)
    dtypes: dict[str, set[str]] = defaultdict(set)
    for manifest in manifests:
        for placement in manifest.placements:
            placements[placement.box.tensor].append(placement)
            dtypes[placement.box.tensor].add(manifest.storages[placement.storage].dtype)
    in_dtype = {name: torch_dist.common_dtype(found) for name, found in dtypes.items()}
    if unknown := sorted({dtype for dtype in in_dtype.values() if dtype not in ITEM_BYTES}):
        raise ModelError(Problem(str(path), f"tensors in {', '.join(unknown)}", f"one of {', '.join(ITEM_BYTES)}"))
    return Source(kind, path, model, arch, in_dtype, tuple(sorted(left_out)), tuple(files), placements, region, forget)


def _model_of(path: Path, model: Path | None, *defaults: Path | None) -> Path:
    """`model`, or else the first of the defaults that is a Hugging Face directory."""
    for directory in defaults if model is None else (model,):
        if directory is not None and (directory / "config.json").is_file():
            return directory.absolute()
    given = "no model" if model is None else f"{model}, which has no config.json"
    needed = "the Hugging Face directory whose config.json and tokenizer belong to it"
    raise ModelError(Problem(f"{path} has no config of its own", given, needed, "--model DIR"))


def _latest_iteration(path: Path) -> Path:
    text = (path / TRACKER).read_text(encoding="utf-8").strip()
    if text != "release" and not re.fullmatch(r"\d+", text):
        raise CheckpointError(Problem(str(path / TRACKER), text, "a number of an iteration, or release"))
    found = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not (found / METADATA).is_file():
        needed = f"a torch_dist checkpoint ({METADATA})"
        raise CheckpointError(Problem(str(found), f"no {METADATA}", needed, "save with --ckpt-format torch_dist"))
    return found


def fingerprint(source: Source) -> str:
    """Changes when any file of the source changes, as far as sizes and times tell."""
    described = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    return json.dumps([source.kind, str(source.directory), described])
