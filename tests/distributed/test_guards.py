"""Computations that go wrong without an error: each test shows the failure, and that ours does not have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.megatron.config import option_problems
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from tests.distributed.conftest import Tiny
from tests.distributed.parity_ranks import load_model, logits_of, rank_microbatches
from tests.rank_group import run_ranks
from tests.tiny_models import DIMENSIONS

VOCAB = DIMENSIONS["vocab_size"]
MICROBATCHES = [[np.random.default_rng(seed).integers(0, VOCAB, 24).tolist()] for seed in range(4)]


# --- interleaved pipeline stages --------------------------------------------------------------------------------------


def test_interleaved_stages_need_overlapped_communication(tiny: Tiny) -> None:
    directory = tiny("qwen2")
    layout = ParallelLayout(pipeline=2, virtual_pipeline=2)
    (right,) = run_ranks(1, gradient_norms, directory, ParallelLayout(), {})
    ours = run_ranks(2, gradient_norms, directory, layout, {})
    # Megatron's own default communication, and the fixed lengths that go with it.
    defaults = {"overlap_p2p_comm": False, "batch_p2p_comm": True, "variable_seq_lengths": False}
    theirs = run_ranks(2, gradient_norms, directory, layout, defaults)
    assert np.hypot(*ours) == pytest.approx(right, rel=1e-5)
    assert np.hypot(*theirs) != pytest.approx(right, rel=0.01)
    for option in ("overlap_p2p_comm", "batch_p2p_comm"):
        assert option_problems({option: defaults[option]})


def gradient_norms(directory: Path, layout: ParallelLayout, changes: dict[str, Any]) -> float:
    process.start_parallel(layout, seed=1)
    model = load_model(directory, layout)
    for name, value in changes.items():
        setattr(model.chunks[0].config, name, value)
    model.compute_gradients(
        rank_microbatches(layout, MICROBATCHES), lambda _, hidden: logits_of(model.chunks[-1], hidden).sin().sum()
    )
    return float(sum(p.main_grad.square().sum() for chunk in model.chunks for p in chunk.parameters()) ** 0.5)


# --- Megatron's cross-entropies ---------------------------------------------------------------------------------------


def test_logprobs_leave_the_logits_alone_and_have_exact_gradients() -> None:
    (errors,) = run_ranks(1, cross_entropy_errors)
    assert errors["megatron changed its logits by"] > 0.1
    assert errors["ours changed its logits by"] == 0
    assert errors["fused gradient is wrong by"] > 1e-4
    assert errors["our gradient is wrong by"] < 1e-6
    assert option_problems({"cross_entropy_loss_fusion": True})


def cross_entropy_errors() -> dict[str, float]:
    process.start_parallel(ParallelLayout(), seed=1)
    torch.manual_seed(0)
    original, labels = torch.randn(64, VOCAB) * 3, torch.randint(0, VOCAB, (64,))
    group = parallel_state.get_tensor_model_parallel_group()

    def gradient(logprobs: Any) -> tuple[torch.Tensor, float]:
        leaf = original.clone().requires_grad_()
        logits = leaf * 1.0  # what a model would hand over
        logprobs(logits).sum().backward()
        return leaf.grad, float((logits.detach() - original).abs().max())

    def ours(logits: torch.Tensor) -> torch.Tensor:
        shard = VocabularyShard(vocab=VOCAB, first=0, group=None)
        identity = torch.eye(VOCAB)  # an output matrix that makes logits of themselves
        head = Head(identity, shard, HeadScale())
        return vocabulary_logprobs(logits, torch.arange(64), labels, head, entropy=False)[0]

    exact, _ = gradient(lambda logits: logits.double().log_softmax(-1).gather(1, labels[:, None]))
    _, changed_by_megatron = gradient(lambda logits: -vocab_parallel_cross_entropy(logits[:, None], labels[:, None]))
    fused, _ = gradient(lambda logits: -fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], group))
    own, changed_by_ours = gradient(ours)
    return {
        "megatron changed its logits by": changed_by_megatron,
        "ours changed its logits by": changed_by_ours,
        "fused gradient is wrong by": float((fused - exact).abs().max()),
        "our gradient is wrong by": float((own - exact).abs().max()),
    }
