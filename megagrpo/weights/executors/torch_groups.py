"""Process groups made directly, by gloo or NCCL, in the meeting's store: torch's registry does not know them, so they
need no default group in this process, and leave the one it has alone.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.executors.meeting import Meeting, Member


class Connecting:
    """A group of `ranks` that is being made, in a thread: torch waits there for all the others and hears no abort.

    They meet in the meeting's store under `prefixes`, innermost first. `where` says in errors which group it is.
    """

    def __init__(
        self, where: str, meeting: Meeting, prefixes: Sequence[str], rank: int, ranks: int, device: torch.device
    ) -> None:
        self._where, self._meeting, self._prefixes = where, meeting, prefixes
        self._rank, self._ranks, self._device = rank, ranks, device
        self._group: Any = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def wait(self, member: Member, overdue: Callable[[], Problem]) -> Any:
        """The group, when all have joined; once. Raises WeightSyncError, and what else torch raised in the making."""
        member.wait(lambda: None if self._thread.is_alive() else True, overdue)
        if self._failure is not None:
            raise self._failure
        group, self._group = self._group, None  # its end is its new owner's alone
        return group

    def _make(self) -> None:
        try:
            with transport_errors(self._where):
                # A connection of its own: a wait in one holds up whoever else asks through it.
                store = self._meeting.join(self._where).store
                for prefix in self._prefixes:
                    store = dist.PrefixStore(prefix, store)
                self._group = self._connect(store)
        except (WeightSyncError, ValueError, TypeError) as error:
            self._failure = error

    def _connect(self, store: dist.Store) -> Any:
        timeout = timedelta(seconds=self._meeting.timeout_seconds)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(self._device):  # a thread begins on the first
                return dist.ProcessGroupNCCL(store, self._rank, self._ranks, options)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(self._meeting.host))]
        return dist.ProcessGroupGloo(store, self._rank, self._ranks, options)


@contextmanager
def transport_errors(where: str) -> Iterator[None]:
    """torch's transports raise RuntimeError for a peer that died and for a timeout; sockets raise OSError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "look for what ended or stopped that process"
        raise WeightSyncError(Problem(where, reason, "both ends alive and connected", fix)) from error


def _own_address(peer: str) -> str:
    """The address of this node on the way to `peer`. Nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
