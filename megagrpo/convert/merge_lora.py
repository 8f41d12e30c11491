"""A model with low-rank adapters added to its weights, as a Hugging Face directory: W + alpha / r B A."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch

from megagrpo.convert.adapter import Adapter, open_adapter
from megagrpo.convert.convert import Converted, convert_source
from megagrpo.convert.hugging_face import HuggingFaceTarget
from megagrpo.convert.opening import open_source
from megagrpo.convert.source import Source
from megagrpo.weights.boxes import Box
from megagrpo.weights.files import adapters
from megagrpo.weights.files.adapters import key_a, key_b
from megagrpo.weights.files.export import FILE_BYTES
from megagrpo.weights.views import torch_dtype


@dataclass(frozen=True)
class MergedSource(Source):
    """A checkpoint whose values are read with an adapter added. Memory stays near the part that is read."""

    adapter: Adapter

    def read(self, box: Box) -> torch.Tensor:
        weight = super().read(box)
        scale = self.adapter.scales.get(box.tensor)
        if scale is None:
            return weight
        (row, column), (rows, columns) = box.start, box.shape
        rank = self.adapter.shapes[key_a(box.tensor)][0]
        a = self.adapter.read(key_a(box.tensor), (0, column), (rank, columns))
        b = self.adapter.read(key_b(box.tensor), (row, 0), (rows, rank))
        return adapters.merged(weight, a, b, scale)


def merge_lora(
    path: Path,
    adapter_path: Path,
    output: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Converted:
    """A Hugging Face model from the checkpoint at `path` and a PEFT adapter or training checkpoint of adapters.

    Sums are computed in float32 and rounded once, to `dtype` (None: that of each tensor). `model` as in
    convert.to_hugging_face. Raises: ModelError or CheckpointError; `output` is as it was then.
    """
    adapter = open_adapter(adapter_path)
    source = merged_source(open_source(path, model), adapter, dtype)
    options = ["merged", dtype, file_bytes, str(adapter.path), json.dumps(dict(adapter.scales), sort_keys=True)]
    return convert_source(
        source, output, overwrite, options, partial(HuggingFaceTarget, dtype=dtype, file_bytes=file_bytes)
    )


def merged_source(source: Source, adapter: Adapter, dtype: str | None) -> MergedSource:
    """Raises ModelError if the adapter is of another model."""
    adapter.check(source.tensors)
    values = {field.name: getattr(source, field.name) for field in fields(Source)}
    return MergedSource(
        **values | {"dtypes": _exact(source, adapter, dtype), "files": source.files + adapter.files}, adapter=adapter
    )


def _exact(source: Source, adapter: Adapter, dtype: str | None) -> Mapping[str, str]:
    """The dtypes to merge into: no narrower than what is stored or wanted, so that only the result is rounded."""
    if dtype is None:
        return source.dtypes
    wide = {name: torch.promote_types(torch_dtype(source.dtypes[name]), torch_dtype(dtype)) for name in adapter.scales}
    return dict(source.dtypes) | {name: str(of_matrix).removeprefix("torch.") for name, of_matrix in wide.items()}
