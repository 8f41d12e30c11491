"""The two kinds of directory that a conversion writes, a layer at a time: for Hugging Face, and for Megatron-LM.

A Hugging Face model directory has each tensor at its place in files of their full size. A torch_dist checkpoint, which
Megatron-LM loads in any layout (--load DIR --finetune), is:

latest_checkpointed_iteration.txt
iter_0000000/       tensors (.metadata, *.distcp), arguments (common.pt), the name of the format (metadata.json)
hugging_face/       config and tokenizer, with which megagrpo reads it again
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from megagrpo.checkpoint.torch_dist import Chunk, Stored, TorchFile, chunks_to_write, extra_states, write_metadata
from megagrpo.convert.job import PIECE_BYTES, Advance, Converted, Target, by_layer, convert
from megagrpo.convert.source import COMPANION_MODEL, TRACKER, Source, open_reference, open_source
from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import ITEM_BYTES, Box, Placement
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files.export import Copies, joined, lay_out, write_box
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.sides.megatron_rank import config_fields
from megagrpo.weights.views import box_view, torch_dtype

ITERATION = "iter_0000000"
CHUNK_BYTES = 256 * 1024**2
"""Larger parameters are stored in several chunks."""


def to_hugging_face(
    path: Path,
    output: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    reference: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Writes a model directory for transformers and SGLang from the checkpoint at `path`.

    `model`: a Hugging Face directory with the config, if the checkpoint has none. `dtype`: a Storage's; None keeps
    that of each tensor. `reference`: the reference policy of a training checkpoint, not its policy. Raises ModelError
    or CheckpointError; `output` is as it was then.
    """
    source, kind = (open_reference, "reference") if reference else (open_source, "hugging face")
    return write_hugging_face(source(path, model), output, dtype, kind, overwrite=overwrite)


def write_hugging_face(source: Source, output: Path, dtype: str | None, *options: str, overwrite: bool) -> Converted:
    """Writes a model directory as `convert` does. Carried tensors are in it, and so are not left out."""
    done = convert(source, output, HuggingFaceTarget, dtype, *options, overwrite=overwrite)
    return replace(done, left_out=tuple(name for name in done.left_out if name not in source.carried))


class HuggingFaceTarget(Target):
    """safetensors files with their index, the model's config with the dtype, its tokenizer and generation config."""

    def __init__(self, source: Source, dtype: str | None) -> None:
        super().__init__(source, dtype)
        self._files = checkpoint.new_files(source.architecture, self._dtypes, others=bool(source.carried))
        self._entries = {
            name: (file.holder, entry) for file in self._files for name, entry in checkpoint.header_of(file)[1].items()
        }
        self._placements: dict[str, list[Placement]] = defaultdict(list)
        for placement in (placement for file in self._files for placement in file.placements):
            self._placements[placement.box.tensor].append(placement)
        self._storages = {name: its for file in self._files for name, its in file.storages.items()}
        self._units = by_layer(source.tensors, lambda tensor: tensor.name)
        self.unit_bytes = [
            sum(math.prod(tensor.shape) * ITEM_BYTES[self._dtypes[tensor.name]] for tensor in unit)
            for unit in self._units
        ]

    def begin(self, directory: Path) -> None:
        dtype = self._source.main_dtype(self._dtypes)
        lay_out(directory, self._files, self._source.model_directory, dtype, self._source.carried)

    def write(self, index: int, directory: Path, advance: Advance) -> Any:
        opened: dict[str, IO[bytes]] = {}
        with ExitStack() as closing:
            closing.callback(self._source.forget)
            for name, at, values in joined(self._copies(index), self._storages):
                file, entry = self._entries[name]
                if file not in opened:
                    opened[file] = closing.enter_context((directory / file).open("r+b", buffering=0))
                write_box(opened[file].fileno(), entry, at, values)
                advance(values.nbytes)
            for stream in opened.values():
                os.fsync(stream.fileno())

    def _copies(self, index: int) -> Copies:
        """Yields the boxes of a unit, in pieces."""
        expert = None
        for tensor in self._units[index]:
            if tensor.expert != expert:
                self._source.forget()
                expert = tensor.expert
            dtype = self._dtypes[tensor.name]
            for placement in self._placements[tensor.name]:
                for box in placement.box.pieces(PIECE_BYTES // ITEM_BYTES[dtype]):
                    yield placement.part(box), self._source.read_as(box, torch_dtype(dtype))


def to_megatron(
    path: Path, output: Path, *, model: Path | None = None, dtype: str | None = None, overwrite: bool = False
) -> Converted:
    """Writes a torch_dist checkpoint for Megatron-LM from the checkpoint at `path`. Arguments as in to_hugging_face.
    Raises ModelError for parts that are not written for Megatron-LM: those that Transformer Engine's layers lack."""
    source = open_source(path, model)
    if (lacking := source.architecture.only_local) is not None:
        given = f"{lacking}: a part that megagrpo does not write for Megatron-LM"
        fix = "use the model in Hugging Face's format (of a training checkpoint: megagrpo convert megatron-to-hf)"
        raise ModelError(
            Problem(
                f"{path}: {source.architecture.family}", given, "parts that Transformer Engine's layers have here", fix
            )
        )
    return convert(source, output, MegatronTarget, dtype, "megatron", overwrite=overwrite)


class MegatronTarget(Target):
    """One .distcp file for each layer, and one for each parameter outside of layers."""

    def __init__(self, source: Source, dtype: str | None) -> None:
        super().__init__(source, dtype)
        self._chunks = chunks_to_write(source.architecture, self._dtypes)
        self._units = by_layer(self._chunks, lambda chunk: chunk.stored.name)
        self.unit_bytes = [
            sum(math.prod(chunk.shape) * ITEM_BYTES[chunk.stored.dtype] for chunk in unit) for unit in self._units
        ]

    def begin(self, directory: Path) -> None:
        (directory / ITERATION).mkdir()
        (directory / COMPANION_MODEL).mkdir()
        lay_out(directory / COMPANION_MODEL, (), self._source.model_directory, self._source.main_dtype(self._dtypes))

    def write(self, index: int, directory: Path, advance: Advance) -> Any:
        written = []
        with TorchFile(directory / ITERATION / f"__{index}_0.distcp") as file:
            for chunk in self._units[index]:
                for part in _parts(chunk):
                    values = self._assemble(part)
                    written.append(asdict(file.add(part.stored.name, part.start, values)))
                    advance(values.nbytes)
                self._source.forget()
        return written

    def finish(self, directory: Path, written: Sequence[Any]) -> None:
        path = directory / ITERATION
        entries = msgspec.convert(list(chain(*written)), list[Stored])
        with TorchFile(path / f"__{len(self._units)}_0.distcp") as file:
            entries += [file.add(key, None, None) for key in extra_states(self._chunks)]
        write_metadata(path, {chunk.stored.name: chunk.stored for chunk in self._chunks}, entries)
        common = {
            "args": Namespace(**_arguments(self._source.architecture)),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
        }
        with (path / "common.pt").open("wb") as stream:
            torch.save(common, stream)
        (directory / TRACKER).write_text("0", encoding="utf-8")

    def _assemble(self, part: Chunk) -> torch.Tensor:
        """Returns the values of a part: from the source, cast, and fused as Megatron fuses them."""
        dtype = torch_dtype(part.stored.dtype)
        values = torch.empty(part.shape, dtype=dtype)
        for placement in part.placements:
            at = tuple(a - s for a, s in zip(placement.at, part.start, strict=True))
            local = replace(placement, at=at)
            for box in placement.box.pieces(PIECE_BYTES // dtype.itemsize):
                box_view(values, local.part(box)).copy_(self._source.read_as(box, dtype))
        return values


def _parts(chunk: Chunk) -> Iterator[Chunk]:
    """Yields the chunk as runs of rows of at most CHUNK_BYTES."""
    whole = Box(chunk.stored.name, chunk.start, chunk.shape)
    for box in whole.pieces(CHUNK_BYTES // ITEM_BYTES[chunk.stored.dtype]):
        held = (placement.within(box) for placement in chunk.placements)
        placements = tuple(part for part in held if part is not None)
        yield replace(chunk, start=box.start, shape=box.shape, placements=placements)


# For every model, by the names of Megatron-LM's parser.
FIXED = {
    "apply_layernorm_1p": False,
    "apply_query_key_layer_scaling": False,
    "swiglu": True,
    "squared_relu": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "world_size": 1,
    "data_parallel_size": 1,
    "ckpt_format": "torch_dist",
    "no_save_optim": True,
    "no_save_rng": True,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
PARSERS_NAMES = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
"""The parser's names of fields of TransformerConfig, where they differ."""


def _arguments(arch: Architecture) -> dict[str, Any]:
    """Returns Megatron-LM's arguments that describe the model, for --use-checkpoint-args, by its parser's names.

    The number of rows of the embedding is left out: Megatron-LM pads it to its own layout and loads either size.
    """
    fields = config_fields(arch)
    arguments: dict[str, Any] = FIXED | {
        "group_query_attention": fields["num_query_groups"] != fields["num_attention_heads"],
        "max_position_embeddings": arch.max_positions,
        "untie_embeddings_and_output_weights": not arch.tied_embeddings,
        "rotary_base": int(arch.rope.theta),
        "use_rope_scaling": arch.rope.factor is not None,
        **({} if arch.rope.factor is None else {"rope_scaling_factor": arch.rope.factor}),
    }
    return arguments | {PARSERS_NAMES.get(name, name): value for name, value in fields.items()}
