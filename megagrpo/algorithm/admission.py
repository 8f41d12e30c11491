"""Which prompts may begin, and which groups a step trains on: staleness is bounded before anything is sampled.

A step trains the weights of version step - 1 into version step. The staleness of a group is that version, step - 1,
minus the version that was the newest when the group began. A prompt begins only if its group can still be trained
within `max_staleness` (AReaL, arXiv:2505.24298, eq. 3): so nothing that was sampled is thrown away, and long responses
are trained as often as short ones (the invariant of Magistral, arXiv:2506.10910, section 4). Only with `spare` groups
begin that no step will train on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass
class Admitted:
    """A group that has begun and that no step has taken. `number` counts all groups of a run in the order of their
    beginning; `version` was the newest when it began; `last_step` is the last one that may train on it."""

    number: int
    version: int
    last_step: int
    complete: bool = False


class Admission:
    """The rule, without a clock and without samples.

    Invariant: for every step s to come, the groups that must be trained by step s are at most `per_step` for each step
    until then. So every group can be trained in time, if the groups of each step are the oldest that are complete.
    """

    def __init__(
        self,
        *,
        per_step: int,
        max_staleness: int,
        at_once: int,
        steps: int,
        step: int = 0,
        number: int = 0,
        spare: int = 0,
    ) -> None:
        """per_step: groups that a step trains on. at_once: most groups that have begun and are not taken, at least
        per_step. steps: of the whole run; no group begins that none of them would train on. step: steps that are done.
        number: of the first group that begins. spare: groups that may begin beyond those that can be trained; what a
        step does not take is to be dropped."""
        self.spare = spare
        self.per_step, self.max_staleness, self.at_once, self.steps = per_step, max_staleness, at_once, steps
        self.version = step
        """The newest weights that engines sample with."""
        self.taken_steps = step
        """Steps whose groups have been taken."""
        self.next_number = number
        self.waiting: dict[int, Admitted] = {}
        """By number, oldest first."""

    @property
    def room(self) -> int:
        """Groups that may begin now."""
        last = min(self.version + self.max_staleness + 1, self.steps)
        places = self.per_step * max(0, last - self.taken_steps)
        places += self.spare if places else 0
        return max(0, min(places, self.at_once) - len(self.waiting))

    def admit(self) -> Admitted:
        """The next group begins. Only if there is room."""
        admitted = Admitted(self.next_number, self.version, self.version + self.max_staleness + 1)
        self.waiting[admitted.number] = admitted
        self.next_number += 1
        return admitted

    def readmit(self, number: int, version: int) -> Admitted:
        """A group goes on that began before the run was continued, with this version. The oldest comes first. If
        max_staleness has been lowered meanwhile, it may become older than that."""
        soonest = self.taken_steps + 1 + len(self.waiting) // self.per_step
        admitted = Admitted(number, version, max(version + self.max_staleness + 1, soonest))
        self.waiting[number] = admitted
        return admitted

    def complete(self, number: int) -> None:
        """All samples of this group are there."""
        self.waiting[number].complete = True

    def drop(self, number: int) -> None:
        """No step trains on this group: it teaches nothing. Another may begin in its place."""
        del self.waiting[number]

    def take(self) -> list[Admitted] | None:
        """The groups of the next step, oldest first; None: it must wait for one that is not complete.

        They are the oldest complete ones. It waits while fewer than `per_step` are complete, or while so many older
        ones are not complete that they could not all be trained in time afterwards.
        """
        chosen = self._oldest_complete()
        step = self.taken_steps + 1
        if len(chosen) < self.per_step or not (self.spare or self._in_time(step, chosen)):
            return None
        for admitted in chosen:
            del self.waiting[admitted.number]
        self.taken_steps = step
        return chosen

    def advance(self, version: int) -> None:
        """Engines sample with this version from now on."""
        self.version = version

    def _oldest_complete(self) -> list[Admitted]:
        complete = [admitted for admitted in self.waiting.values() if admitted.complete]
        return complete[: self.per_step]

    def _in_time(self, step: int, chosen: Iterable[Admitted]) -> bool:
        """Whether all others can be trained in time after this step has trained on `chosen`."""
        due = Counter(admitted.last_step for admitted in self.waiting.values())
        due.subtract(admitted.last_step for admitted in chosen)
        lasts = sorted(due)
        by_then = accumulate(due[last] for last in lasts)
        return all(count <= self.per_step * (last - step) for last, count in zip(lasts, by_then, strict=True))
