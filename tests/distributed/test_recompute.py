"""What must not change a gradient: recomputation, and a microbatch without sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.megatron.attention import PackedAttention
from tests.distributed.conftest import Tiny
from tests.distributed.parity_ranks import load_model, logits_of, rank_microbatches
from tests.distributed.step_ranks import Parts, gradients_of
from tests.rank_group import run_ranks
from tests.tiny_models import DIMENSIONS

GENERATOR = np.random.default_rng(1)
SEQUENCES = [GENERATOR.integers(0, DIMENSIONS["vocab_size"], n).tolist() for n in [17, 1, 40, 3, 2, 31, 17, 18]]
MODES = ("none", "selective", "full")


def losses_and_gradients(
    directory: Path, layout: ParallelLayout, microbatches: list[list[list[int]]], mode: str
) -> tuple[list[float], Parts, int]:
    """Losses and gradients for some function of the logits, and how often the attention core ran."""
    trained = load_model(directory, layout, recompute=mode)
    packed, losses = rank_microbatches(layout, microbatches), []

    def loss(index: int, hidden: torch.Tensor) -> torch.Tensor:
        value = logits_of(trained.chunks[-1], hidden)[packed[index].mask].sin().sum()
        losses.append(value.item())
        return value

    with count_calls(PackedAttention) as calls:
        trained.compute_gradients(packed, loss)
    return losses, gradients_of(trained), len(calls)


@contextmanager
def count_calls(kind: type[torch.nn.Module]) -> Iterator[list[None]]:
    calls: list[None] = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: calls.append(None) if isinstance(module, kind) else None
    )
    try:
        yield calls
    finally:
        hook.remove()


def in_every_mode(
    directory: Path, layout: ParallelLayout, microbatches: list[list[list[int]]]
) -> list[tuple[list[float], Parts, int]]:
    process.start_parallel(layout, seed=1)
    return [losses_and_gradients(directory, layout, microbatches, mode) for mode in MODES]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, expert_tensor=2)], ids=str
)
def test_recomputation_changes_no_gradient(tiny: Tiny, family: str, layout: ParallelLayout) -> None:
    microbatches = [SEQUENCES[:4], SEQUENCES[4:]]
    for (losses, wanted, attentions), *others in run_ranks(
        layout.ranks, in_every_mode, tiny(family), layout, microbatches
    ):
        assert attentions > 0
        assert all(np.abs(values).max() > 0 for _, values in wanted)
        for other_losses, found, other_attentions in others:
            assert other_losses == losses
            assert other_attentions == 2 * attentions  # it did recompute: the attention core ran twice
            for (box, got), (other_box, values) in zip(found, wanted, strict=True):
                assert box == other_box
                assert np.array_equal(got, values), box


def test_a_microbatch_without_sequences_runs_and_has_no_gradient_of_its_own(tiny: Tiny) -> None:
    layout = ParallelLayout(tensor=2, expert_tensor=2)
    for modes in run_ranks(2, in_every_mode, tiny("qwen3_moe"), layout, [[]]):
        assert not any(values.any() for _, parts, _ in modes for _, values in parts)
