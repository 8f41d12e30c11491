"""What must not change any number: the other sequences of a microbatch, and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import Microbatch
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import model, process
from megagrpo.megatron.attention import PackedAttention
from megagrpo.megatron.batch import NO_ROW, PackedTensors, pack
from tests.distributed.conftest import Tiny
from tests.distributed.parity_ranks import load_model, logits_of, rank_microbatches, run_schedule
from tests.rank_group import run_ranks
from tests.tiny_models import DIMENSIONS

LENGTHS = [17, 1, 40, 3, 2, 31, 17, 18]
GENERATOR = np.random.default_rng(1)
SEQUENCES = [GENERATOR.integers(0, DIMENSIONS["vocab_size"], n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("context", [1, 2])
def test_perturbing_one_sequence_leaves_the_others_logits_as_they_are(tiny: Tiny, context: int) -> None:
    layout = ParallelLayout(context=context)
    for before, after, rows in run_ranks(context, perturb, tiny("qwen3"), layout):
        others = (rows != 2) & (rows != NO_ROW)
        assert np.array_equal(before[others], after[others])
        # The first two tokens of the perturbed sequence stand before the change, the rest see it.
        assert np.abs(before - after)[rows == 2].max() > 0.1


def perturb(directory: Path, layout: ParallelLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    process.start_parallel(layout, seed=1)
    (chunk,), _ = load_model(directory, layout, torch.float32)
    changed = [list(tokens) for tokens in SEQUENCES]
    changed[2][2] = (changed[2][2] + 1) % DIMENSIONS["vocab_size"]
    with torch.no_grad():
        packs = [rank_microbatches(layout, [sequences])[0] for sequences in (SEQUENCES, changed)]
        before, after = (logits_of(chunk, model.output_of(chunk, packed)).numpy() for packed in packs)
    return before, after, packs[0].rows.numpy()


def test_a_microbatch_without_sequences_runs_and_has_no_gradient_of_its_own(tiny: Tiny) -> None:
    layout = ParallelLayout(tensor=2, expert_tensor=2)
    assert run_ranks(2, run_empty, tiny("qwen3_moe"), layout) == [True, True]


def run_empty(directory: Path, layout: ParallelLayout) -> bool:
    process.start_parallel(layout, seed=1)
    (chunk,), _ = load_model(directory, layout, torch.float32)
    packed = pack(Microbatch(()), layout=layout, context_rank=0, device="cpu")
    logits = logits_of(chunk, model.output_of(chunk, packed))
    (logits[packed.mask].sum() + 0 * logits.sum()).backward()
    return all(p.grad is None or not p.grad.any() for p in chunk.parameters())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, expert_tensor=2)], ids=str
)
def test_recomputation_changes_no_gradient(tiny: Tiny, family: str, layout: ParallelLayout) -> None:
    for none, selective, full in run_ranks(layout.ranks, recompute, tiny(family), layout):
        assert none["loss"] == selective["loss"] == full["loss"]
        assert none["gradients"].keys() == selective["gradients"].keys() == full["gradients"].keys()
        for name, gradient in none["gradients"].items():
            assert np.abs(gradient).max() > 0, name
            assert np.array_equal(gradient, selective["gradients"][name]), name
            assert np.array_equal(gradient, full["gradients"][name]), name
        # It did recompute: the attention core ran twice.
        assert none["attentions"] > 0
        assert selective["attentions"] == full["attentions"] == 2 * none["attentions"]


def recompute(directory: Path, layout: ParallelLayout) -> list[dict[str, Any]]:
    process.start_parallel(layout, seed=1)
    return [_loss_and_gradients(directory, layout, mode) for mode in ("none", "selective", "full")]


def _loss_and_gradients(directory: Path, layout: ParallelLayout, mode: str) -> dict[str, Any]:
    chunks, _ = load_model(directory, layout, torch.float32, recompute=mode)
    losses = []

    def forward_step(batches: Iterator[PackedTensors], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        packed = next(batches)

        def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            value = logits_of(chunk, hidden)[packed.mask].sin().sum()  # any function of the logits
            losses.append(value.item())
            return value, torch.tensor(1, dtype=torch.int), {}

        return model.output_of(chunk, packed), loss

    with count_calls(PackedAttention) as calls:
        run_schedule(
            chunks, forward_step, rank_microbatches(layout, [SEQUENCES[:4], SEQUENCES[4:]]), forward_only=False
        )
    gradients = {
        f"{index}.{name}": parameter.grad.numpy()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    return {"loss": losses, "gradients": gradients, "attentions": len(calls)}


@pytest.mark.parametrize("context", [2, 4])
def test_context_ranks_add_up_to_the_gradients_of_one_rank(tiny: Tiny, context: int) -> None:
    (whole,) = run_ranks(1, gradients, tiny("qwen3"), ParallelLayout())
    parts = run_ranks(context, gradients, tiny("qwen3"), ParallelLayout(context=context))
    for name, wanted in whole.items():
        got = sum(part[name] for part in parts)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


def gradients(directory: Path, layout: ParallelLayout) -> dict[str, np.ndarray]:
    process.start_parallel(layout, seed=1)
    return _loss_and_gradients(directory, layout, "none")["gradients"]


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
