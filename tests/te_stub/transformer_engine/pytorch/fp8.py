"""Autocast to fp8, as far as layers ask for it. The real autocast also quantises; this one only switches the layers'
refusals on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FP8GlobalStateManager:
    FP8_ENABLED = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    before, FP8GlobalStateManager.FP8_ENABLED = FP8GlobalStateManager.FP8_ENABLED, enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.FP8_ENABLED = before


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    if enabled:
        raise NotImplementedError("the stub has no fp8 weights")
    yield
