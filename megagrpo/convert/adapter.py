"""Low-rank adapters on a disk: a PEFT directory, or a training checkpoint of ours that holds some."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.checkpoint.store import RANK
from megagrpo.convert.opening import MAIN_WEIGHTS, trainer_state, training_checkpoint
from megagrpo.convert.safetensors_file import read_region
from megagrpo.convert.source import RegionReader
from megagrpo.convert.torch_checkpoint import TorchCheckpoint
from megagrpo.errors import CheckpointError, ModelError, Problem
from megagrpo.weights.adapters import PREFIX, SUFFIX_A, SUFFIX_B, key_a, key_b
from megagrpo.weights.executors.checkpoint_export import ADAPTER_CONFIG as CONFIG
from megagrpo.weights.executors.checkpoint_export import ADAPTER_WEIGHTS as WEIGHTS
from megagrpo.weights.families.architecture import Tensor
from megagrpo.weights.sides.checkpoint import DTYPES, read_header

PLAIN: Mapping[str, Any] = {"peft_type": "LORA", "use_dora": False, "fan_in_fan_out": False}
"""What a PEFT config must say, or leave out."""


@dataclass(frozen=True)
class Adapter:
    """A's [r, in] and B's [out, r] by PEFT's names, and by matrix of the model the factor of B A."""

    path: Path
    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    scales: Mapping[str, float]
    read: RegionReader

    def check(self, tensors: tuple[Tensor, ...]) -> None:
        """Raises ModelError if a tensor of it belongs to no matrix of the model, or is not as large as that needs."""
        shapes = {tensor.name: tensor.shape for tensor in tensors if len(tensor.shape) == 2}
        needed: dict[str, tuple[int, ...]] = {}
        for matrix, (out, inputs) in shapes.items():
            if key_a(matrix) in self.shapes:
                rank = self.shapes[key_a(matrix)][0]
                needed |= {key_a(matrix): (rank, inputs), key_b(matrix): (out, rank)}
        problems = []
        for key in sorted(self.shapes.keys() | needed.keys()):
            given = str(list(self.shapes[key])) if key in self.shapes else "no such tensor"
            if key not in needed:
                problems.append(Problem(f"{self.path}: {key}", given, "A and B of a matrix of the model, nothing else"))
            elif needed[key] != self.shapes.get(key):
                problems.append(Problem(f"{self.path}: {key}", given, str(list(needed[key]))))
        if problems:
            raise ModelError(problems)


def open_adapter(path: Path) -> Adapter:
    """The adapters at `path`: a PEFT directory, or a run's checkpoints (the newest whole one), or one of these.

    Raises: CheckpointError or ModelError.
    """
    path = path.absolute()
    if (path / CONFIG).is_file():
        return _of_peft(path)
    found = training_checkpoint(path)
    if found is not None:
        return _of_training(found)
    given = "no such directory" if not path.is_dir() else "a directory with neither"
    needed = f"a PEFT adapter ({CONFIG}), or a training checkpoint of megagrpo (step_*)"
    raise CheckpointError(Problem(str(path), given, needed))


def _of_peft(path: Path) -> Adapter:
    file = path / WEIGHTS
    if not file.is_file():
        raise CheckpointError(Problem(str(file), "no such file", "adapters as safetensors"))
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(Problem(str(path / CONFIG), str(error), "a JSON file in UTF-8")) from error
    entries = read_header(file)
    problems = [
        Problem(f"{path / CONFIG}: {name}", str(config[name]), str(plain))
        for name, plain in PLAIN.items()
        if config.get(name, plain) != plain
    ]
    problems += [
        Problem(f"{file}: {name}", f"dtype {entry.dtype}", f"one of {', '.join(DTYPES)}")
        for name, entry in entries.items()
        if entry.dtype not in DTYPES
    ]
    alphas = {"": config.get("lora_alpha")} | (config.get("alpha_pattern") or {})
    problems += [
        Problem(f"{path / CONFIG}: lora_alpha", str(alpha), "a number")
        for alpha in alphas.values()
        if not isinstance(alpha, int | float)
    ]
    if problems:
        raise ModelError(problems)
    shapes = {name: entry.shape for name, entry in entries.items()}
    scales = {}
    for module in _modules(shapes):
        rank, alpha = shapes[PREFIX + module + SUFFIX_A][0], alphas[""]
        for pattern, own in list(alphas.items())[1:]:  # PEFT takes the first that fits
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = own
                break
        scales[module + ".weight"] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        return read_region(file, entries[name], start, shape)

    return Adapter(path, (file, path / CONFIG), shapes, scales, read)


def _of_training(path: Path) -> Adapter:
    recipe = trainer_state(path).recipe
    lora = recipe.get("train", {}).get("lora")
    if lora is None:
        fix = "megagrpo convert megatron-to-hf writes its weights"
        raise CheckpointError(Problem(str(path), "a checkpoint of a run without train.lora", "one with adapters", fix))
    stored = TorchCheckpoint(path / RANK)
    prefix = MAIN_WEIGHTS + PREFIX
    shapes = {
        name.removeprefix(MAIN_WEIGHTS): storage.shape
        for name, storage in stored.tensors.items()
        if name.startswith(prefix)
    }
    scales = {module + ".weight": lora["alpha"] / lora["rank"] for module in _modules(shapes)}

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        values = stored.read(MAIN_WEIGHTS + name, start, shape)
        stored.forget()
        return values

    return Adapter(path, tuple(stored.files), shapes, scales, read)


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of the linear layers that have both A and B."""
    modules = [key.removeprefix(PREFIX).removesuffix(SUFFIX_A) for key in shapes if key.endswith(SUFFIX_A)]
    return [module for module in modules if {PREFIX + module + SUFFIX_A, PREFIX + module + SUFFIX_B} <= shapes.keys()]
