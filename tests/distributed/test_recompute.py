"""Recomputation, and a microbatch without sequences, change no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.recipe.schema.train import RecomputeConfig, RecomputeModule
from tests.distributed.conftest import Tiny
from tests.distributed.parity_ranks import load_model, logits_of, rank_microbatches
from tests.distributed.step_ranks import Parts, gradients_of
from tests.rank_group import run_ranks
from tests.tiny_models import DIMENSIONS

GENERATOR = np.random.default_rng(1)
SEQUENCES = [GENERATOR.integers(0, DIMENSIONS["vocab_size"], n).tolist() for n in [17, 1, 40, 3, 2, 31, 17, 18]]
MODULES: dict[str, list[RecomputeModule]] = {
    "qwen3": ["layernorm", "mlp"],
    "qwen3_moe": ["layernorm", "moe"],
    "deepseek_v3": ["mla_up_proj", "mlp", "shared_experts"],
}
Mode = str | RecomputeConfig


def modes_of(family: str) -> list[Mode]:
    modules = RecomputeConfig(modules=MODULES[family])
    return ["none", "selective", "full", RecomputeConfig(layers=1), modules]


def losses_and_gradients(
    directory: Path, layout: ParallelLayout, microbatches: list[list[list[int]]], mode: Mode
) -> tuple[list[float], Parts, int]:
    """Losses and gradients for some function of the logits, and how often modules ran."""
    trained = load_model(directory, layout, recompute=mode)
    packed, losses = rank_microbatches(layout, microbatches), []

    def loss(index: int, hidden: torch.Tensor) -> torch.Tensor:
        value = logits_of(trained.chunks[-1], hidden)[packed[index].responses[0].positions].sin().sum()
        losses.append(value.item())
        return value

    with count_calls() as calls:
        trained.compute_gradients(packed, loss)
    return losses, gradients_of(trained), len(calls)


@contextmanager
def count_calls() -> Iterator[list[None]]:
    calls: list[None] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


def in_every_mode(
    directory: Path, layout: ParallelLayout, microbatches: list[list[list[int]]], modes: list[Mode]
) -> list[tuple[list[float], Parts, int]]:
    process.start_parallel(layout, seed=1)
    return [losses_and_gradients(directory, layout, microbatches, mode) for mode in modes]


WHOLE, CUT = ParallelLayout(), ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, expert_tensor=2)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", WHOLE), ("qwen3_moe", WHOLE), ("deepseek_v3", WHOLE), ("qwen3", CUT), ("qwen3_moe", CUT)],
    ids=str,
)
def test_recomputation_changes_no_gradient(tiny: Tiny, family: str, layout: ParallelLayout) -> None:
    arguments = tiny(family), layout, [SEQUENCES[:4], SEQUENCES[4:]], modes_of(family)
    for (losses, wanted, calls), *others in run_ranks(layout.ranks, in_every_mode, *arguments):
        assert all(np.abs(values).max() > 0 for _, values in wanted)
        for number, (other_losses, found, other_calls) in enumerate(others, start=1):
            assert other_losses == losses
            assert other_calls > calls  # it did recompute
            for (box, got), (other_box, values) in zip(found, wanted, strict=True):
                assert box == other_box
                # A part of a layer that is made again adds its gradient to the residual's in another order.
                tolerance = 4e-6 * np.abs(values).max() if number == len(others) else 0.0
                assert np.abs(got - values).max() <= tolerance, box


def test_a_microbatch_without_sequences_runs_and_has_no_gradient_of_its_own(tiny: Tiny) -> None:
    layout = ParallelLayout(tensor=2, expert_tensor=2)
    for modes in run_ranks(2, in_every_mode, tiny("qwen3_moe"), layout, [[]], modes_of("qwen3_moe")):
        assert not any(values.any() for _, parts, _ in modes for _, values in parts)
