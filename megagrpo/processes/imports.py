"""Imports of large packages without garbage collection: collections cost a quarter of their time, and free nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disables garbage collection inside the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
