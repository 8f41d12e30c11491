"""A place in the endless, shuffled sequence of prompts or examples, small enough to be saved with every checkpoint."""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic

import numpy as np

from megagrpo.data.mixture import AnyItem, fingerprint, names, permutation
from megagrpo.errors import DataError, Problem


class Cursor(Generic[AnyItem]):
    """A position in `prompts`, epoch after epoch, each in a permutation drawn from (seed, epoch).

    Invariant: 0 <= position < len(prompts). The constructor's arguments, epoch, position and the set-aside flags
    are the whole state.
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
        self._aside = np.zeros(len(prompts), bool)

    def __len__(self) -> int:
        """Returns the number of prompts in one epoch."""
        return len(self._prompts)

    @property
    def set_aside_count(self) -> int:
        """Returns the number of prompts of an epoch that are never drawn again."""
        return int(self._aside.sum())

    @property
    def exhausted(self) -> bool:
        """Returns whether every prompt is set aside."""
        return bool(self._aside.all())

    def next(self, count: int, drawn: Counter[str] | None = None) -> list[AnyItem]:
        """Returns the next `count` prompts that are not set aside; they may straddle epochs.

        Ids are unique within the list: a repeated prompt (it was taken twice, or a new epoch began) has `+1`, `+2`, ...
        appended to its id, so that its samples have their own seeds and names. `drawn` counts earlier draws of each
        prompt in the same step, and is updated. Raises DataError if every prompt is set aside.
        """
        if self.exhausted:
            raise DataError(Problem("every prompt is set aside", needed="a prompt to train on"))
        taken: list[AnyItem] = []
        while len(taken) < count:
            ahead = self._order[self.position :]
            drawable = np.flatnonzero(~self._aside[ahead])[: count - len(taken)]
            taken += [self._prompts[i] for i in ahead[drawable]]
            self.position += int(drawable[-1]) + 1 if len(taken) == count else len(ahead)
            if self.position == len(self):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
        drawn = Counter() if drawn is None else drawn
        unique: list[AnyItem] = []
        for prompt in taken:
            again = drawn[prompt.id]
            drawn[prompt.id] += 1
            unique.append(replace(prompt, id=f"{prompt.id}+{again}") if again else prompt)
        return unique

    def some(self, count: int) -> list[AnyItem]:
        """Returns `count` prompts spread over the data, or all prompts if there are fewer."""
        return [self._prompts[i] for i in np.unique(np.linspace(0, len(self) - 1, count).astype(int)).tolist()]

    def set_aside(self, ids: Iterable[str]) -> None:
        """Excludes prompts from later draws. Ids are as `next` returned them. Excludes every copy of a prompt."""
        for name in ids:
            self._aside[self._rows_of(name)] = True

    def is_set_aside(self, name: str) -> bool:
        """Returns whether every prompt of this id, as `next` returned it, is set aside."""
        return bool(self._aside[self._rows_of(name)].all())

    def named(self, name: str) -> AnyItem:
        """Returns the prompt to which `next` gave this id. Raises DataError if there is none."""
        rows = self._rows_of(name)
        if not rows:
            raise DataError(Problem(f"prompt {name}", "not in the data", "the data of the run that is repeated"))
        return replace(self._prompts[rows[0]], id=name)

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` reads, as plain JSON values."""
        packed = b64encode(zlib.compress(np.packbits(self._aside).tobytes())).decode("ascii")  # a bit for each prompt
        aside = packed if self._aside.any() else ""
        return {"epoch": self.epoch, "position": self.position, "set_aside": aside, **self._data}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state` was taken. Raises DataError, changing nothing, if it was taken over other data."""
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
        aside = _unpacked(state.get("set_aside"), len(self))
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (epoch, position))
        if not (whole and (position or 0) < len(self)) or aside is None:
            given = f"epoch: {epoch!r}, position: {position!r}, set_aside: {state.get('set_aside')!r}"
            needed = f"an epoch from 0, a position from 0 to {len(self) - 1}, and a bit for each prompt"
            problems.append(Problem("the saved place in the data is not valid", given, needed))
        if problems or aside is None:
            raise DataError(problems)
        self.epoch, self.position, self._aside = state["epoch"], state["position"], aside
        self._order = self._order_of(self.epoch)

    @cached_property
    def _ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sorted hashes of the ids, uint64 [prompts], and their indices in the data, int64 [prompts]."""
        hashes = np.fromiter(map(_hash, names(self._prompts)), np.uint64, len(self))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    def _rows_of(self, name: str) -> list[int]:
        """Returns the indices in the data of the prompts to which `next` gave this id."""
        hashes, order = self._ids
        for known in (name, name.rpartition("+")[0]):
            first, last = (int(np.searchsorted(hashes, _hash(known), side)) for side in ("left", "right"))
            if rows := [row for row in order[first:last].tolist() if self._prompts[row].id == known]:
                return rows
        return []

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self))
        return permutation(len(self), self._seed, epoch)


def _hash(name: str) -> np.uint64:
    return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), np.uint64)[0]


def _unpacked(text: object, count: int) -> np.ndarray | None:
    """Returns the flags, bool [count], that `state` packed: all False for an empty text, None for an invalid one."""
    if text == "":
        return np.zeros(count, bool)
    try:
        bits = np.frombuffer(zlib.decompress(b64decode(str(text), validate=True)), np.uint8)
    except (ValueError, zlib.error):
        return None
    return np.unpackbits(bits, count=count).astype(bool) if len(bits) == -(-count // 8) else None
