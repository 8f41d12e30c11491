"""Buckets in memory that both ends map: a file in /dev/shm on CPUs, a buffer shared by CUDA IPC on GPUs.

A sender owns one area with two slots and keeps it from sync to sync, so that its pages are mapped already from the
second sync on. A file's name holds the run's token. The owner removes the file when it closes it; if the owner is
killed, a shell that outlives it removes the file. The next process that makes a file on the node, in any run, removes
any files that remain and that no process has locked. So does `megagrpo doctor --clean`.
"""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
import secrets
import stat
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from megagrpo.errors import Problem, WeightSyncError, brief
from megagrpo.processes.lifetime import remove_after_me
from megagrpo.weights.transport.buckets import Peer
from megagrpo.weights.transport.ends import SLOTS, Part, Ticket
from megagrpo.weights.transport.rendezvous import Member, Sync

DIRECTORY = Path("/dev/shm")
YOUNG_SECONDS = 5.0
"""A file below this age may not have been locked by its owner yet."""


class SharedMemory:
    """A Transport (ends.py) for peers on one node. `run` is the rendezvous's token."""

    def __init__(self, run: str) -> None:
        self._stem = f"megagrpo-{run}-"
        self._own: FileArea | CudaArea | None = None
        self._slots = self._slot_bytes = 0
        self._others: dict[Peer, tuple[Any, torch.Tensor]] = {}

    def connect(self, sync: Sync, member: Member, part: Part, device: torch.device) -> None:
        if device.type == "cuda":
            require_named_gpus(member.name, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
        self.make_slots(SLOTS, part.sent_bytes, device)

    def make_slots(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        """Makes `slots` slots of at least `slot_bytes`, unless they are there."""
        if slot_bytes and (slots > self._slots or slot_bytes > self._slot_bytes):
            self._release()
            aligned = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if device.type == "cuda":
                self._own = CudaArea(slots * aligned, device)
            else:
                self._own = FileArea(f"{self._stem}{secrets.token_hex(8)}", slots * aligned)
            self._slots, self._slot_bytes = slots, aligned

    def slot(self, index: int) -> torch.Tensor:
        return self._area().flat[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def may_send(self, receiver: Peer) -> bool:
        return True

    def ticket(self, index: int, receiver: Peer) -> Ticket:
        return self._area().ticket(receiver), index * self._slot_bytes

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> None:
        pass

    def sent(self, index: int, label: str) -> None:
        pass

    def receive(
        self, sender: Peer, bucket_bytes: int, ticket: Ticket, index: int, label: str
    ) -> Callable[[], torch.Tensor]:
        if not isinstance(ticket, tuple):
            raise WeightSyncError(Problem(label, f"a ticket {brief(ticket)}", "the same weights.transfer at both ends"))
        of_area, begin = ticket
        known, flat = self._others.get(sender, (None, None))
        if flat is None or known != of_area:
            flat = map_cuda(of_area, label) if isinstance(of_area, dict) else map_file(self._stem, of_area, label)
            self._others[sender] = (of_area, flat)
        if not 0 <= begin <= flat.numel() - bucket_bytes:
            given = f"bytes from {begin} on of {flat.numel()}"
            raise WeightSyncError(Problem(label, given, f"{bucket_bytes} bytes in the other end's memory"))
        return lambda: flat[begin : begin + bucket_bytes]

    def close(self) -> None:
        self._release()
        self._others.clear()

    def _area(self) -> FileArea | CudaArea:
        if self._own is None:
            raise WeightSyncError(Problem("shared memory for weights", "no slots", "connect first"))
        return self._own

    def _release(self) -> None:
        if self._own is not None:
            self._own.close()
        self._own, self._slots, self._slot_bytes = None, 0, 0


def remove_left_over(run: str) -> None:
    """Removes the files of a run whose processes have ended, on this node."""
    for file in DIRECTORY.glob(f"megagrpo-{run}-*"):
        file.unlink(missing_ok=True)


def remove_abandoned() -> list[Path]:
    """Removes the files on this node, of any run, whose owners were killed. Other users' files stay."""
    removed = []
    for path in DIRECTORY.glob("megagrpo-*"):
        with suppress(OSError):  # it is gone, or another user's, or locked by an owner that lives
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or time.time() - status.st_mtime < YOUNG_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
            finally:
                os.close(descriptor)
    return removed


class FileArea:
    """A file in /dev/shm that no other user may read, locked for as long as it is mapped here. Raises WeightSyncError
    if there is no room for all of it."""

    def __init__(self, name: str, area_bytes: int) -> None:
        remove_abandoned()
        self._path = DIRECTORY / name
        # Also removes it when the owner is collected, or ends without closing it.
        self._remove = weakref.finalize(self, self._path.unlink, missing_ok=True)
        self._watched = remove_after_me(self._path)
        descriptor = -1
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the mapping keeps a copy of the descriptor, and with it the lock
            os.posix_fallocate(descriptor, 0, area_bytes)  # a write beyond the room left would kill the process
            mapped = mmap.mmap(descriptor, area_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close()
            given = error.strerror or str(error)
            needed = f"room for {area_bytes} bytes in {DIRECTORY}"
            fix = f"a smaller weights.bucket_bytes, or a larger {DIRECTORY} (--shm-size of a container)"
            raise WeightSyncError(Problem(f"shared memory for weights: {self._path}", given, needed, fix)) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self.flat = torch.frombuffer(mapped, dtype=torch.uint8)

    def ticket(self, receiver: Peer) -> str:
        """Returns the file's name, by which a receiver maps it."""
        return self._path.name

    def close(self) -> None:
        """Removes the name; the memory goes with the last mapping."""
        self._remove()
        self._watched.close()


def map_file(stem: str, name: str, label: str) -> torch.Tensor:
    """Returns the other end's file, mapped read-only. It must be of this run: its name begins with `stem`.

    All its pages are mapped at once: to map them one by one takes longer than the copy.
    """
    if not name.startswith(stem) or "/" in name:
        raise WeightSyncError(Problem(label, f"a file called {name}", f"a file of this run, {stem}…"))
    try:
        with (DIRECTORY / name).open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    except OSError as error:
        fix = "weights.transfer: process_group, if the engine is on another node or in another container"
        where = f"{label}: {DIRECTORY / name}"
        raise WeightSyncError(Problem(where, error.strerror or str(error), "the other end's memory", fix)) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.frombuffer(mapped, np.uint8))


class CudaArea:
    """A buffer on a GPU, shared by CUDA IPC."""

    def __init__(self, area_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(area_bytes, dtype=torch.uint8, device=device)
        self._tickets: dict[Peer, dict[str, Any]] = {}

    def ticket(self, receiver: Peer) -> dict[str, Any]:
        """Returns the receiver's own ticket: torch counts by ticket which processes still map the memory."""
        if receiver not in self._tickets:
            _, arguments = reductions.reduce_tensor(self.flat)
            shared = arguments[7:]  # how to map the memory; the earlier arguments describe a flat tensor of bytes
            self._tickets[receiver] = {
                "device": str(torch.cuda.get_device_properties(self.flat.device).uuid),
                "bytes": self.flat.numel(),
                "shared": [base64.b64encode(its).decode() if isinstance(its, bytes) else its for its in shared],
            }
        return self._tickets[receiver]

    def close(self) -> None:
        self._tickets.clear()


def require_named_gpus(where: str, named: str | None, seen: int) -> None:
    """Raises WeightSyncError if a process sees fewer GPUs than CUDA_VISIBLE_DEVICES names: CUDA ignores the first
    absent GPU and all after it, as in a container with one GPU."""
    if named and seen < len(named.split(",")):
        fix = "give every process of a node, and its container, all GPUs of the run there; or weights.transfer: disk"
        needed = "all that it was told to use: weights come from their memory"
        raise WeightSyncError(Problem(f"{where}: GPUs", f"{seen} of CUDA_VISIBLE_DEVICES {named}", needed, fix))


def map_cuda(ticket: dict[str, Any], label: str) -> torch.Tensor:
    """Returns a sender's buffer on the sender's GPU, which this process must see under any number."""
    gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if ticket["device"] not in gpus:
        fix = "let the engine see the training rank's GPU, or weights.transfer: process_group"
        raise WeightSyncError(Problem(label, f"memory of GPU {ticket['device']}", "a GPU that this process sees", fix))
    shared = [base64.b64decode(its) if isinstance(its, str) else its for its in ticket["shared"]]
    flat = torch.Tensor, (ticket["bytes"],), (1,), 0, torch.UntypedStorage, torch.uint8
    return reductions.rebuild_cuda_tensor(*flat, gpus.index(ticket["device"]), *shared)
