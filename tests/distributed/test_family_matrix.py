"""Logits and gradients of every family, in layouts and seeds, are those of transformers on each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.families import read_architecture
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS, soak
from tests.distributed.parity_ranks import logits_and_gradients
from tests.distributed.step_case import assemble, in_checkpoint, relative
from tests.distributed.test_parity_logits import assemble as assemble_logits
from tests.rank_group import run_ranks
from tests.tiny_models import COMPOSITES, DELTA_NET_FAMILIES, DIMENSIONS, OTHER_FAMILIES, TINY_FAMILIES, reference_model

GENERATOR = np.random.default_rng(3)
MICROBATCHES = [
    [GENERATOR.integers(0, DIMENSIONS["vocab_size"], length).tolist() for length in lengths]
    for lengths in ([17, 1, 40, 3], [70, 2, 9, 5])
]
SEQUENCES = [tokens for microbatch in MICROBATCHES for tokens in microbatch]
LIMITS = 2e-5, 1e-5
"""Distances of logits, and of gradients; of delta nets up to twice the distances of transformers' own float32."""
LONG = ("all", "unequal, context, expert", "expert over tensor")
"""Rows in which every axis is more than one rank, and that together tell most axes apart."""
MORE_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
"""Heads of delta nets that divide over tensor and context ranks."""
ONE_NORM_OF_ALL_KEYS = {"num_attention_heads": 8, "num_key_value_heads": 4}
CHANGES: dict[str, dict[str, Any]] = dict.fromkeys(DELTA_NET_FAMILIES, MORE_HEADS)
CHANGES |= dict.fromkeys(("olmo2", "olmo3", "minimax_m2"), ONE_NORM_OF_ALL_KEYS)


@dataclass(frozen=True)
class Reference:
    """transformers' logits of each sequence, in float32, and gradients by name in the checkpoint, in float64."""

    logits: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    of_float32: tuple[float, float]
    """Distances of its float32 from its float64, of logits and of gradients."""


@contextmanager
def in_float64() -> Iterator[None]:
    """transformers computes norms, routers, rotary angles and delta nets in float32, whatever the model's dtype."""
    with patch.object(torch, "float32", torch.float64), patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


@cache
def reference(directory: Path) -> Reference:
    logits, gradients = passes(directory, reference_model(directory))
    model = reference_model(directory).double()
    with in_float64():
        wide_logits, wide_gradients = passes(directory, model)
    apart = distance_of_logits(logits, wide_logits), distance_of_gradients(gradients, wide_gradients)
    return Reference(logits, wide_gradients, apart)


def passes(directory: Path, model: torch.nn.Module) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    found = []
    for tokens in SEQUENCES:
        ids = torch.tensor([tokens])
        logits = model(ids).logits[0]
        torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None]).sum().neg().backward()
        found.append(logits.detach().numpy())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, in_checkpoint(read_architecture(directory))(gradients)


def distance_of_logits(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    return float(max(np.abs(a - b).max() for a, b in zip(got, wanted, strict=True)))


def distance_of_gradients(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The largest, relative to the largest gradient of its tensor."""
    assert got.keys() == wanted.keys()
    return float(max(relative(got[name], value) for name, value in wanted.items()))


@dataclass(frozen=True)
class Distances:
    logits: float
    gradients: float
    wanted: Reference


def distances(tiny: Tiny, name: str, families: Sequence[str], seeds: Sequence[int]) -> dict[str, list[Distances]]:
    """By family, for each seed."""
    found: dict[str, list[Distances]] = {family: [] for family in families}
    row, by_layout = ROWS[name], dict[ParallelLayout, list[str]]()
    for family in families:
        by_layout.setdefault(row.of(family), []).append(family)
    for layout, alike in by_layout.items():
        models = [(f, tiny(f, seed=seed, **changes(f, row.layers))) for f in alike for seed in seeds]
        directories = [directory for _, directory in models]
        answers = run_ranks(layout.ranks, logits_and_gradients, directories, layout, MICROBATCHES)
        for (family, directory), of_ranks in zip(models, zip(*answers, strict=True), strict=True):
            wanted = reference(directory)
            logits = distance_of_logits(assemble_logits([its for its, _ in of_ranks], layout, SEQUENCES), wanted.logits)
            gradients = distance_of_gradients(assemble([parts for _, parts in of_ranks]), wanted.gradients)
            found[family].append(Distances(logits, gradients, wanted))
    return found


def changes(family: str, layers: int) -> dict[str, Any]:
    kinds = TINY_FAMILIES[COMPOSITES.get(family, family)][1].get("layer_types")
    more = {"num_hidden_layers": layers} if layers != 4 else {}
    return CHANGES.get(family, {}) | more | ({"layer_types": (kinds * 2)[:layers]} if kinds and more else {})


def check(tiny: Tiny, name: str, families: Sequence[str], seeds: Sequence[int] = (0,)) -> None:
    found = distances(tiny, name, families, seeds)
    theirs = [its.wanted.of_float32 for family in found if family in DELTA_NET_FAMILIES for its in found[family]]
    of_delta_nets = [max(limit, 2 * max(its)) for limit, its in zip(LIMITS, zip(*theirs, strict=True), strict=True)]
    wrong = {}
    for family, of_seeds in found.items():
        worst = max(its.logits for its in of_seeds), max(its.gradients for its in of_seeds)
        limits = of_delta_nets if family in DELTA_NET_FAMILIES else LIMITS
        if not all(value <= limit for value, limit in zip(worst, limits, strict=True)):
            wrong[family] = worst, limits
    assert not wrong


@pytest.mark.parametrize("name", ["one rank", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_every_kind_of_part_agrees_with_transformers(name: str, tiny: Tiny) -> None:
    check(tiny, name, OTHER_FAMILIES)


@pytest.mark.parametrize("name", soak(*ROWS))
def test_every_family_agrees_with_transformers_in_three_seeds(name: str, tiny: Tiny) -> None:
    check(tiny, name, [*TINY_FAMILIES, *COMPOSITES], seeds=(0, 1, 2))
