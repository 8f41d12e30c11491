"""Writes a Hugging Face model directory, a layer at a time: each tensor at its place in files of their full size."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from megagrpo.convert.job import PIECE_BYTES, Advance, Converted, Target, by_layer, convert
from megagrpo.convert.source import Source, open_source
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.files.export import lay_out, write_box
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.views import torch_dtype


def to_hugging_face(
    path: Path,
    output: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Converted:
    """Writes a model directory for transformers and SGLang from the checkpoint at `path`.

    `model`: a Hugging Face directory with the config, if the checkpoint has none. `dtype`: a Storage's; None keeps
    that of each tensor. Raises ModelError or CheckpointError; `output` is as it was then.
    """
    source = open_source(path, model)
    return convert(source, output, HuggingFaceTarget, dtype, "hugging face", overwrite=overwrite)


class HuggingFaceTarget(Target):
    """safetensors files with their index, the model's config with the dtype, its tokenizer and generation config."""

    def __init__(self, source: Source, dtype: str | None) -> None:
        super().__init__(source, dtype)
        self._files = checkpoint.new_files(source.architecture, self._dtypes)
        self._entries = {
            name: (file.holder, entry) for file in self._files for name, entry in checkpoint.header_of(file)[1].items()
        }
        self._units = by_layer(source.tensors, lambda tensor: tensor.name)
        self.unit_bytes = [sum(self._entries[tensor.name][1].bytes for tensor in unit) for unit in self._units]

    def begin(self, directory: Path) -> None:
        lay_out(directory, self._files, self._source.model_directory, self._source.main_dtype(self._dtypes))

    def write(self, index: int, directory: Path, advance: Advance) -> Any:
        expert = None
        opened: dict[str, IO[bytes]] = {}
        with ExitStack() as closing:
            closing.callback(self._source.forget)
            for tensor in self._units[index]:
                if tensor.expert != expert:
                    self._source.forget()
                    expert = tensor.expert
                file, entry = self._entries[tensor.name]
                if file not in opened:
                    opened[file] = closing.enter_context((directory / file).open("r+b", buffering=0))
                dtype = self._dtypes[tensor.name]
                for box in tensor.box.pieces(PIECE_BYTES // ITEM_BYTES[dtype]):
                    values = self._source.read_as(box, torch_dtype(dtype))
                    write_box(opened[file].fileno(), entry, box.start, values)
                    advance(values.nbytes)
            for stream in opened.values():
                os.fsync(stream.fileno())
