"""What kind of checkpoint is this? Opens any of them as a Source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megagrpo.checkpoint.integrity import damage
from megagrpo.checkpoint.store import RANK, TRAINER, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.convert.safetensors_file import read_region
from megagrpo.convert.source import RegionReader, Source, make_source, whole
from megagrpo.convert.torch_checkpoint import METADATA, TorchCheckpoint
from megagrpo.errors import CheckpointError, ModelError, Problem
from megagrpo.weights.boxes import Manifest, Placement
from megagrpo.weights.families import read_architecture, tensors_of
from megagrpo.weights.files import fp8_blocks
from megagrpo.weights.sides import checkpoint, torch_dist
from megagrpo.weights.sides.checkpoint import Entry

CONFIG = "config.json"
TRACKER = "latest_checkpointed_iteration.txt"
COMPANION_MODEL = "hugging_face"
"""Beside a torch_dist checkpoint that was converted: the config and tokenizer of the model."""
MAIN_WEIGHTS = "param."
"""How a training checkpoint calls the weights (megatron/state.py); the moments of Adam are not converted."""


def open_source(path: Path, model: Path | None = None, *, otherwise: Path | None = None) -> Source:
    """The checkpoint at `path`, of whatever kind.

    `model` is the Hugging Face directory with its config, for kinds that have none: by default the one that it was
    converted or trained from, and failing that `otherwise`.

    Raises: ModelError or CheckpointError if it is not a checkpoint, is not whole, or is of another model.
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
    given = "no such directory" if not path.is_dir() else "a directory with none of them"
    needed = (
        f"a Hugging Face model ({CONFIG}), a Megatron-LM torch_dist checkpoint ({TRACKER} or {METADATA}), "
        "or a training checkpoint of megagrpo (step_*)"
    )
    raise CheckpointError(Problem(str(path), given, needed))


def training_checkpoint(path: Path) -> Path | None:
    """`path` if it is a training checkpoint of ours, or the newest whole one in it; None if it is something else."""
    if (path / TRAINER).is_file() and (path / RANK).is_dir():
        return path
    if not any(path.glob("step_*")):
        return None
    latest = CheckpointStore(path, keep_last=1).latest_complete()
    return latest.path if latest is not None else None


def trainer_state(path: Path) -> TrainerState:
    """What the driver saved in a training checkpoint. Raises CheckpointError if the checkpoint is not whole."""
    if wrong := damage(path, checksums=False):
        raise CheckpointError([Problem(str(path), line, "a whole checkpoint") for line in wrong])
    return TrainerState.from_json((path / TRAINER).read_text(encoding="utf-8"), str(path / TRAINER))


@dataclass(frozen=True)
class _SafetensorsFiles:
    """The weights of a Hugging Face model, and for those in fp8 where their scales are."""

    directory: Path
    manifests: tuple[Manifest, ...]
    entries: Mapping[str, tuple[Path, Entry]]
    scales: Mapping[str, tuple[Path, Entry]]

    @property
    def paths(self) -> list[Path]:
        return [self.directory / file.holder for file in self.manifests]

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        values = read_region(*self.entries[name], start, shape)
        if values.dtype != torch.float8_e4m3fn:
            return values
        scales = read_region(*self.scales[name], *fp8_blocks.scale_region(start, shape))
        return fp8_blocks.dequantized(values, start, scales)


def _safetensors_files(path: Path) -> _SafetensorsFiles:
    files = checkpoint.manifests(path)
    entries = {
        name: (path / file.holder, entry)
        for file in files
        for name, entry in checkpoint.read_header(path / file.holder).items()
    }
    return _SafetensorsFiles(path, files, entries, checkpoint.fp8_scales(path))


def _hugging_face_source(path: Path, model: Path | None) -> Source:
    if model is not None and model.absolute() != path:
        given = f"{model}, and {path} is a Hugging Face model itself"
        raise ModelError(Problem("model", given, f"nothing: its own {CONFIG} is used", "leave it out"))
    files = _safetensors_files(path)
    held = [(file, files.read) for file in files.manifests]
    arch = read_architecture(path)
    left_out = checkpoint.extra_tensors(path)
    return make_source("hugging face", path, path, arch, held, left_out, files.paths, lambda: None)


def _torch_source(path: Path, root: Path, model: Path | None, otherwise: Path | None) -> Source:
    stored = TorchCheckpoint(path)
    if any(key.startswith(MAIN_WEIGHTS) for key in stored.tensors):
        if (path.parent / TRAINER).is_file():
            return _training_source(path.parent, model, otherwise)
        return _main_weights_source(path, stored, _model_of(path, model, otherwise))
    directory = _model_of(path, model, root / COMPANION_MODEL, otherwise)
    arch = read_architecture(directory)
    manifest = torch_dist.stored_manifest(arch, stored.tensors, str(path))
    known = torch_dist.other_names(arch)
    left_out = [key for key in stored.tensors if key not in known]
    held = [(manifest, stored.read)]
    return make_source("torch_dist", path, directory, arch, held, left_out, stored.files, stored.forget)


def _training_source(path: Path, model: Path | None, otherwise: Path | None) -> Source:
    recipe = trainer_state(path).recipe
    if recipe.get("train", {}).get("lora") is not None:
        fix = f"megagrpo convert merge-lora --adapter {path} --source MODEL --output DIR"
        raise ModelError(Problem(str(path), "adapters (train.lora)", "weights of a whole model", fix))
    trained_from = Path(str(recipe["model"]["path"])) if "model" in recipe else None
    directory = _model_of(path, model, trained_from, otherwise)
    return _main_weights_source(path, TorchCheckpoint(path / RANK), directory)


def _main_weights_source(path: Path, stored: TorchCheckpoint, model: Path) -> Source:
    arch = read_architecture(model)
    tensors = tensors_of(arch)
    problems, storages, placements = [], {}, []
    for tensor in tensors:
        found = stored.tensors.get(MAIN_WEIGHTS + tensor.name)
        if found is not None and found.shape == tensor.shape:
            storages[found.name] = found
            box = whole(tensor)
            placements.append(Placement(found.name, box.start, tuple(range(len(box.shape))), box))
        elif found is not None or tensor.trained:
            given = "no such tensor" if found is None else str(list(found.shape))
            problems.append(Problem(f"{path}: {tensor.name}", given, f"{list(tensor.shape)} by {CONFIG}"))
    if problems:
        raise ModelError(problems)
    held: list[tuple[Manifest, RegionReader]]
    held = [(Manifest(str(path), storages, tuple(placements)), stored.read)]
    paths = stored.files
    if untrained := {tensor.name for tensor in tensors if MAIN_WEIGHTS + tensor.name not in storages}:
        # Not saved: they are as in the model that the training began with.
        began = _safetensors_files(model)
        held += [(_only(untrained, file), began.read) for file in began.manifests]
        paths += began.paths
    names = {MAIN_WEIGHTS + tensor.name for tensor in tensors}
    left_out = [key for key in stored.tensors if key.startswith(MAIN_WEIGHTS) and key not in names]
    return make_source("training checkpoint", path, model, arch, held, left_out, paths, stored.forget)


def _only(tensors: set[str], file: Manifest) -> Manifest:
    return replace(file, placements=tuple(held for held in file.placements if held.box.tensor in tensors))


def _model_of(path: Path, model: Path | None, *defaults: Path | None) -> Path:
    """`model`, or else the first of the defaults that is a Hugging Face directory."""
    for directory in defaults if model is None else (model,):
        if directory is not None and (directory / CONFIG).is_file():
            return directory.absolute()
    given = "no model" if model is None else f"{model}, which has no {CONFIG}"
    needed = f"the Hugging Face directory whose {CONFIG} and tokenizer belong to it"
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
