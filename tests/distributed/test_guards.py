"""Computations that go wrong without an error: each test shows the failure, and that ours does not have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import model, process
from megagrpo.megatron.logprob import VocabularyShard, vocabulary_logprobs
from megagrpo.megatron.optimizer import make_optimizer, set_learning_rate, wrap_chunks
from megagrpo.megatron.options import option_problems
from megagrpo.recipe.schema import OptimizerConfig
from tests.distributed.parity_ranks import load_model, logits_of, rank_microbatches, run_schedule
from tests.rank_group import run_ranks
from tests.tiny_models import DIMENSIONS, make_model

VOCAB = DIMENSIONS["vocab_size"]
MICROBATCHES = [[np.random.default_rng(seed).integers(0, VOCAB, 24).tolist()] for seed in range(4)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("guards") / "qwen2")


# --- interleaved pipeline stages --------------------------------------------------------------------------------------


def test_interleaved_stages_need_overlapped_communication(directory: Path) -> None:
    layout = ParallelLayout(pipeline=2, virtual_pipeline=2)
    (right,) = run_ranks(1, f"{__name__}:gradient_norms", directory, ParallelLayout(), {})
    ours = run_ranks(2, f"{__name__}:gradient_norms", directory, layout, {})
    # Megatron's own default communication, and the fixed lengths that go with it.
    defaults = {"overlap_p2p_comm": False, "batch_p2p_comm": True, "variable_seq_lengths": False}
    theirs = run_ranks(2, f"{__name__}:gradient_norms", directory, layout, defaults)
    assert np.hypot(*ours) == pytest.approx(right, rel=1e-5)
    assert np.hypot(*theirs) != pytest.approx(right, rel=0.01)
    for option in ("overlap_p2p_comm", "batch_p2p_comm"):
        assert option_problems({option: defaults[option]})


def gradient_norms(directory: Path, layout: ParallelLayout, changes: dict[str, Any]) -> float:
    process.start_parallel(layout, seed=1)
    chunks, _ = load_model(directory, layout, torch.float32)
    for name, value in changes.items():
        setattr(chunks[0].config, name, value)

    def forward_step(batches: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        packed = next(batches)

        def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            return logits_of(chunk, hidden).sin().sum(), torch.tensor(1, dtype=torch.int), {}

        return model.forward(chunk, packed), loss

    packed = rank_microbatches(layout, MICROBATCHES)
    run_schedule(chunks, forward_step, packed, forward_only=False, tokens=packed[0].tokens.shape[1])
    return float(sum(p.grad.square().sum() for chunk in chunks for p in chunk.parameters()) ** 0.5)


# --- scatter of non-contiguous tensors over gloo ----------------------------------------------------------------------


def test_scatter_of_tensors_that_are_not_contiguous() -> None:
    for rank, (unguarded, guarded) in enumerate(run_ranks(2, f"{__name__}:scatter_columns")):
        wanted = np.arange(24.0).reshape(6, 4)[:, 2 * rank : 2 * rank + 2]
        assert not np.array_equal(unguarded, wanted), "gloo does this right now: the guard can go"
        assert np.array_equal(guarded, wanted)


def scatter_columns() -> list[np.ndarray]:
    whole = torch.arange(24.0).reshape(6, 4)
    results = []
    for scatter in (dist.scatter.__wrapped__, dist.scatter):
        part = torch.zeros(2, 6).t()
        scatter(part, list(whole.chunk(2, dim=1)) if dist.get_rank() == 0 else None, src=0)
        results.append(part.numpy())
    return results


# --- Megatron's cross-entropies ---------------------------------------------------------------------------------------


def test_logprobs_leave_the_logits_alone_and_have_exact_gradients() -> None:
    (errors,) = run_ranks(1, f"{__name__}:cross_entropy_errors")
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
        return vocabulary_logprobs(logits, torch.arange(64), labels, identity, shard, temperature=1.0, entropy=False)[0]

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


# --- one `step` for all parameters after a resume ---------------------------------------------------------------------


def test_a_loaded_optimizer_counts_each_parameters_steps_by_itself(directory: Path) -> None:
    (results,) = run_ranks(1, f"{__name__}:weights_after_resume", directory)
    assert results["steps of the guarded"] == {4.0}
    assert results["steps of the unguarded"] != {4.0}
    assert np.array_equal(results["guarded"], results["uninterrupted"])
    assert not np.allclose(results["unguarded"], results["uninterrupted"], rtol=1e-4)


def weights_after_resume(directory: Path) -> dict[str, Any]:
    process.start_parallel(ParallelLayout(), seed=1)
    guarded = DistributedOptimizer.load_state_dict
    results: dict[str, Any] = {}
    for name, load in (("uninterrupted", None), ("guarded", guarded), ("unguarded", guarded.__wrapped__)):
        chunks, _ = load_model(directory, ParallelLayout(), torch.float32)
        wrapped = wrap_chunks(chunks, chunks[0].config, distributed_optimizer=True)
        optimizer = make_optimizer(wrapped, OptimizerConfig(lr=1e-3), True, torch.float32)
        _take_steps(wrapped, optimizer, first=0)
        if load is not None:
            DistributedOptimizer.load_state_dict = load
            optimizer.load_state_dict(optimizer.state_dict())
            DistributedOptimizer.load_state_dict = guarded
        _take_steps(wrapped, optimizer, first=2)
        states = optimizer.chained_optimizers[0].optimizer.state.values()
        results[name] = torch.cat([p.detach().flatten() for p in wrapped[0].parameters()]).numpy()
        results[f"steps of the {name}"] = {float(state["step"]) for state in states}
    return results


def _take_steps(wrapped: list[Any], optimizer: Any, first: int) -> None:
    """Two steps with made-up gradients that differ from step to step."""
    for step in (first, first + 1):
        optimizer.zero_grad()
        for chunk in wrapped:
            chunk.zero_grad_buffer()
            for index, parameter in enumerate(chunk.parameters()):
                parameter.main_grad.copy_(torch.cos(parameter.detach() * 50 + step + index))
        set_learning_rate(optimizer, lr=1e-3, weight_decay=0.0)
        optimizer.step()
