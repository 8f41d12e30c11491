"""Floating-point operations of a forward pass over a sequence, by its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Work:
    """The operations of a forward pass: linear x length + quadratic x length^2. A backward pass takes twice as many."""

    linear: float
    quadratic: float
    windows: tuple[tuple[int, float], ...] = ()
    """Windows of attention, each with a quadratic term of its own: that of sequences no longer than the window."""

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the operations for lengths in tokens, float64 [sequences]."""
        seen = sum(quadratic * seen_share(window, lengths) for window, quadratic in self.windows)
        return lengths * (self.linear + (self.quadratic + seen) * lengths)


def seen_share(window: int, length: Any) -> Any:
    """Returns the share of a sequence's pairs of tokens that attention within a window sees: all but a triangle."""
    return 1 - np.maximum(0, 1 - window / length) ** 2


TOKENS = Work(linear=1.0, quadratic=0.0)
"""Counts tokens, for when the model doesn't matter."""


def head_work(arch: Architecture) -> float:
    """Returns the operations of the output layer, or of a critic's value head, per token that it sees."""
    return 2.0 * arch.hidden * (1 if arch.value_head else arch.vocab)


def work_of(arch: Architecture) -> Work:
    """Returns the work of the whole model, with the output layer at every token."""
    works = [(kind.work(), count, kind.attention.window) for kind, count in arch.kinds.items()]
    linear = sum(count * work.linear for work, count, _ in works)
    windows = tuple((window, count * work.pairs) for work, count, window in works if window is not None)
    quadratic = sum(count * work.pairs for work, count, window in works if window is None)
    return Work(linear + head_work(arch), quadratic, windows)
