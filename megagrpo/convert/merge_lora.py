"""A model with low-rank adapters added to its weights, as a Hugging Face directory: W + alpha / r B A.

The adapters come from a PEFT directory, or from a training checkpoint of a run with train.lora.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from pydantic import ValidationError

from megagrpo.checkpoint.store import RANK
from megagrpo.checkpoint.torch_dist import TorchCheckpoint
from megagrpo.convert.job import Converted
from megagrpo.convert.source import (
    MAIN_WEIGHTS,
    REFERENCE_WEIGHTS,
    RegionReader,
    Source,
    open_source,
    trainer_state,
    training_checkpoint,
    with_reference,
)
from megagrpo.convert.targets import write_hugging_face
from megagrpo.errors import ModelError, Problem, UnusableCheckpointError, brief, first_line
from megagrpo.recipe.schema import LoraConfig
from megagrpo.weights.boxes import Box, Placement
from megagrpo.weights.families import FAMILIES, renamed
from megagrpo.weights.families.reading import read_json
from megagrpo.weights.files.adapters import PREFIX, SUFFIX_A, SUFFIX_B, key_a, key_b, merged
from megagrpo.weights.files.export import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megagrpo.weights.files.loading import read_region
from megagrpo.weights.sides.checkpoint import DTYPES, read_header, stored
from megagrpo.weights.views import torch_dtype

PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""PEFT's init_lora_weights that leave W as it is. Others (pissa, olora, corda, loftq, lora_ga) change it first."""
NEVER_SET = (
    "use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens",
    "layer_replication", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Fields of PEFT's LoraConfig with which the model is not W + s B A, or something besides its matrices is trained."""


@dataclass(frozen=True)
class Adapter:
    """A's [r, in] and B's [out, r] by PEFT's names, and the factor of B A by matrix of the model."""

    path: Path
    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    scales: Mapping[str, float]
    read: RegionReader

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ModelError for a tensor that belongs to none of these matrices, or has another size than it needs."""
        needed: dict[str, tuple[int, ...]] = {}
        for matrix, (out, inputs) in shapes.items():
            if key_a(matrix) in self.shapes:
                rank = self.shapes[key_a(matrix)][0]
                needed |= {key_a(matrix): (rank, inputs), key_b(matrix): (out, rank)}
        example = key_a(next(name for name in shapes if ".layers." in name))
        problems, fix = [], f"an adapter of this model, with names such as {example}"
        for key in sorted(self.shapes.keys() | needed.keys()):
            given = str(list(self.shapes[key])) if key in self.shapes else "no such tensor"
            if key not in needed:
                all_of = "A and B of a matrix of the model, nothing else"
                problems.append(Problem(f"{self.path}: {key}", given, all_of, fix))
            elif needed[key] != self.shapes.get(key):
                problems.append(Problem(f"{self.path}: {key}", given, str(list(needed[key])), fix))
        if problems:
            raise ModelError(problems)


def merge_lora(
    path: Path,
    adapter_path: Path,
    output: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    reference: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Writes a Hugging Face model from the checkpoint at `path` and a PEFT adapter or training checkpoint of adapters.

    Sums are computed in float32 and rounded once, to `dtype` (None: that of each tensor). `model` and `reference` as
    in to_hugging_face. Raises ModelError or CheckpointError; `output` is as it was then.
    """
    adapter = open_adapter(adapter_path, reference)
    source = _merged_source(open_source(path, model), adapter, dtype)
    options = str(adapter.path), json.dumps(dict(adapter.scales), sort_keys=True), *["reference"] * reference
    return write_hugging_face(source, output, dtype, "merged", *options, overwrite=overwrite)


def _merged_source(source: Source, adapter: Adapter, dtype: str | None) -> Source:
    """Returns the source with the adapter added to each matrix as it is read. Raises ModelError for a wrong adapter.

    Only the result is rounded: a matrix is read in a dtype no narrower than what is stored or wanted.
    """
    files, pairs = stored(source.architecture, source.dtypes), FAMILIES[source.architecture.family].in_transformers
    matrices = {name: its.shape for name, its in files.storages.items() if len(its.shape) == 2}
    adapter.check({renamed(name, pairs): shape for name, shape in matrices.items()} | matrices)
    adapted = [
        (placement, name)
        for placement in files.placements
        for name in {placement.storage, renamed(placement.storage, pairs)} & adapter.scales.keys()
    ]
    dtypes = dict(source.dtypes)
    for tensor in {placement.box.tensor for placement, _ in adapted} if dtype is not None else ():
        wide = torch.promote_types(torch_dtype(dtypes[tensor]), torch_dtype(str(dtype)))
        dtypes[tensor] = str(wide).removeprefix("torch.")
    plain = replace(source, dtypes=dtypes, files=source.files + adapter.files)

    def reader(placement: Placement, matrix: str) -> RegionReader:
        def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            (row, column), (rows, columns), rank = start, shape, adapter.shapes[key_a(matrix)][0]
            a = adapter.read(key_a(matrix), (0, column), (rank, columns))
            b = adapter.read(key_b(matrix), (row, 0), (rows, rank))
            first = tuple(low + s - at for low, s, at in zip(placement.box.start, start, placement.at, strict=True))
            return merged(plain.read(Box(placement.box.tensor, first, shape)), a, b, adapter.scales[matrix])

        return read

    held: dict[str, list[tuple[Placement, RegionReader]]] = defaultdict(list)
    for placement, matrix in adapted:
        held[placement.box.tensor].append((placement, reader(placement, matrix)))
    return replace(plain, held={**source.held, **held})


def open_adapter(path: Path, reference: bool = False) -> Adapter:
    """Opens the adapters at `path`: a PEFT directory, a training checkpoint, or a run's newest whole checkpoint."""
    path = path.absolute()
    if reference:
        return _of_training(with_reference(path), REFERENCE_WEIGHTS)
    if (path / ADAPTER_CONFIG).is_file():
        return _of_peft(path)
    if (checkpoint := training_checkpoint(path)) is not None:
        return _of_training(checkpoint, MAIN_WEIGHTS)
    given = "no such directory" if not path.is_dir() else "a directory with neither"
    needed = f"a PEFT adapter ({ADAPTER_CONFIG}), or a training checkpoint of megagrpo (step_*)"
    raise UnusableCheckpointError(Problem(str(path), given, needed))


def _of_peft(path: Path) -> Adapter:
    file = path / ADAPTER_WEIGHTS
    if not file.is_file():
        raise UnusableCheckpointError(Problem(str(file), "no such file", "adapters as safetensors"))
    config = read_json(path / ADAPTER_CONFIG, fix="write the adapter again, with PEFT's save_pretrained")
    entries = read_header(file)
    shapes = {name: entry.shape for name, entry in entries.items()}
    problems = _config_problems(path / ADAPTER_CONFIG, config)
    problems += [
        Problem(f"{file}: {name}", f"dtype {entry.dtype}", f"one of {', '.join(DTYPES)}")
        for name, entry in entries.items()
        if entry.dtype not in DTYPES
    ]
    problems += [
        Problem(f"{file}: {name}", str(list(shape)), "[r, in], with r at least 1")
        for name, shape in shapes.items()
        if name.endswith(SUFFIX_A) and (len(shape) != 2 or shape[0] < 1)
    ]
    if problems:
        raise ModelError(problems)
    scales = {}
    for module in _modules(shapes):
        rank, alpha = shapes[PREFIX + module + SUFFIX_A][0], _of_module(config, "alpha_pattern", "lora_alpha", module)
        if (given := _of_module(config, "rank_pattern", "r", module)) not in (None, rank):
            needed = f"{rank}, the rank of {module} in {file.name}"
            raise ModelError(Problem(f"{path / ADAPTER_CONFIG}: r", _shown(given), needed, "write the two together"))
        scales[module + ".weight"] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        return read_region(file, entries[name], start, shape)

    return Adapter(path, (file, path / ADAPTER_CONFIG), shapes, scales, read)


def _of_module(config: Mapping[str, Any], patterns: str, name: str, module: str) -> Any:
    """Returns a config's value for a module: the first of its patterns that fits, as in PEFT, or the common value."""
    fitting = (
        value for pattern, value in (config.get(patterns) or {}).items() if re.match(_of_modules(pattern), module)
    )
    return next(fitting, config.get(name))


def _config_problems(file: Path, config: Mapping[str, Any]) -> list[Problem]:
    """Returns problems of adapters with which the model is not W + s B A, or that PEFT could not read either."""
    merge = "merge it with PEFT (merge_and_unload), if that can"
    wrong = [
        (name, _shown(config[name]), plain, merge)
        for name, plain in (("peft_type", "LORA"), ("bias", "none"))
        if config.get(name) not in (None, plain)
    ]
    never = "plain LoRA: false, null or left out"
    wrong += [(name, _shown(config[name]), never, merge) for name in NEVER_SET if config.get(name)]
    if (initialization := config.get("init_lora_weights")) not in PLAIN_INITIALIZATIONS:
        needed = "an initialization that leaves the model's weights as they are: true, false, gaussian, eva, orthogonal"
        fix = "have PEFT save it as plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        wrong.append(("init_lora_weights", _shown(initialization), needed, fix))
    alphas = {"lora_alpha": config.get("lora_alpha")}
    for name in ("alpha_pattern", "rank_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            needed = "a JSON object: a number by regular expression of modules"
            wrong.append((name, _shown(patterns), needed, "{} if all modules are alike"))
            continue
        for pattern, value in patterns.items():
            try:
                re.compile(_of_modules(pattern))
            except re.error as error:
                fix = "correct it, as PEFT has to read it too"
                wrong.append((name, f"{_shown(pattern)}: {error}", "a regular expression", fix))
            if name == "alpha_pattern":
                alphas[f"{name}, {pattern}"] = value
    wrong += [
        (name, _shown(alpha), "a number", "what the adapter was trained with")
        for name, alpha in alphas.items()
        if not isinstance(alpha, int | float) or not math.isfinite(alpha)
    ]
    return [Problem(f"{file}: {name}", *rest) for name, *rest in wrong]


def _shown(value: Any) -> str:
    return shorten(json.dumps(value), 80, placeholder=" ...")


def _of_modules(pattern: str) -> str:
    """Returns PEFT's expression for modules whose name ends with the pattern, from the start of one of its parts."""
    return rf"(.*\.)?({pattern})$"


def _of_training(path: Path, prefix: str) -> Adapter:
    train = trainer_state(path).recipe.get("train")
    lora = train.get("lora") if isinstance(train, dict) else None
    if lora is None:
        given, fix = "a checkpoint of a run without train.lora", "megagrpo convert megatron-to-hf writes its weights"
        raise UnusableCheckpointError(Problem(str(path), given, "one with adapters", fix))
    try:
        settings = LoraConfig.model_validate(lora)
    except ValidationError as error:
        raise UnusableCheckpointError(Problem(f"{path}: train.lora", brief(lora), first_line(error))) from None
    stored = TorchCheckpoint(path / RANK)
    shapes = {
        name.removeprefix(prefix): storage.shape
        for name, storage in stored.tensors.items()
        if name.startswith(prefix + PREFIX)
    }
    scales = {module + ".weight": settings.alpha / settings.rank for module in _modules(shapes)}

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        values = stored.read(prefix + name, start, shape)
        stored.forget()
        return values

    return Adapter(path, tuple(stored.files), shapes, scales, read)


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns the names of the linear layers that have both A and B."""
    modules = [key.removeprefix(PREFIX).removesuffix(SUFFIX_A) for key in shapes if key.endswith(SUFFIX_A)]
    return [module for module in modules if {PREFIX + module + SUFFIX_A, PREFIX + module + SUFFIX_B} <= shapes.keys()]
