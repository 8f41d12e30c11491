"""Gives a training rank's device memory back while the rollout engine needs it.

Storages are emptied in place: parameters, optimizer and communication hold views of the same memory, and all views stay
valid and see the old content when the storage is restored. On CUDA the content waits in pinned host memory, exactly as
many bytes as there are: torch's own pinned memory takes the next power of two. On a CPU the same code copies it, so
that tests can show it.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megagrpo.errors import Problem, RankError
from megagrpo.megatron.state import MAIN, MOMENTS, parameters_of, parts_of

Part = Literal["parameters", "gradients", "optimizer", "reference"]


_Released = tuple[torch.UntypedStorage, int, torch.Tensor | None]
"""An emptied storage, its size in bytes, and its content (None: zeros)."""


class HostMemory:
    """Bytes on pages of their own, pinned for copies from and to a GPU while this lives."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        if pinned:
            cudart: Any = torch.cuda.cudart()
            address = self.bytes.data_ptr()
            torch.cuda.check_error(int(cudart.cudaHostRegister(address, size_bytes, 0)))
            weakref.finalize(self, cudart.cudaHostUnregister, address)


class Offload:
    """The device memory of a rank's parts. `reference` are the tensors of the reference policy, if there is one.

    Nothing may touch a part between its release and its restore; `require` checks it before work. Release gradients
    only after the optimizer step that uses them, because they are restored as zeros; no other number changes.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        reference: Sequence[torch.Tensor] = (),
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._reference = reference
        self._released: dict[Part, list[_Released]] = {}
        self._host: dict[Part, HostMemory] = {}
        """Kept when a part is restored: pinning takes longer than copying."""

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of the host memory that parts are moved to."""
        return sum(len(memory.bytes) for memory in self._host.values())

    def release(self, parts: Iterable[Part]) -> None:
        """Moves `parts` to host memory and frees their device memory. Does nothing for parts that are released."""
        for part in (part for part in parts if part not in self._released):
            storages = self._storages(part)
            total = 0 if part == "gradients" else sum(storage.nbytes() for storage in storages)
            # The optimizer has no moments before its first step: its part grows once.
            if total and (part not in self._host or len(self._host[part].bytes) < total):
                self._host[part] = HostMemory(total, pinned=storages[0].device.type == "cuda")
            released: list[_Released] = []
            start = 0
            for storage in storages:
                content = None
                if total:
                    content = self._host[part].bytes[start : start + storage.nbytes()]
                    start += storage.nbytes()
                    content.copy_(bytes_of(storage), non_blocking=True)
                released.append((storage, storage.nbytes(), content))
            torch.cuda.synchronize()  # until the copies are made
            for storage in storages:
                storage.resize_(0)
            self._released[part] = released
        torch.cuda.empty_cache()  # the engine is another process

    def restore(self, parts: Iterable[Part]) -> None:
        """Puts `parts` back on the device. Does nothing for parts that are there."""
        for part in parts:
            for storage, size_bytes, content in self._released.pop(part, []):
                storage.resize_(size_bytes)
                if content is None:
                    bytes_of(storage).zero_()
                else:
                    bytes_of(storage).copy_(content, non_blocking=True)
            torch.cuda.synchronize()

    def require(self, parts: Iterable[Part]) -> None:
        """Raises RankError, naming the parts, if any of them is released."""
        missing = [part for part in parts if part in self._released]
        if missing:
            raise RankError(
                Problem("memory of a training rank", f"{', '.join(missing)} released", "restore before use")
            )

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        match part:
            case "parameters":
                tensors: Iterable[torch.Tensor] = parameters_of(self._chunks).values()
            case "gradients":
                # The main weights' gradients are views of the buffers, or float32 copies that each step makes anew.
                groups = [group for part in parts_of(self._optimizer) for group in part.optimizer.param_groups]
                for main in (main for group in groups for main in group["params"]):
                    main.grad = main.decoupled_grad = None
                tensors = (
                    buffer.grad_data
                    for chunk in self._chunks
                    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
                )
            case "optimizer":
                tensors = self._optimizer_tensors()
            case "reference":
                tensors = self._reference
        return list(dict.fromkeys(tensor.untyped_storage() for tensor in tensors))

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yields moments, and main weights of bfloat16 parameters; a float32 parameter is its own main weight."""
        parameters = {parameter.untyped_storage() for parameter in parameters_of(self._chunks).values()}
        for part in parts_of(self._optimizer):
            for group in part.optimizer.param_groups:
                yield from (main for main in group["params"] if main.untyped_storage() not in parameters)
            for state in part.optimizer.state.values():
                yield from (state[name] for name in (MAIN, *MOMENTS) if name in state)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
