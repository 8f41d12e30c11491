"""The rules for the prompts that may begin and the groups that a step trains on. They bound staleness before sampling.

A step trains the weights of version step - 1 into version step. The staleness of a group is that version, step - 1,
minus the version that was the newest when the group began. A prompt begins only if its group can still be trained
within `max_staleness` (AReaL, arXiv:2505.24298, eq. 3): so nothing that was sampled is thrown away, and long responses
are trained as often as short ones (the invariant of Magistral, arXiv:2506.10910, section 4). Groups that no
step will train on begin only with `spare`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


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
        """Starts without groups. per_step: groups that a step trains on. at_once: most groups that have begun and are
        not taken, at least per_step. steps: of the whole run; a group begins only if one of them would train on it.
        step: finished steps. number: of the first group that begins. spare: groups that may begin beyond those that
        can be trained; the caller must drop groups that a step leaves behind."""
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
        """Returns the number of groups that may begin now."""
        last = min(self.version + self.max_staleness + 1, self.steps)
        places = self.per_step * max(0, last - self.taken_steps)
        places += self.spare if places else 0
        return max(0, min(places, self.at_once) - len(self.waiting))

    def admit(self) -> Admitted:
        """Begins the next group. Call it only if there is room."""
        admitted = Admitted(self.next_number, self.version, self.version + self.max_staleness + 1)
        self.waiting[admitted.number] = admitted
        self.next_number += 1
        return admitted

    def readmit(self, number: int, version: int) -> Admitted:
        """Resumes a group that began with this version before the run was continued. Call it for the oldest first. If
        max_staleness has been lowered meanwhile, the group may become older than that."""
        soonest = self.taken_steps + 1 + len(self.waiting) // self.per_step
        admitted = Admitted(number, version, max(version + self.max_staleness + 1, soonest))
        self.waiting[number] = admitted
        return admitted

    def complete(self, number: int) -> None:
        """Marks this group as complete: all its samples have arrived."""
        self.waiting[number].complete = True

    def drop(self, number: int) -> None:
        """Drops this group: it teaches nothing, so no step trains on it. Another may begin in its place."""
        del self.waiting[number]

    def take(self) -> list[Admitted] | None:
        """Returns the groups of the next step, oldest first; None while it must wait for a group that is not complete.

        They are the oldest complete ones. It waits while fewer than `per_step` are complete, or while so many older
        ones are not complete that they could not all be trained in time afterwards.
        """
        chosen = [admitted for admitted in self.waiting.values() if admitted.complete][: self.per_step]
        step = self.taken_steps + 1
        if len(chosen) < self.per_step or not (self.spare or self._in_time(step, chosen)):
            return None
        for admitted in chosen:
            del self.waiting[admitted.number]
        self.taken_steps = step
        return chosen

    def advance(self, version: int) -> None:
        """Sets the version with which engines sample from now on."""
        self.version = version

    def _in_time(self, step: int, chosen: Iterable[Admitted]) -> bool:
        """Returns whether all other groups can still be trained in time after this step has trained on `chosen`."""
        due = Counter(admitted.last_step for admitted in self.waiting.values())
        due.subtract(admitted.last_step for admitted in chosen)
        lasts = sorted(due)
        by_then = accumulate(due[last] for last in lasts)
        return all(count <= self.per_step * (last - step) for last, count in zip(lasts, by_then, strict=True))


def lengths_of_begun(ended: Sequence[int], cut: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns sorted lengths, and the share of each in all responses that began, float64 [responses].

    A response that was cut has sampled a part of its unknown length. So lengths are estimated like lifetimes of which
    some have not ended (Kaplan and Meier, 1958). cut: tokens of cut responses. Those that are cut beyond the last end
    count with the tokens of the longest; they would be longer.
    """
    lengths, has_ended = np.array([*ended, *cut], np.int64), np.arange(len(ended) + len(cut)) < len(ended)
    order = np.lexsort((~has_ended, lengths))
    at_least = np.arange(len(order), 0, -1)  # responses that are at least as long
    longer = np.cumprod(1 - has_ended[order] / at_least)
    shares = -np.diff(longer, prepend=1.0)
    shares[-1] += longer[-1]
    return lengths[order], shares


def cut_metrics(trained: Sequence[int], ended: Sequence[int], cut: Sequence[int]) -> dict[str, float]:
    """Computes metrics of a step that drops its slowest responses, among them their length bias, from the tokens of its
    responses. ended, cut: the responses that ended, and that were cut. trained: the responses used for the update;
    some may have finish abort."""
    lengths, shares = lengths_of_begun(ended, cut)
    mean, begun_mean, tokens = float(np.mean(trained)), float(lengths @ shares), float(lengths.sum())
    return {
        "cut/samples": float(len(lengths) - len(trained)),
        "cut/tokens_share": 1 - sum(trained) / tokens if tokens else 0.0,
        "cut/trained_tokens_mean": mean,
        "cut/trained_tokens_p90": float(np.quantile(trained, 0.9, method="inverted_cdf")),
        "cut/begun_tokens_mean": begun_mean,
        "cut/begun_tokens_p90": float(lengths[np.searchsorted(np.cumsum(shares), 0.9 - 1e-9)]),
        "cut/bias": 1 - mean / begun_mean if begun_mean else 0.0,
    }
