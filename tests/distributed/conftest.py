"""Models and batches that the tests of training ranks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.step_case import VOCAB, Case, make_case
from tests.tiny_models import make_model

Tiny = Callable[..., Path]
CaseOf = Callable[..., Case]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The directory of a random model: tiny(family, **changes of its config), made when it is first asked for."""
    root = tmp_path_factory.mktemp("tiny")

    def made(family: str, **changes: Any) -> Path:
        name = "-".join([family, *(f"{key}={value}" for key, value in changes.items())])
        return make_model(family, root / name, **changes)

    return made


@pytest.fixture(scope="session")
def case_of(tiny: Tiny) -> CaseOf:
    """A batch for such a model: case_of(family, **changes of its config)."""
    return cache(lambda family, **changes: make_case(tiny(family, **changes)))


@pytest.fixture(scope="session")
def teacher(tiny: Tiny) -> Path:
    """Another family and width than the policy's; its vocabulary has three more rows."""
    return tiny("llama", hidden_size=64, num_attention_heads=8, vocab_size=VOCAB + 3)
