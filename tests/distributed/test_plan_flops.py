"""Counted matrix products against those of real training ranks, by torch's counter, summed over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.batch import pack
from megagrpo.megatron.model import forward, forward_backward
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.plan.training_time import FORWARD, head_flops, layers_flops, training_products
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.families import read_architecture
from tests.distributed.parity_ranks import response_logprobs
from tests.rank_group import run_ranks
from tests.tiny_models import make_model

LENGTH, RESPONSE, MICROBATCHES = 32, 12, 2

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"layout": {"tensor": 2}}),
    ("qwen3", {"layout": {"pipeline": 2}, "recompute": "full"}),
    ("qwen3", {"layout": {"data": 2}, "lora": {"rank": 8}}),
    ("qwen3_moe", {"layout": {"tensor": 2, "expert": 2, "expert_tensor": 1}}),
    ("deepseek_v3", {"layout": {"pipeline": 2}}),
    ("deepseek_v3", {"layout": {"data": 2}, "recompute": {"modules": ["mla_up_proj", "mlp", "shared_experts"]}}),
    ("qwen3_moe", {"layout": {"data": 2}, "recompute": {"modules": ["moe", "layernorm"]}}),
    ("deepseek_v3", {"layout": {"data": 2, "expert": 2}, "recompute": "full"}),
]


@pytest.mark.long
def test_products_of_real_ranks_are_those_that_are_counted(tmp_path_factory: pytest.TempPathFactory) -> None:
    models = tmp_path_factory.mktemp("models")
    cases = [
        (make_model(family, models / family), TrainConfig.model_validate({**train, "total_steps": 1}))
        for family, train in CASES
    ]
    measured = run_ranks(2, count_all, cases)
    for number, ((directory, train), (name, _)) in enumerate(zip(cases, CASES, strict=True)):
        arch = read_architecture(directory)
        replicas = MICROBATCHES * train.layout.data
        for over, index in ((FORWARD, 0), (training_products(train, train.recompute == "full"), 1)):
            # The counter does not see attention's core in torch's kernel for CPUs. That kernel does not take values of
            # another size than keys': plain products of all pairs then, twice what a causal mask leaves.
            squares = 2.0 * replicas * LENGTH**2 if arch.family == "deepseek_v3" else 0.0
            layers = layers_flops(arch, arch.kinds, over, float(replicas * LENGTH), squares, train.lora)
            expected = layers.total + head_flops(arch, over, float(replicas * RESPONSE))
            found = sum(rank[number][index] for rank in measured)
            assert found == pytest.approx(expected, rel=0.01), (name, train.layout, train.recompute, index)


def count_all(cases: list[tuple[Path, TrainConfig]]) -> list[tuple[int, int]]:
    return [count(directory, train) for directory, train in cases]


def count(directory: Path, train: TrainConfig) -> tuple[int, int]:
    """Counts this rank's operations in a pass without gradients and in one with them."""
    layout = train.layout.parallel()
    where = rank_grid(layout)[dist.get_rank()]
    process.start_parallel(layout, seed=1)
    try:
        arch = read_architecture(directory)
        policy = TrainedModel(arch, train, where, directory, torch.float32, "cpu", train.lora)
        mask = np.arange(LENGTH) >= LENGTH - RESPONSE
        tokens = np.arange(LENGTH, dtype=np.int64) * 7 % arch.vocab
        sequence = TrainSequence(tokens, mask, np.zeros(LENGTH, np.float32), row=0)
        batch = [
            pack(Microbatch((sequence,)), layout=layout, context_rank=0, device="cpu") for _ in range(MICROBATCHES)
        ]

        def loss(index: int, hidden: torch.Tensor) -> torch.Tensor:
            return response_logprobs(policy.chunks, arch, layout, batch[index], hidden)[0].sum()

        counts = []
        for run in (forward, forward_backward):
            with FlopCounterMode(display=False) as counter:
                run(policy.chunks, batch, loss)
            counts.append(counter.get_total_flops())
        return counts[0], counts[1]
    finally:
        process.stop_parallel()
