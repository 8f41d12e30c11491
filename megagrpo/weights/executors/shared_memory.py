"""Buckets in memory that both ends map: a file in /dev/shm on CPUs, a buffer shared by CUDA IPC on GPUs.

A sender owns one area with two slots and keeps it from sync to sync, so that its pages are there from the second sync
on. A file's name holds the run's token. It goes when its owner closes it. An owner that is killed cannot: whoever next
makes a file on its node, in any run, removes those that nobody holds the lock of.
"""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
import secrets
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.multiprocessing import reductions

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.executors.buckets import SLOTS, read_only_tensor
from megagrpo.weights.executors.meeting import Member, Sync
from megagrpo.weights.executors.streams import Party

DIRECTORY = Path("/dev/shm")
YOUNG_SECONDS = 5.0
"""A file's age below which its owner may not have locked it yet."""


class SharedMemory:
    """Implements Carrier (flow.py) for parties on one node. `run` is the meeting's token."""

    def __init__(self, run: str) -> None:
        self._stem = file_stem(run)
        self._own: list[_Area] = []  # none before the first sync
        self._slot_bytes = 0
        self._others: dict[Party, tuple[Any, torch.Tensor]] = {}

    def begin(self, sync: Sync, member: Member, device: torch.device, slot_bytes: int) -> None:
        if slot_bytes > self._slot_bytes:
            self._release()
            aligned = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if device.type == "cuda":
                self._own = [CudaArea(SLOTS * aligned, device)]
            else:
                self._own = [FileArea(f"{self._stem}{secrets.token_hex(8)}", SLOTS * aligned)]
            self._slot_bytes = aligned

    def slot(self, index: int) -> torch.Tensor:
        return self._own[0].flat[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def hand_over(self, index: int, parcel_bytes: int, receiver: Party) -> Any:
        return [self._own[0].ticket(receiver), index * self._slot_bytes]

    def taken(self, index: int, label: str) -> None:
        pass

    def fetch(self, sender: Party, parcel_bytes: int, handed_over: Any, label: str) -> Callable[[], torch.Tensor]:
        ticket, begin = handed_over
        known, flat = self._others.get(sender, (None, None))
        if flat is None or known != ticket:
            flat = map_cuda(ticket, label) if isinstance(ticket, dict) else map_file(self._stem, ticket, label)
            self._others[sender] = (ticket, flat)
        return lambda: flat[begin : begin + parcel_bytes]

    def close(self) -> None:
        self._release()
        self._others.clear()

    def _release(self) -> None:
        for area in self._own:
            area.close()
        self._own, self._slot_bytes = [], 0


def remove_left_over(run: str) -> None:
    """Removes the files of a run whose processes have ended, on this node."""
    for file in DIRECTORY.glob(f"{file_stem(run)}*"):
        file.unlink(missing_ok=True)


def remove_abandoned() -> None:
    """Removes the files on this node, of any run, whose owners were killed. Those of other users are left alone."""
    for path in DIRECTORY.glob("megagrpo-*"):
        with suppress(OSError):  # gone, or another user's, or locked: its owner lives
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or time.time() - found.st_mtime < YOUNG_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


class _Area(Protocol):
    """Memory of a sender. `ticket` is what a receiver needs to map it, as JSON."""

    flat: torch.Tensor

    def ticket(self, receiver: Party) -> Any: ...

    def close(self) -> None: ...


class FileArea:
    """A file in /dev/shm that no other user may read, locked for as long as it is mapped here.

    Raises WeightSyncError if there is no room for all of it.
    """

    def __init__(self, name: str, area_bytes: int) -> None:
        remove_abandoned()
        self._path = DIRECTORY / name
        # Also when its owner is forgotten, or ends without closing it.
        self._remove = weakref.finalize(self, self._path.unlink, missing_ok=True)
        descriptor = -1
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the mapping keeps a copy of the descriptor, and so the lock
            os.posix_fallocate(descriptor, 0, area_bytes)  # a write to a page that is not there would kill the process
            mapped = mmap.mmap(descriptor, area_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close()
            raise WeightSyncError(
                Problem(
                    f"shared memory for weights: {self._path}",
                    error.strerror or str(error),
                    f"room for {area_bytes} bytes in {DIRECTORY}",
                    f"a smaller weights.bucket_bytes, or a larger {DIRECTORY} (--shm-size of a container)",
                )
            ) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self.flat = torch.frombuffer(mapped, dtype=torch.uint8)

    def ticket(self, receiver: Party) -> str:
        return self._path.name

    def close(self) -> None:
        """Removes the name; the memory goes with the last mapping."""
        self._remove()


def map_file(stem: str, name: str, label: str, *, writable: bool = False) -> torch.Tensor:
    """The other end's file, which must be of this run, read-only or to write into.

    Its pages are mapped at once: one by one they cost more than the copy.
    """
    if not name.startswith(stem) or "/" in name:
        raise WeightSyncError(Problem(label, f"a file called {name}", f"a file of this run, {stem}…"))
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        with (DIRECTORY / name).open("r+b" if writable else "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
    except OSError as error:
        fix = "weights.transfer: process_group or broadcast, if the engine is on another node or in another container"
        where = f"{label}: {DIRECTORY / name}"
        raise WeightSyncError(Problem(where, error.strerror or str(error), "the other end's memory", fix)) from error
    if writable:
        return torch.frombuffer(mapped, dtype=torch.uint8)
    return read_only_tensor(np.frombuffer(mapped, np.uint8))


def file_stem(run: str) -> str:
    """How the names of a run's files begin; `run` is the meeting's token."""
    return f"megagrpo-{run}-"


class CudaArea:
    """A buffer on a GPU, shared by CUDA IPC."""

    def __init__(self, area_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(area_bytes, dtype=torch.uint8, device=device)
        self._tickets: dict[Party, dict[str, Any]] = {}

    def ticket(self, receiver: Party) -> dict[str, Any]:
        """One for each receiver: torch counts by ticket who still has the memory mapped."""
        if receiver not in self._tickets:
            _, arguments = reductions.reduce_tensor(self.flat)
            handle, storage_bytes, storage_offset, _, counter, counter_offset, event, event_sync = arguments[7:]
            self._tickets[receiver] = {
                "device": str(torch.cuda.get_device_properties(self.flat.device).uuid),
                "bytes": self.flat.numel(),
                "handle": base64.b64encode(handle).decode(),
                "storage_bytes": storage_bytes,
                "storage_offset": storage_offset,
                "counter": base64.b64encode(counter).decode(),
                "counter_offset": counter_offset,
                "event": base64.b64encode(event).decode(),
                "event_sync": event_sync,
            }
        return self._tickets[receiver]

    def close(self) -> None:
        self._tickets.clear()


def map_cuda(ticket: dict[str, Any], label: str) -> torch.Tensor:
    """A sender's buffer, on the sender's GPU, which this process must see under any number."""
    index = _cuda_indices().get(ticket["device"])
    if index is None:
        fix = "let the engine see the training rank's GPU, or weights.transfer: process_group"
        raise WeightSyncError(Problem(label, f"memory of GPU {ticket['device']}", "a GPU that this process sees", fix))
    return reductions.rebuild_cuda_tensor(
        torch.Tensor,
        (ticket["bytes"],),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        index,
        base64.b64decode(ticket["handle"]),
        ticket["storage_bytes"],
        ticket["storage_offset"],
        False,
        base64.b64decode(ticket["counter"]),
        ticket["counter_offset"],
        base64.b64decode(ticket["event"]),
        ticket["event_sync"],
    )


@lru_cache(maxsize=1)
def _cuda_indices() -> dict[str, int]:
    return {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
