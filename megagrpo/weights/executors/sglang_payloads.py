"""What goes into SGLang's `serialized_named_tensors`: tensors in memory that the server maps, never their bytes.

SGLang unpickles with a short list of permitted names (SafeUnpickler in sglang/srt/utils/common.py, 0.5.23). These
pickles hold torch's own functions for mapping shared memory, with our arguments: neither end needs the other's classes,
and torch's helper process, which would hold this process's output open, does not start here. CUDA handles are written
after torch's and SGLang's sources and have not been run.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from megagrpo.weights.executors.shared_memory import CudaArea, FileArea

HEADER_BYTES = 64
"""Of a file that torch maps: a count of its users, for files that the last one removes (aten/src/ATen/MapAllocator)."""
NEVER_LAST = 1 << 30
CUDA_DEVICE_ARGUMENT = 6
"""Of reductions.rebuild_cuda_tensor; SGLang takes a GPU's UUID there (sglang/srt/utils/patch_torch.py)."""


def begin_users(area: FileArea) -> None:
    """Writes the header that torch expects: a server that lets go of the file shall not remove it."""
    area.flat[:4].view(torch.int32).fill_(NEVER_LAST)


def shared_tensor(
    area: FileArea | CudaArea, storage: _MappedFile | None, begin: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """A tensor at byte `begin` of the area, to be put into a payload. `storage` is the area's `mapped_file`, if it is
    one; the tensors of one payload share it."""
    if storage is not None:
        return _FileTensor(storage, begin - HEADER_BYTES, shape, dtype)
    end = begin + torch.Size(shape).numel() * dtype.itemsize
    return _CudaTensor(area.flat[begin:end].view(dtype).view(shape))


def mapped_file(area: FileArea | CudaArea) -> _MappedFile | None:
    return _MappedFile(area.ticket(0), area.flat.numel() - HEADER_BYTES) if isinstance(area, FileArea) else None


def named_tensors(tensors: Iterable[tuple[str, Any]]) -> str:
    """For load_format "direct"."""
    return _encoded(list(tensors))


def flattened_bucket(flat: Any, entries: Iterable[tuple[str, tuple[int, ...], torch.dtype, int, int]]) -> str:
    """For load_format "flattened_bucket": name, shape, dtype, and the first and last byte in `flat` of each tensor."""
    metadata = [
        SimpleNamespace(
            name=name, shape=torch.Size(shape), dtype=dtype, start_idx=begin, end_idx=end, numel=end - begin
        )
        for name, shape, dtype, begin, end in entries
    ]
    return _encoded({"flattened_tensor": flat, "metadata": metadata})


def _encoded(payload: Any) -> str:
    return base64.b64encode(pickle.dumps(payload, protocol=4)).decode()


@dataclass(frozen=True, eq=False)
class _MappedFile:
    name: str
    bytes: int

    def __reduce__(self) -> tuple[Any, ...]:
        # No manager's address: the server's torch starts its own helper, which ends with the server.
        arguments = (torch.UntypedStorage, b"", f"/{self.name}".encode(), self.bytes)
        return reductions.rebuild_storage_filename, arguments


@dataclass(frozen=True, eq=False)
class _Typed:
    storage: _MappedFile
    dtype: torch.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return reductions.rebuild_typed_storage, (self.storage, self.dtype)


@dataclass(frozen=True, eq=False)
class _FileTensor:
    storage: _MappedFile
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        stride = torch.empty(self.shape, device="meta").stride()
        arguments = (_Typed(self.storage, self.dtype), self.begin // self.dtype.itemsize, self.shape, stride)
        return torch._utils._rebuild_tensor, arguments


@dataclass(frozen=True, eq=False)
class _CudaTensor:
    view: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.view)
        uuid = str(torch.cuda.get_device_properties(self.view.device).uuid)
        return rebuild, (*arguments[:CUDA_DEVICE_ARGUMENT], uuid, *arguments[CUDA_DEVICE_ARGUMENT + 1 :])
