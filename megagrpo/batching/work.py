"""Floating-point operations of a forward pass over a sequence, by its length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Work:
    """The operations of a forward pass: linear x length + quadratic x length^2. A backward pass takes twice as many."""

    linear: float
    quadratic: float

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the operations for lengths in tokens, float64 [sequences]."""
        return lengths * (self.linear + self.quadratic * lengths)


TOKENS = Work(linear=1.0, quadratic=0.0)
"""Counts tokens, for when the model doesn't matter."""


def head_work(arch: Architecture) -> float:
    """Returns the operations of the output layer, or of a critic's value head, per token that it sees."""
    return 2.0 * arch.hidden * (1 if arch.value_head else arch.vocab)


def work_of(arch: Architecture) -> Work:
    """Returns the work of the whole model, with the output layer at every token."""
    works = [(kind.work(), count) for kind, count in arch.kinds.items()]
    linear = sum(count * work.linear for work, count in works)
    return Work(linear + head_work(arch), sum(count * work.pairs for work, count in works))
