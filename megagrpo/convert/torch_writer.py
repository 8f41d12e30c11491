"""Writes tensors and objects in the format of torch.distributed.checkpoint, a file at a time, in one process."""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megagrpo.convert.torch_checkpoint import METADATA
from megagrpo.weights.boxes import Storage
from megagrpo.weights.views import torch_dtype


@dataclass(frozen=True)
class Written:
    """A part of a tensor, or a whole object (no `start`), in a file."""

    key: str
    start: tuple[int, ...] | None
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Written:
        start = None if values["start"] is None else tuple(values["start"])
        return cls(**(dict(values) | {"start": start, "shape": tuple(values["shape"])}))


class TorchFile:
    """One .distcp file being written. Use it in a `with` block; it is on disk when the block ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> TorchFile:
        self._stream = _Stream(self._path.open("wb"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._stream.file.flush()
                os.fsync(self._stream.file.fileno())
        finally:
            self._stream.file.close()

    def add(self, key: str, start: tuple[int, ...], values: torch.Tensor) -> Written:
        """Appends a part of a tensor, contiguous and alone in its memory. Raises OSError."""
        return self._add(key, start, tuple(values.shape), values)

    def add_object(self, key: str, value: Any) -> Written:
        """Appends an object as Megatron stores its ShardedObjects. Raises OSError."""
        buffer = io.BytesIO()
        torch.save([value], buffer)
        offset = self._stream.file.tell()
        self._stream.file.write(buffer.getvalue())
        return Written(key, None, (), self._path.name, offset, self._stream.file.tell() - offset)

    def _add(self, key: str, start: tuple[int, ...], shape: tuple[int, ...], value: torch.Tensor) -> Written:
        offset = self._stream.file.tell()
        try:
            torch.save(value, self._stream)
        except RuntimeError:
            if self._stream.failure is not None:  # torch's own error does not say why
                raise self._stream.failure from None
            raise
        return Written(key, start, shape, self._path.name, offset, self._stream.file.tell() - offset)


class _Stream(io.RawIOBase):
    """The file, remembering the error that torch.save hides."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise


def write_metadata(directory: Path, tensors: Mapping[str, Storage], written: Iterable[Written]) -> None:
    """The list of contents, .metadata, of all that was written into the directory. Raises OSError."""
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
