"""A place in the endless, shuffled sequence of prompts or examples, small enough to be saved with every checkpoint."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeGuard, TypeVar

import numpy as np

from megagrpo.data.order import permutation
from megagrpo.errors import DataError, Problem


class Item(Protocol):
    """What a cursor goes over: a dataclass whose content must be the same when a run continues."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> str: ...

    def content(self) -> bytes: ...


AnyItem = TypeVar("AnyItem", bound=Item)


class Cursor(Generic[AnyItem]):
    """Epoch after epoch over `prompts`, each a permutation drawn from (seed, epoch).

    Invariant: 0 <= position < len(prompts), and (epoch, position) with the constructor's arguments decide everything
    that follows; nothing else is remembered.
    """

    def __init__(self, prompts: Sequence[AnyItem], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError(Problem("no prompts to train on", needed="at least one prompt"))
        self.epoch = 0
        self.position = 0
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._data = {"prompts": len(prompts), "seed": seed, "shuffle": shuffle, "fingerprint": fingerprint(prompts)}
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def next(self, count: int) -> list[AnyItem]:
        """The next `count` prompts; they may straddle epochs.

        Ids are unique within the list: a prompt that comes again (it was taken twice, or a new epoch began) has `+1`,
        `+2`, ... appended, so that its samples have seeds and names of their own.
        """
        taken: list[AnyItem] = []
        while len(taken) < count:
            indices = self._order[self.position : self.position + count - len(taken)]
            taken += [self._prompts[i] for i in indices]
            self._advance(len(indices))
        return _with_unique_ids(taken)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as plain JSON values."""
        return {"epoch": self.epoch, "position": self.position, **self._data}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError, changing nothing, if it was taken over other data."""
        problems = [
            Problem(
                "the saved place in the data does not fit this run's data",
                given=f"{name}: {value!r} now",
                needed=f"{name}: {state.get(name)!r}, as when it was saved",
                fix="restore the data files, and the recipe's data and seed, or start a run under another name",
            )
            for name, value in self._data.items()
            if state.get(name) != value
        ]
        epoch, position = state.get("epoch"), state.get("position")
        if not (_is_index(epoch) and _is_index(position) and position < len(self)):
            problems.append(
                Problem(
                    "the saved place in the data is not valid",
                    given=f"epoch: {epoch!r}, position: {position!r}",
                    needed=f"an epoch from 0 and a position from 0 to {len(self) - 1}",
                )
            )
        if problems:
            raise DataError(problems)
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)

    def _advance(self, count: int) -> None:
        self.position += count
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self))
        return permutation(len(self), self._seed, epoch)


def fingerprint(items: Sequence[Item]) -> str:
    """Hash of ids and contents, in order: other files, rows, template or amounts give another one."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(f"{item.id}\0".encode() + item.content())
    return digest.hexdigest()


def _with_unique_ids(prompts: list[AnyItem]) -> list[AnyItem]:
    seen: Counter[str] = Counter()
    unique: list[AnyItem] = []
    for prompt in prompts:
        again = seen[prompt.id]
        seen[prompt.id] += 1
        unique.append(replace(prompt, id=f"{prompt.id}+{again}") if again else prompt)
    return unique


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
