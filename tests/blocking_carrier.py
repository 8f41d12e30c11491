"""A cluster in threads whose point-to-point operations block as NCCL's do, and which knows when nothing can go on.

A pair's first operation waits, in the process, until both ends have called one. Operations of a pair run in order; each
lasts until the one that matches it runs at the other end. A GPU has one queue: behind an operation that may not begin
yet, because one of its pair is before it, none of any pair begins. A deadlock is seen at once: all threads wait, each
has looked since the last change, and none has found what it waits for.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.transport.process_group import ProcessGroup
from megagrpo.weights.transport.rendezvous import Sync


class DeadlockError(Exception):
    """All processes wait, and none can go on."""


@dataclass(eq=False)
class Operation:
    """A send or a receive of one rank, once it was launched. It is torch's Work too."""

    cluster: BlockingCluster
    pair: tuple[str, int, int]  # way, sender, receiver
    flat: torch.Tensor
    sends: bool
    begun: bool = False
    done: bool = False

    def is_completed(self) -> bool:
        with self.cluster.changed:
            return self.done

    def wait(self, timeout: timedelta) -> None:
        self.cluster.wait_until(lambda: self.done)


@dataclass(eq=False)
class BlockingCluster:
    """State that the threads share: queues of messages, communicators, and the GPUs' queues of operations."""

    sync: Sync
    changed: threading.Condition = field(default_factory=threading.Condition)
    threads: int = 0
    waiting: int = 0
    stuck: bool = False
    messages: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    written: dict[str, Any] = field(default_factory=dict)
    communicators: dict[tuple[str, int, int], set[bool]] = field(default_factory=lambda: defaultdict(set))
    queues: dict[int, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Bytes between ranks of a process group."""

    def change(self) -> None:
        self.waiting = 0
        self.changed.notify_all()

    def wait_until(self, there: Callable[[], bool]) -> None:
        with self.changed:
            while not there():
                self.waiting += 1
                self.stuck = self.stuck or self.waiting == self.threads
                if self.stuck:
                    self.changed.notify_all()
                    raise DeadlockError
                self.changed.wait()

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Calls all, each in its thread. Raises DeadlockError, or another error of the first thread that has one."""
        self.threads = len(work)

        def call(one: Callable[[], None]) -> None:
            try:
                one()
            finally:  # the others must not wait for this thread
                with self.changed:
                    self.threads -= 1
                    self.change()

        with ThreadPoolExecutor(len(work)) as threads:
            errors = [future.exception() for future in [threads.submit(call, one) for one in work]]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, DeadlockError)):
            raise error

    def launch(self, rank: int, operation: Operation) -> Operation:
        with self.changed:
            self.communicators[operation.pair].add(operation.sends)
            self.change()
        self.wait_until(lambda: len(self.communicators[operation.pair]) == 2)
        with self.changed:
            self.queues[rank].append(operation)
            while self._begin() or self._carry():
                pass
            self.change()
        return operation

    def _begin(self) -> bool:
        """Begins an operation on some GPU; False if none can begin."""
        for queue in self.queues.values():
            busy = {(operation.pair, operation.sends) for operation in queue if operation.begun}
            next_one = next((operation for operation in queue if not operation.begun), None)
            if next_one is not None and next_one.pair not in {pair for pair, _ in busy}:
                next_one.begun = True
                return True
        return False

    def _carry(self) -> bool:
        """Copies bytes from one GPU to another; False if none are ready."""
        begun = [operation for queue in self.queues.values() for operation in queue if operation.begun]
        at_ends: dict[tuple[str, int, int], list[Operation]] = defaultdict(list)
        for operation in begun:
            at_ends[operation.pair].append(operation)
        for (_, sender, receiver), ends in at_ends.items():
            if len(ends) == 2 and ends[0].sends != ends[1].sends:
                source, target = sorted(ends, key=lambda operation: not operation.sends)
                target.flat.copy_(source.flat)
                self.sent[sender, receiver] += source.flat.numel()
                for operation in ends:
                    operation.done = True
                for queue in self.queues.values():
                    queue[:] = [operation for operation in queue if not operation.done]
                return True
        return False


@dataclass(frozen=True, eq=False)
class BlockingMember:
    """Takes the place of a Member, and of the rendezvous that it joins, within one process."""

    cluster: BlockingCluster
    name: str = ""
    run: str = "blocking"

    @property
    def rendezvous(self) -> BlockingMember:
        return self

    def join(self, name: str) -> BlockingMember:
        return BlockingMember(self.cluster, name)

    def announce(self) -> None:
        pass

    @contextmanager
    def attend(self, version: int) -> Iterator[Sync]:
        yield self.cluster.sync

    def push(self, to: str, message: Any) -> None:
        with self.cluster.changed:
            self.cluster.messages[to].append(tuple(message))
            self.cluster.change()

    def pop(self, queue: str, kind: Any) -> Any | None:
        with self.cluster.changed:
            return self.cluster.messages[queue].popleft() if self.cluster.messages[queue] else None

    def write(self, key: str, value: Any) -> None:
        with self.cluster.changed:
            self.cluster.written[key] = value
            self.cluster.change()

    def read(self, key: str, kind: Any) -> Any | None:
        return self.cluster.written.get(key)

    def wait(self, look: Callable[[], Any | None], missing: Callable[[], Problem]) -> Any:
        found: list[Any] = []

        def there() -> bool:
            if (what := look()) is not None:
                found.append(what)
            return bool(found)

        self.cluster.wait_until(there)
        return found[0]

    def check_abort(self) -> None:
        pass

    def late(self, where: str, missing: str) -> Problem:
        return Problem(where, missing)

    def seconds_left(self) -> float:
        return 1.0


class BlockingProcessGroup(ProcessGroup):
    """The transport of one peer, with operations of a BlockingCluster in the place of NCCL's."""

    @property
    def _in_order(self) -> bool:
        return True

    def _connected(self, sync: Sync, member: Any, part: Any) -> tuple[Any, ...]:
        own = self._rank_of[self._peer]
        groups = tuple(BlockingOperations(member.cluster, way, own) for way in ("up", "down"))
        self._greet(groups, part)
        return groups


@dataclass(frozen=True, eq=False)
class BlockingOperations:
    """One rank's operations in one group."""

    cluster: BlockingCluster
    way: str
    rank: int

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> Operation:
        pair = self.way, self.rank, receiver
        return self.cluster.launch(self.rank, Operation(self.cluster, pair, tensors[0], sends=True))

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> Operation:
        pair = self.way, sender, self.rank
        return self.cluster.launch(self.rank, Operation(self.cluster, pair, tensors[0], sends=False))

    def abort(self) -> None:
        pass


class Memory:
    """Takes the place of files in shared memory (FileArea, map_file) within one process."""

    by_name: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, name: str, area_bytes: int) -> None:
        self._name, self.flat = name, torch.empty(area_bytes, dtype=torch.uint8)
        self.by_name[name] = self.flat

    def ticket(self, receiver: int) -> str:
        return self._name

    def close(self) -> None:
        self.by_name.pop(self._name, None)

    @classmethod
    def map(cls, stem: str, name: str, label: str) -> torch.Tensor:
        if name not in cls.by_name:
            raise WeightSyncError(Problem(label, f"no memory called {name}"))
        return cls.by_name[name]
