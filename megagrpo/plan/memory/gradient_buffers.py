"""Megatron's buffers of gradients, and of parameters with the distributed optimizer: padding and shares, as arithmetic.

After megatron.core 0.16: distributed/param_and_grad_buffer.py (_ParamAndGradBuffer) and optimizer/distrib_optimizer.py
(_build_model_gbuf_range). Gradients are not reduced while others are computed, so a buffer is one bucket, except that a
tied embedding over pipeline stages has its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True)
class Run:
    """Parameters one after another, `times` over: their elements."""

    elements: tuple[int, ...]
    times: int = 1

    @property
    def total(self) -> int:
        return sum(self.elements) * self.times

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Of each parameter, and of the next repetition, with every parameter aligned."""
        return tuple(accumulate((_up(size, PARAMETER_ALIGNMENT) for size in self.elements), initial=0))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Elements of the parameters before each."""
        return tuple(accumulate(self.elements, initial=0))

    @property
    def span(self) -> int:
        return self.starts[-1] * self.times

    def elements_before(self, at: int) -> int:
        """Elements that lie before position `at`, which is at least 0, not counting what aligns them."""
        if at >= self.span:
            return self.total
        times, rest = divmod(at, self.starts[-1])
        index = bisect_right(self.starts, rest) - 1
        of_last = min(rest - self.starts[index], self.elements[index])
        return times * self.before[-1] + self.before[index] + of_last


@dataclass(frozen=True)
class Bucket:
    """Runs in the order of the buffer, which is that of the backward pass: the model's last parameter first."""

    runs: tuple[Run, ...]

    @property
    def total(self) -> int:
        return sum(run.total for run in self.runs)

    def padded(self, ranks: int) -> int:
        """Its size with the distributed optimizer over `ranks` data ranks."""
        # A gap that aligns a next parameter does not follow the last; it never matters, as the end is aligned further.
        return _up(sum(run.span for run in self.runs), lcm(ranks, BUCKET_ALIGNMENT))

    def share(self, rank: int, ranks: int) -> int:
        """Elements, without padding, of which the `rank`-th data rank has the optimizer's state."""
        part = self.padded(ranks) // ranks
        return self._elements_before((rank + 1) * part) - self._elements_before(rank * part)

    def _elements_before(self, at: int) -> int:
        found = 0
        for run in self.runs:
            if at <= 0:
                break
            found += run.elements_before(at)
            at -= run.span
        return found


@dataclass(frozen=True)
class Buffer:
    """One of a model chunk's, of one dtype. `over_experts`: reduced over expert_data ranks, not data x context."""

    buckets: tuple[Bucket, ...]
    dtype: str
    over_experts: bool = False


def reversed_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """From the order of the model to that of a buffer, without empty ones."""
    return tuple(Run(run.elements[::-1], run.times) for run in reversed(runs) if run.elements and run.times)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
