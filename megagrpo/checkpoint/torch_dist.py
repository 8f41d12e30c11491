"""Megatron's torch_dist: files of torch.distributed.checkpoint (.metadata and .distcp), read, written and named.

Training checkpoints of megagrpo have the same files. Nothing that they hold is run as code. To read a part of a tensor,
only the stored chunks that it meets are read, one after another. A file is written tensor by tensor.

Megatron-LM's checkpoints hold tensors of the whole model, whatever the layout of the ranks that wrote them: the
parameters of a single rank that holds everything, under the names of GPTModel.sharded_state_dict (megatron.core 0.19).
If all layers of the model are alike, they are one tensor with the layer as its first axis and the expert as its second;
where layers differ, each has its own keys. The two layer specs name a few norms differently: a checkpoint that we write
has both names, and either is read.
"""

from __future__ import annotations

import _codecs
import io
import json
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import EnumType
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch.distributed.checkpoint.filesystem import _create_file_view, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megagrpo.checkpoint.store import write_durably
from megagrpo.errors import CheckpointError, ModelError, Problem, UnusableCheckpointError, first_line
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Box, Fill, Manifest, Placement, Storage
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from megagrpo.weights.views import torch_dtype

METADATA = ".metadata"
MEGATRON = "metadata.json"
IN_LAYER = re.compile(r"chunk0\.decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d*)")
LOCAL_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""The renaming of the norms of Megatron's local layer in a checkpoint. Layers with latent attention keep theirs."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
WITHOUT_EXTRA_STATE = ("embedding.word_embeddings", "output_layer", "router")
MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
KNOWN = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
}  # fmt: skip
"""The classes and functions in a list of contents (.metadata)."""
NUMPY = [numpy.empty(0).__reduce__()[0], numpy.ndarray, numpy.dtype, numpy.dtypes.UInt32DType, _codecs.encode]
"""The functions and classes in the state of numpy's random generator."""
NEEDED = "a file of torch.distributed.checkpoint"
UNPICKLING = (
    pickle.UnpicklingError, EOFError, AttributeError, TypeError, ImportError, ValueError, LookupError, MemoryError,
    OverflowError, RecursionError, RuntimeError,
)  # fmt: skip
"""Errors of unpickling bytes that are no pickle, or a pickle of other things."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a tensor as one writer wrote it, or a whole object, at bytes offset .. offset + length of a file."""

    box: Box  # of an object: its key, without axes
    file: str
    offset: int
    length: int


class TorchCheckpoint:
    """The tensors of one directory. Keeps the chunks that were read until `forget`."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if the list of contents cannot be read, or a file is missing or cut short."""
        self.directory = directory
        self.tensors: dict[str, Storage] = {}
        self._chunks: dict[str, list[Stored]] = {}
        self._objects: dict[str, Stored] = {}
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        try:
            with (directory / METADATA).open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(type(metadata).__name__)
            for key, stored in metadata.state_dict_metadata.items():
                if isinstance(stored, TensorStorageMetadata):
                    dtype = str(stored.properties.dtype).removeprefix("torch.")
                    self.tensors[key] = Storage(key, tuple(stored.size), dtype)
                    self._chunks[key] = self._stored_chunks(metadata, key, stored)
                elif info := (metadata.storage_data or {}).get(MetadataIndex(key)):
                    self._objects[key] = Stored(Box(key, (), ()), info.relative_path, info.offset, info.length)
        except (OSError, *UNPICKLING) as error:  # also objects that lack a field
            given = (isinstance(error, OSError) and error.strerror) or first_line(error)
            raise UnusableCheckpointError(Problem(str(directory / METADATA), given, NEEDED)) from error
        needed: dict[str, int] = {}
        for chunk in chain(*self._chunks.values()):
            needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.offset + chunk.length)
        sizes = {name: path.stat().st_size for name in sorted(needed) if (path := directory / name).is_file()}
        problems = [
            Problem(
                str(directory / name),
                f"{sizes[name]} bytes" if name in sizes else "no such file",
                f"{needed[name]} bytes",
            )
            for name in sorted(needed)
            if sizes.get(name, -1) < needed[name]
        ]
        if problems:
            raise CheckpointError(problems)

    @property
    def files(self) -> list[Path]:
        """Returns the list of contents and every file that tensors lie in."""
        names = {chunk.file for chunk in chain(*self._chunks.values())}
        return [self.directory / METADATA, *(self.directory / name for name in sorted(names))]

    def read(self, key: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Reads elements start[i] .. start[i] + shape[i] of a tensor. Raises CheckpointError."""
        values = torch.empty(shape, dtype=getattr(torch, self.tensors[key].dtype))
        written = 0
        for chunk in self._chunks[key]:
            common = chunk.box.intersect(Box(key, start, shape))
            if common is not None:
                part_of(values, start, common).copy_(part_of(self._load(key, chunk), chunk.box.start, common))
                written += common.elements
        if written != values.numel():
            given = f"{written} of the {values.numel()} elements of {list(shape)} from {list(start)}"
            raise CheckpointError(Problem(f"{self.directory}: {key}", given, "each element in one stored chunk"))
        return values

    def read_object(self, key: str) -> Any:
        """Reads the object `key`, made of tensors, numpy arrays, numbers and containers. Raises CheckpointError."""
        if key not in self._objects:
            raise CheckpointError(Problem(f"{self.directory}: {key}", "no such object", "one of the saved ones"))
        with torch.serialization.safe_globals(NUMPY):
            return self._torch_load(key, self._objects[key])

    def forget(self) -> None:
        """Frees the chunks that were kept."""
        self._kept.clear()

    def _load(self, key: str, chunk: Stored) -> torch.Tensor:
        kept = self._kept.get((chunk.file, chunk.offset))
        if kept is None:
            kept = self._torch_load(key, chunk)
            if not isinstance(kept, torch.Tensor) or tuple(kept.shape) != chunk.box.shape:
                given = f"{list(kept.shape)}" if isinstance(kept, torch.Tensor) else type(kept).__name__
                needed = f"{list(chunk.box.shape)}"
                raise CheckpointError(Problem(f"{self.directory / chunk.file}: {key}", given, needed))
            self._kept[chunk.file, chunk.offset] = kept
        return kept

    def _torch_load(self, key: str, chunk: Stored) -> Any:
        try:
            with (self.directory / chunk.file).open("rb") as file:
                view: IO[bytes] = _create_file_view(file, chunk.offset, chunk.length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except (OSError, *UNPICKLING) as error:
            where = f"{self.directory / chunk.file}: {key}"
            given = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(Problem(where, given, "a stored tensor, without code to run")) from error

    def _stored_chunks(self, metadata: Metadata, key: str, stored: TensorStorageMetadata) -> list[Stored]:
        chunks = []
        for chunk in stored.chunks:
            info = (metadata.storage_data or {}).get(MetadataIndex(key, chunk.offsets))
            if info is None:
                where = f"{self.directory / METADATA}: {key}"
                raise CheckpointError(Problem(where, f"no file for the chunk at {list(chunk.offsets)}"))
            if getattr(info, "transform_descriptors", None):
                given = ", ".join(info.transform_descriptors)
                raise CheckpointError(Problem(f"{self.directory}: {key}", f"transformed by {given}", "plain tensors"))
            if 0 not in chunk.sizes:
                box = Box(key, tuple(chunk.offsets), tuple(chunk.sizes))
                chunks.append(Stored(box, info.relative_path, info.offset, info.length))
        return chunks


def part_of(values: torch.Tensor, start: tuple[int, ...], box: Box) -> torch.Tensor:
    """Returns a view of the elements of `box` in `values`, which begin at `start` of the same tensor."""
    lows = (low - first for low, first in zip(box.start, start, strict=True))
    return values[tuple(slice(low, low + size) for low, size in zip(lows, box.shape, strict=True))]


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that makes KNOWN objects only, so that a file from elsewhere cannot run code.

    Megatron's save plans, which it adds to the list, become _Unknown: they are not needed.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.0 to 3.11.3 writes a member of an enum
            return _member
        named = getattr(torch, name, None) if module == "torch" else None
        return named if isinstance(named, torch.dtype) else _Unknown


def _member(of: Any, name: str) -> Any:
    return of[name] if isinstance(of, EnumType) else _Unknown()


class _Unknown:
    """A stand-in for an object of any other class."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, *_: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass


class TorchFile(io.RawIOBase):
    """One .distcp file being written. Use it in a `with` block; it is on disk when the block ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._failure: OSError | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Writes for torch.save, and keeps the error that it hides."""
        try:
            return self._file.write(data)
        except OSError as error:
            self._failure = error
            raise

    def add(self, key: str, start: tuple[int, ...] | None, value: Any) -> Stored:
        """Appends a part of a tensor, contiguous and alone in its memory; without `start` an object, in a list as
        Megatron stores its ShardedObjects. Raises OSError."""
        offset, box = self._file.tell(), Box(key, (), ()) if start is None else Box(key, start, tuple(value.shape))
        try:
            torch.save([value] if start is None else value, self)
        except RuntimeError:
            if self._failure is not None:  # torch's own error does not say why
                raise self._failure from None
            raise
        return Stored(box, self._path.name, offset, self._file.tell() - offset)


def write_metadata(directory: Path, tensors: Mapping[str, Storage], written: Iterable[Stored]) -> None:
    """Writes .metadata, the list of contents of all that was written into the directory, and Megatron's metadata.json.
    Raises OSError."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(TensorProperties(dtype=torch_dtype(tensor.dtype)), torch.Size(tensor.shape), [])
        for key, tensor in tensors.items()
    }
    places: dict[MetadataIndex, _StorageInfo] = {}
    for stored in written:
        key, place = stored.box.tensor, _StorageInfo(stored.file, stored.offset, stored.length)
        tensor = described.setdefault(key, BytesStorageMetadata())
        if isinstance(tensor, BytesStorageMetadata):
            places[MetadataIndex(key)] = place
            continue
        chunk = ChunkStorageMetadata(torch.Size(stored.box.start), torch.Size(stored.box.shape))
        places[MetadataIndex(key, chunk.offsets, len(tensor.chunks))] = place
        tensor.chunks.append(chunk)
    with (directory / METADATA).open("wb") as file:
        pickle.dump(Metadata(described, None, places), file)
        file.flush()
        os.fsync(file.fileno())
    write_durably(directory / MEGATRON, json.dumps(MEGATRON_FORMAT))


# --- a model's tensors in it ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a stored tensor that is one parameter of one layer, or of one expert."""

    stored: Storage
    start: tuple[int, ...]
    shape: tuple[int, ...]
    layer: int | None
    placements: tuple[Placement, ...]


def chunks_to_write(arch: Architecture, dtypes: Mapping[str, str]) -> list[Chunk]:
    """Returns the parts of the tensors to be written, in the order of the model. `dtypes` are those of the checkpoint
    tensors.

    A fused tensor of parts in different dtypes has the smallest dtype that holds all of them exactly.
    """
    chunks = dict.fromkeys(chunk for of_spec in _ways(arch) for chunk in of_spec[0])
    parts: dict[str, set[str]] = defaultdict(set)
    for chunk in chunks:
        parts[chunk.stored.name] |= {dtypes[placement.box.tensor] for placement in chunk.placements}
    return [
        replace(chunk, stored=replace(chunk.stored, dtype=common_dtype(parts[chunk.stored.name]))) for chunk in chunks
    ]


def stored_manifest(arch: Architecture, stored: Mapping[str, Storage], holder: str) -> Manifest:
    """Returns the model's manifest in a checkpoint with these tensors. Rows of padding are fills. Raises ModelError."""
    ways = [chunks for of_spec in _ways(arch) for chunks in of_spec]
    nearest = min(ways, key=lambda chunks: sum(chunk.stored.name not in stored for chunk in chunks))
    problems: dict[Problem, None] = {}
    storages: dict[str, Storage] = {}
    placements: list[Placement] = []
    fills: list[Fill] = []
    for chunk in nearest:
        wanted = chunk.stored
        storage = stored.get(wanted.name)
        padding = 0
        if storage is not None and wanted.name in VOCABULARY and len(storage.shape) == 2:
            padding = storage.shape[0] - wanted.shape[0]
        if storage is None or padding < 0 or storage.shape != (wanted.shape[0] + padding, *wanted.shape[1:]):
            given = "no such key" if storage is None else str(list(storage.shape))
            fix = "give the config.json that belongs to it" if storage is not None else ""
            problems[Problem(f"{holder}: {wanted.name}", given, f"{list(wanted.shape)} by config.json", fix)] = None
            continue
        storages[wanted.name] = storage
        placements += chunk.placements
        if padding:
            fills.append(Fill(wanted.name, (wanted.shape[0], 0), (padding, wanted.shape[1])))
    if problems:
        raise ModelError(problems)
    return Manifest(holder, storages, tuple(placements), tuple(fills))


def known_keys(arch: Architecture) -> frozenset[str]:
    """Returns every key that a tensor of this model may have, under any of its names."""
    names = {chunk.stored.name for of_spec in _ways(arch) for chunks in of_spec for chunk in chunks}
    return frozenset(names | {re.sub(r"(?<=^decoder\.layers\.)\d+\.", "", name) for name in names})


def extra_states(chunks: Iterable[Chunk]) -> list[str]:
    """Returns the keys of the empty objects beside the tensors, one per module, which Megatron asks for.

    transformer_engine would keep fp8 scales in them.
    """
    keys: dict[str, None] = {}
    for chunk in chunks:
        module = chunk.stored.name.rpartition(".")[0]
        if module.endswith(WITHOUT_EXTRA_STATE):
            continue
        count = sum(axis is None for axis in chunk.placements[0].axes)  # axes of the layer and the expert
        index = ".".join(map(str, chunk.start[:count] or (0,)))
        sizes = ".".join(map(str, chunk.stored.shape[:count] or (1,)))
        for name in (module, module.replace("linear_proj", "core_attention")):
            keys[f"{name}._extra_state/shard_{index}_{sizes}"] = None
    return list(keys)


def common_dtype(dtypes: set[str]) -> str:
    """Returns the smallest dtype that holds the values of all of these exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return "float64" if "float64" in dtypes else "float32"


@lru_cache(maxsize=1)
def _ways(arch: Architecture) -> list[list[tuple[Chunk, ...]]]:
    """Returns the ways in which a checkpoint may store the model: with transformer-engine's names, then with the local
    layer's; each with stacked layers, if they are alike, then with keys for each layer. Cached: they take seconds."""
    layout, rank = ParallelLayout(), rank_grid(ParallelLayout())[0]
    ways = []
    for spec, renamed in ((TE_SPEC, dict[str, str]()), (LOCAL_SPEC, LOCAL_NORMS)):
        held = spec.manifest(arch, layout, rank, "float32")
        apart = tuple(_chunks(held, renamed, 0))
        ways.append([tuple(_chunks(held, renamed, len(arch.layers))), apart] if _alike(apart) else [apart])
    return ways


def _chunks(rank: Manifest, renamed: Mapping[str, str], layers: int) -> Iterator[Chunk]:
    """Yields a single rank's parameters as they are stored. `layers` is the number of stacked layers; 0: none are."""
    placements = rank.by_storage()
    experts: dict[int | None, int] = defaultdict(int)
    for name in rank.storages:
        if (match := IN_LAYER.fullmatch(name)) and (expert := EXPERT.fullmatch(match[2])):
            experts[int(match[1])] = max(experts[int(match[1])], 1 + int(expert[1] or expert[3]))
    if not any(".self_attention.linear_qkv." in name for name in rank.storages):  # latent attention
        renamed = {}
    for name, storage in rank.storages.items():
        match = IN_LAYER.fullmatch(name)
        layer, key = (int(match[1]), match[2]) if match else (None, name.removeprefix("chunk0."))
        stack = [(layer, layers)] if layer is not None and layers else []
        if expert := EXPERT.fullmatch(key):
            key = f"mlp.experts.experts.{expert[2]}.weight"
            stack.append((int(expert[1] or expert[3]), experts[layer]))
        for local, saved in renamed.items():
            if key.startswith(local):
                key = saved + key.removeprefix(local)
        if layer is not None:
            key = f"decoder.layers.{key}" if layers else f"decoder.layers.{layer}.{key}"
        index, sizes = [number for number, _ in stack], [size for _, size in stack]
        yield Chunk(
            Storage(key, (*sizes, *storage.shape), storage.dtype),
            (*index, *(0 for _ in storage.shape)),
            (*(1 for _ in index), *storage.shape),
            layer,
            tuple(
                Placement(key, (*index, *held.at), (*(None for _ in index), *held.axes), held.box)
                for held in placements.get(name, ())
            ),
        )


def _alike(apart: Iterable[Chunk]) -> bool:
    """Returns whether all layers, each with its own keys, have the same parameters."""
    layers: dict[int, set[tuple[str, tuple[int, ...], tuple[int, ...]]]] = defaultdict(set)
    for chunk in apart:
        if chunk.layer is not None:
            key = chunk.stored.name.removeprefix(f"decoder.layers.{chunk.layer}.")
            layers[chunk.layer].add((key, chunk.shape, chunk.start))
    return len({frozenset(names) for names in layers.values()}) == 1
