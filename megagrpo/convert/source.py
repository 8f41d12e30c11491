"""The source of a conversion: a checkpoint of any kind as boxes of its model's Hugging Face tensors, read in parts."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from megagrpo.checkpoint.store import RANK, TRAINER, CheckpointStore, damage
from megagrpo.checkpoint.torch_dist import METADATA, TorchCheckpoint, common_dtype, known_keys, part_of, stored_manifest
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import ModelError, Problem, UnusableCheckpointError, brief
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement
from megagrpo.weights.coverage import check_sources
from megagrpo.weights.families import read_architecture, refuse_adapter, tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Tensor
from megagrpo.weights.files.loading import ModelFiles
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.views import box_view, torch_dtype

CONFIG = "config.json"
TRACKER = "latest_checkpointed_iteration.txt"
COMPANION_MODEL = "hugging_face"
"""Beside a torch_dist checkpoint that was converted: the config and tokenizer of the model."""
MAIN_WEIGHTS, REFERENCE_WEIGHTS = "param.", "reference."
"""Prefixes of a training checkpoint's weights (megatron/state.py): the policy's, and those of a reference that follows
it. Adam's moments are not converted."""

RegionReader = Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""(storage, start, shape) to the values of that part of the storage. Raises CheckpointError."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from. `model_directory` has its config.json and tokenizer."""

    directory: Path
    model_directory: Path
    architecture: Architecture
    dtypes: Mapping[str, str]
    left_out: tuple[str, ...]
    """Names of stored tensors that are not of the model."""
    files: tuple[Path, ...]
    held: Mapping[str, Sequence[tuple[Placement, RegionReader]]]
    forget: Callable[[], None]
    """Frees the stored chunks that were kept for the tensors read next."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tensors_of(self.architecture)

    @cached_property
    def carried(self) -> checkpoint.FileTensors:
        """Returns the tensors of the model directory that exports copy."""
        return checkpoint.carried_tensors(checkpoint.file_tensors(self.model_directory), self.architecture)

    def main_dtype(self, dtypes: Mapping[str, str]) -> str:
        """Returns the dtype of most bytes of a model whose tensors have these dtypes."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[dtypes[tensor.name]] += math.prod(tensor.shape) * ITEM_BYTES[dtypes[tensor.name]]
        return sizes.most_common(1)[0][0]

    def read(self, box: Box) -> torch.Tensor:
        """Reads the values of `box`, in its shape and the dtype dtypes[box.tensor]. Raises CheckpointError."""
        values = torch.empty(box.shape, dtype=torch_dtype(self.dtypes[box.tensor]))
        for placement, region in self.held[box.tensor]:
            common = placement.box.intersect(box)
            if common is None:
                continue
            part = placement.part(common)
            read = Placement(part.storage, (0,) * len(part.at), part.axes, common)
            stored = box_view(region(part.storage, part.at, part.local_shape), read)
            if common == box and stored.dtype == values.dtype:
                return stored.contiguous()
            part_of(values, box.start, common).copy_(stored)
        return values

    def read_as(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Reads `box` in this dtype. Raises UnusableCheckpointError if a finite value is too large for the dtype."""
        values = self.read(box)
        cast = values.to(dtype)
        if not torch.equal(cast.isfinite(), values.isfinite()):
            largest = values[values.isfinite()].abs().max().item()
            where, needed = f"{self.directory}: {box.tensor}", f"at most {torch.finfo(dtype).max:g}, {dtype}'s largest"
            raise UnusableCheckpointError(
                Problem(where, f"a value of {largest:g}", needed, "--dtype bfloat16 or float32")
            )
        return cast


def open_source(path: Path, model: Path | None = None, *, otherwise: Path | None = None) -> Source:
    """Opens the checkpoint at `path`, of any kind.

    `model` is the Hugging Face directory with the config, for kinds that have none. By default it is the model that the
    checkpoint was converted or trained from; if that is not there either, `otherwise`. Raises ModelError or
    CheckpointError.
    """
    path = path.absolute()
    if (path / METADATA).is_file():
        return _torch_source(path, path.parent, model, otherwise)
    training = training_checkpoint(path)
    if training == path:
        return _training_source(path, model, otherwise)
    if (path / TRACKER).is_file():
        return _torch_source(_latest_iteration(path), path, model, otherwise)
    if (path / CONFIG).is_file():
        return _hugging_face_source(path, model)
    if training is not None:
        return _training_source(training, model, otherwise)
    refuse_adapter(path)
    given = "no such directory" if not path.is_dir() else "a directory with none of them"
    needed = (
        f"a Hugging Face model ({CONFIG}), a Megatron-LM torch_dist checkpoint ({TRACKER} or {METADATA}), "
        "or a training checkpoint of megagrpo (step_*)"
    )
    raise UnusableCheckpointError(Problem(str(path), given, needed))


def open_reference(path: Path, model: Path | None = None) -> Source:
    """Opens the reference policy in a training checkpoint, as open_source opens the policy."""
    return _training_source(with_reference(path), model, None, REFERENCE_WEIGHTS)


def with_reference(path: Path) -> Path:
    """Returns the training checkpoint at `path`. Raises UnusableCheckpointError if it holds no reference policy."""
    training = training_checkpoint(path.absolute())
    if training and any(key.startswith(REFERENCE_WEIGHTS) for key in TorchCheckpoint(training / RANK).tensors):
        return training
    needed = "a training checkpoint (step_*) of a run with algorithm.reference.update_every_steps"
    fix = "leave out --reference; the reference of other runs is their start, the model of model.path"
    raise UnusableCheckpointError(Problem(str(path), "no reference policy", needed, fix))


def training_checkpoint(path: Path) -> Path | None:
    """Returns `path` if it is a training checkpoint of megagrpo, or the newest whole one in it; otherwise None."""
    if (path / TRAINER).is_file() and (path / RANK).is_dir():
        return path
    if not any(path.glob("step_*")):
        return None
    latest = CheckpointStore(path, keep_last=1).latest_complete()
    return latest.path if latest is not None else None


def trainer_state(path: Path) -> TrainerState:
    """Reads the driver's state in a training checkpoint. Raises CheckpointError if the checkpoint is not whole."""
    if wrong := damage(path, checksums=False):
        raise UnusableCheckpointError([Problem(str(path), line, "a whole checkpoint") for line in wrong])
    return TrainerState.read(path / TRAINER)


def _make_source(
    directory: Path,
    model: Path,
    arch: Architecture,
    held: Sequence[tuple[Manifest, RegionReader]],
    left_out: Sequence[str],
    files: Sequence[Path],
    forget: Callable[[], None] = lambda: None,
) -> Source:
    """Makes a Source. Raises ModelError for an unknown dtype, WeightPlanError if parts of tensors are missing."""
    check_sources(tensors_of(arch), [manifest for manifest, _ in held])
    placements: dict[str, list[tuple[Placement, RegionReader]]] = defaultdict(list)
    stored_as: dict[str, set[str]] = defaultdict(set)
    for manifest, region in held:
        for placement in manifest.placements:
            placements[placement.box.tensor].append((placement, region))
            stored_as[placement.box.tensor].add(manifest.storages[placement.storage].dtype)
    if unknown := sorted({dtype for in_tensor in stored_as.values() for dtype in in_tensor if dtype not in ITEM_BYTES}):
        given = f"tensors in {', '.join(unknown)}"
        raise ModelError(Problem(str(directory), given, f"one of {', '.join(ITEM_BYTES)}"))
    dtypes = {name: common_dtype(in_tensor) for name, in_tensor in stored_as.items()}
    return Source(directory, model, arch, dtypes, tuple(sorted(left_out)), tuple(files), placements, forget)


def _hugging_face_source(path: Path, model: Path | None) -> Source:
    if model is not None and model.absolute() != path:
        given = f"{model}, and {path} is a Hugging Face model itself"
        raise ModelError(Problem("model", given, f"nothing: its own {CONFIG} is used", "leave it out"))
    files = ModelFiles(path)
    held = [(file, files.read) for file in files.manifests]
    arch = read_architecture(path)
    left_out = checkpoint.extra_tensors(files.entries, arch)
    return _make_source(path, path, arch, held, left_out, files.paths)


def _torch_source(path: Path, root: Path, model: Path | None, otherwise: Path | None) -> Source:
    stored = TorchCheckpoint(path)
    if any(key.startswith(MAIN_WEIGHTS) for key in stored.tensors):
        if (path.parent / TRAINER).is_file():
            return _training_source(path.parent, model, otherwise)
        return _main_weights_source(path, stored, _model_of(path, model, otherwise), MAIN_WEIGHTS)
    directory = _model_of(path, model, root / COMPANION_MODEL, otherwise)
    arch = read_architecture(directory)
    manifest = stored_manifest(arch, stored.tensors, str(path))
    known = known_keys(arch)
    left_out = [key for key in stored.tensors if key not in known]
    held = [(manifest, stored.read)]
    return _make_source(path, directory, arch, held, left_out, stored.files, stored.forget)


def _training_source(path: Path, model: Path | None, otherwise: Path | None, prefix: str = MAIN_WEIGHTS) -> Source:
    sections = {name: part for name, part in trainer_state(path).recipe.items() if isinstance(part, dict)}
    if sections.get("train", {}).get("lora") is not None:
        fix = f"megagrpo convert merge-lora --adapter {path} --source MODEL --output DIR"
        fix += " --reference" if prefix == REFERENCE_WEIGHTS else ""
        raise ModelError(Problem(str(path), "adapters (train.lora)", "weights of a whole model", fix))
    trained_from = Path(str(sections["model"]["path"])) if "path" in sections.get("model", {}) else None
    directory = _model_of(path, model, trained_from, otherwise)
    return _main_weights_source(path, TorchCheckpoint(path / RANK), directory, prefix)


def _main_weights_source(path: Path, stored: TorchCheckpoint, model: Path, prefix: str) -> Source:
    """Returns the weights of this prefix. Those that are not trained are the policy's with any prefix."""
    arch = read_architecture(model)
    tensors = tensors_of(arch)
    problems, storages, placements = [], {}, []
    for tensor in tensors:
        storage = stored.tensors.get((prefix if tensor.trained else MAIN_WEIGHTS) + tensor.name)
        if storage is not None and storage.shape == tensor.shape:
            storages[storage.name] = storage
            placements.append(Placement.whole(tensor.box, storage.name))
        elif storage is not None or tensor.trained:
            given = "no such tensor" if storage is None else str(list(storage.shape))
            problems.append(Problem(f"{path}: {tensor.name}", given, f"{list(tensor.shape)} by {CONFIG}"))
    if problems:
        raise ModelError(problems)
    held: list[tuple[Manifest, RegionReader]]
    held = [(Manifest(str(path), storages, tuple(placements)), stored.read)]
    paths = stored.files
    if untrained := {tensor.name for tensor in tensors} - {placement.box.tensor for placement in placements}:
        # Training does not change or save them: they are those of the model that it began with.
        began = ModelFiles(model)
        for file in began.manifests:
            kept = tuple(placement for placement in file.placements if placement.box.tensor in untrained)
            held.append((replace(file, placements=kept), began.read))
        paths += began.paths
    names = {MAIN_WEIGHTS + tensor.name for tensor in tensors}
    left_out = [key for key in stored.tensors if key.startswith(MAIN_WEIGHTS) and key not in names]
    return _make_source(path, model, arch, held, left_out, paths, stored.forget)


def _model_of(path: Path, model: Path | None, *defaults: Path | None) -> Path:
    """Returns `model`, or the first of the defaults that is a Hugging Face directory. Raises ModelError if none is."""
    for directory in defaults if model is None else (model,):
        if directory is not None and (directory / CONFIG).is_file():
            return directory.absolute()
    given = "no model" if model is None else f"{model}, which has no {CONFIG}"
    needed = f"the Hugging Face directory whose {CONFIG} and tokenizer belong to it"
    raise ModelError(Problem(f"{path} has no config of its own", given, needed, "--model DIR"))


def _latest_iteration(path: Path) -> Path:
    text = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,12}", text):
        raise UnusableCheckpointError(Problem(str(path / TRACKER), brief(text), "a number of an iteration, or release"))
    iteration = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not (iteration / METADATA).is_file():
        needed = f"a torch_dist checkpoint ({METADATA})"
        raise UnusableCheckpointError(
            Problem(str(iteration), f"no {METADATA}", needed, "save with --ckpt-format torch_dist")
        )
    return iteration
