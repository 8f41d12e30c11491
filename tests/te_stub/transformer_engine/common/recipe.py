"""Recipes of low precision. Here they are data only: products stay in the tensors' own precision."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __init__(self, **options: Any) -> None:  # QUIRK: options that it does not know are no error
        for name, value in options.items():
            setattr(self, name, value)


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3


@dataclass
class MXFP8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3


@dataclass
class NVFP4BlockScaling(Recipe):
    pass
