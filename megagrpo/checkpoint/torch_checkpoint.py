"""Reads and writes the files of torch.distributed.checkpoint (.metadata and .distcp), without running code from them.

Megatron's torch_dist has this format, and so have the tensors in training checkpoints of megagrpo. To read a part of a
tensor, only the stored chunks that it meets are read, one after another. A file is written tensor by tensor.
"""

from __future__ import annotations

import _codecs
import io
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import EnumType
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
from megagrpo.errors import CheckpointError, Problem, UnusableCheckpointError, first_line
from megagrpo.weights.boxes import Box, Storage
from megagrpo.weights.views import torch_dtype

METADATA = ".metadata"
MEGATRON = "metadata.json"
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
class StoredChunk:
    """A part of a tensor as one writer wrote it, at bytes offset .. offset + length of a file."""

    box: Box
    file: str
    offset: int
    length: int


class TorchCheckpoint:
    """The tensors of one directory. Keeps the chunks that were read until `forget`."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if the list of contents cannot be read, or a file is missing or cut short."""
        self.directory = directory
        metadata = _read_metadata(directory / METADATA)
        self.tensors: dict[str, Storage] = {}
        self._chunks: dict[str, tuple[StoredChunk, ...]] = {}
        self._objects: dict[str, StoredChunk] = {}
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        try:
            for key, stored in metadata.state_dict_metadata.items():
                if isinstance(stored, TensorStorageMetadata):
                    dtype = str(stored.properties.dtype).removeprefix("torch.")
                    self.tensors[key] = Storage(key, tuple(stored.size), dtype)
                    self._chunks[key] = tuple(self._stored_chunks(metadata, key, stored))
                elif info := (metadata.storage_data or {}).get(MetadataIndex(key)):
                    self._objects[key] = StoredChunk(Box(key, (), ()), info.relative_path, info.offset, info.length)
        except UNPICKLING as error:  # objects that lack a field
            raise UnusableCheckpointError(Problem(str(directory / METADATA), first_line(error), NEEDED)) from error
        sizes: dict[str, int] = {}
        for chunk in (chunk for chunks in self._chunks.values() for chunk in chunks):
            sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.length)
        problems = []
        for name, size in sorted(sizes.items()):
            path = directory / name
            given = path.stat().st_size if path.is_file() else None
            if given is None or given < size:
                shown = "no such file" if given is None else f"{given} bytes"
                problems.append(Problem(str(path), shown, f"{size} bytes"))
        if problems:
            raise CheckpointError(problems)

    @property
    def files(self) -> list[Path]:
        """Returns the list of contents and every file that tensors lie in."""
        names = {chunk.file for chunks in self._chunks.values() for chunk in chunks}
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

    def _load(self, key: str, chunk: StoredChunk) -> torch.Tensor:
        kept = self._kept.get((chunk.file, chunk.offset))
        if kept is None:
            kept = self._torch_load(key, chunk)
            if not isinstance(kept, torch.Tensor) or tuple(kept.shape) != chunk.box.shape:
                given = f"{list(kept.shape)}" if isinstance(kept, torch.Tensor) else type(kept).__name__
                needed = f"{list(chunk.box.shape)}"
                raise CheckpointError(Problem(f"{self.directory / chunk.file}: {key}", given, needed))
            self._kept[chunk.file, chunk.offset] = kept
        return kept

    def _torch_load(self, key: str, chunk: StoredChunk) -> Any:
        try:
            with (self.directory / chunk.file).open("rb") as file:
                view: IO[bytes] = _create_file_view(file, chunk.offset, chunk.length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except (OSError, *UNPICKLING) as error:
            where = f"{self.directory / chunk.file}: {key}"
            given = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(Problem(where, given, "a stored tensor, without code to run")) from error

    def _stored_chunks(self, metadata: Metadata, key: str, stored: TensorStorageMetadata) -> list[StoredChunk]:
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
                chunks.append(StoredChunk(box, info.relative_path, info.offset, info.length))
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


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise UnusableCheckpointError(Problem(str(path), error.strerror or str(error), NEEDED)) from error
    except UNPICKLING as error:
        raise UnusableCheckpointError(Problem(str(path), first_line(error), NEEDED)) from error
    if not isinstance(metadata, Metadata):
        raise UnusableCheckpointError(Problem(str(path), type(metadata).__name__, NEEDED))
    return metadata


@dataclass(frozen=True)
class Written:
    """A part of a tensor, or a whole object (no `start`), in a file."""

    key: str
    start: Sequence[int] | None
    shape: Sequence[int]
    file: str
    offset: int
    length: int


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

    def add(self, key: str, start: tuple[int, ...] | None, value: Any) -> Written:
        """Appends a part of a tensor, contiguous and alone in its memory; without `start` an object, in a list as
        Megatron stores its ShardedObjects. Raises OSError."""
        offset, shape = self._file.tell(), () if start is None else tuple(value.shape)
        try:
            torch.save([value] if start is None else value, self)
        except RuntimeError:
            if self._failure is not None:  # torch's own error does not say why
                raise self._failure from None
            raise
        return Written(key, start, shape, self._path.name, offset, self._file.tell() - offset)


def write_metadata(directory: Path, tensors: Mapping[str, Storage], written: Iterable[Written]) -> None:
    """Writes .metadata, the list of contents of all that was written into the directory, and Megatron's metadata.json.
    Raises OSError."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for part in written:
        place = _StorageInfo(part.file, part.offset, part.length)
        if part.start is None:
            described[part.key] = BytesStorageMetadata()
            places[MetadataIndex(part.key)] = place
            continue
        start = torch.Size(part.start)
        places[MetadataIndex(part.key, start, len(chunks[part.key]))] = place
        chunks[part.key].append(ChunkStorageMetadata(start, torch.Size(part.shape)))
    for key, of_tensor in chunks.items():
        properties = TensorProperties(dtype=torch_dtype(tensors[key].dtype))
        described[key] = TensorStorageMetadata(properties, torch.Size(tensors[key].shape), of_tensor)
    with (directory / METADATA).open("wb") as file:
        pickle.dump(Metadata(described, None, places), file)
        file.flush()
        os.fsync(file.fileno())
    write_durably(directory / MEGATRON, json.dumps(MEGATRON_FORMAT))
