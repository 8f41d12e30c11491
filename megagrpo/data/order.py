"""Seeded order that never changes: the same key gives the same permutation on every machine and numpy version."""

from __future__ import annotations

import numpy as np


def permutation(size: int, *key: int) -> np.ndarray:
    """int64 [size], a permutation of 0..size-1 drawn from `key`.

    Sorts raw 64-bit draws: numpy promises the bit stream of PCG64, but not the algorithm of Generator.permutation.
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(size), kind="stable")
