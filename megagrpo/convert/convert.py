"""One checkpoint into another, from any kind to Hugging Face files or to Megatron-LM's torch_dist."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megagrpo.convert.hugging_face import HuggingFaceTarget
from megagrpo.convert.job import Target, run
from megagrpo.convert.megatron import MegatronTarget
from megagrpo.convert.opening import CONFIG, open_source
from megagrpo.convert.source import Source, fingerprint
from megagrpo.weights.files.export import FILE_BYTES

FORMAT = 1
"""Of a conversion under way: one that another version has begun is not continued."""


@dataclass(frozen=True)
class Converted:
    """What was made. `left_out` are stored tensors of the source that are not of the model."""

    directory: Path
    tensors: int
    bytes: int
    left_out: tuple[str, ...]
    continued: int
    """Units (layers, mostly) that an earlier attempt had already done."""


def to_hugging_face(
    path: Path,
    output: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Converted:
    """A model directory for transformers and SGLang from the checkpoint at `path`.

    `model`: a Hugging Face directory with the config, if the checkpoint has none. `dtype`: a Storage's; None keeps
    that of each tensor. Raises: ModelError or CheckpointError; `output` is as it was then.
    """
    options = ["hugging face", dtype, file_bytes]
    return convert_source(
        open_source(path, model),
        output,
        overwrite,
        options,
        lambda source: HuggingFaceTarget(source, dtype, file_bytes),
    )


def to_megatron(
    path: Path, output: Path, *, model: Path | None = None, dtype: str | None = None, overwrite: bool = False
) -> Converted:
    """A torch_dist checkpoint for Megatron-LM from the checkpoint at `path`. Otherwise like to_hugging_face."""
    return convert_source(
        open_source(path, model), output, overwrite, ["megatron", dtype], lambda source: MegatronTarget(source, dtype)
    )


@torch.no_grad()
def convert_source(
    source: Source,
    output: Path,
    overwrite: bool,
    options: list[str | int | None],
    target_of: Callable[[Source], Target],
) -> Converted:
    """Makes `output` from all of `source`. `options` are what else decides how its bytes come out.

    Raises: ModelError or CheckpointError; `output` is as it was then.
    """
    target = target_of(source)
    output = output.absolute()
    config = (source.model_directory / CONFIG).read_text(encoding="utf-8")
    identity = json.dumps([FORMAT, options, fingerprint(source), config])
    continued = run(target, output, identity, overwrite, f"{source.directory.name} to {output.name}")
    total = sum(unit.bytes for unit in target.units)
    return Converted(output, len(source.tensors), total, source.left_out, continued)
