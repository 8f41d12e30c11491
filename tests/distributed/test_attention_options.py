"""Options of attention on context and tensor ranks: outputs and gradients are those of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.megatron.attention import PackedAttention
from megagrpo.megatron.batch import pack
from megagrpo.weights.families.parts import LongRope, Rope, Temperature
from tests.methods import rows_of
from tests.rank_group import run_ranks

HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = [40, 32, 33, 3, 17]
OPTIONS: list[dict[str, Any]] = [
    {"rope": Rope(1e4, part=0.5, pairs=True), "window": 7, "sinks": True},
    {"rope": Rope(1e4, long=LongRope(4.0, 32, (1.0, 1.5, 2.0, 3.0), (3.0, 5.0, 7.0, 9.0))), "score_cap": 0.6},
    {"rope": None, "query_temperature": Temperature(0.5, 8), "scale": 0.7, "sinks": True},
]
Numbers = dict[tuple[int, str, int, int, int], np.ndarray]
"""(option, tensor, row, position, head) -> numbers; of sinks, row and position are the rank's and -1."""


def attended(layout: ParallelLayout) -> Numbers:
    process.start_parallel(layout, seed=1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    rank, tensor = parallel_state.get_context_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    sequences = tuple(
        TrainSequence(np.arange(length), np.zeros(length, bool), np.zeros(length), row)
        for row, length in enumerate(LENGTHS)
    )
    part = pack(Microbatch(sequences), layout=layout, context_rank=rank, device="cpu")
    rows, positions = rows_of(part, sequences).tolist(), part.sequences.positions.tolist()
    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": DIM, "hidden_size": 32}
    config = TransformerConfig(num_layers=1, tensor_model_parallel_size=layout.tensor, **sizes)
    numbers: Numbers = {}
    for index, options in enumerate(OPTIONS):
        core = PackedAttention(config, groups, **options)
        generator = torch.Generator().manual_seed(index)
        local = {}
        for name, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            whole = torch.randn(len(LENGTHS), max(LENGTHS), heads, DIM, generator=generator)
            local[name] = whole[rows, positions].chunk(layout.tensor, dim=1)[tensor].clone().requires_grad_()
        if core.softmax_offset is not None:
            assert core.softmax_offset.tensor_model_parallel
            assert core.sharded_state_dict("core.")["core.softmax_offset"].global_shape == (HEADS,)
            core.softmax_offset.data.copy_(torch.tensor([0.1, 2.0, -1.0, 1.0]).chunk(layout.tensor)[tensor])
        output = core(*local.values(), None, packed_seq_params=part.sequences)
        output[np.array(rows) >= 0].sin().sum().backward()
        found = {"output": output.detach()} | {name: tokens.grad for name, tokens in local.items()}
        for name, tokens in found.items():
            for at, (row, position) in enumerate(zip(rows, positions, strict=True)):
                for head in range(tokens.shape[1] if row >= 0 else 0):
                    of_all = tensor * tokens.shape[1] + head
                    numbers[index, name, row, position, of_all] = tokens[at, head].numpy()
        if (sinks := core.softmax_offset) is not None:
            assert sinks.grad is not None
            for head, gradient in enumerate(sinks.grad.numpy()):
                numbers[index, "sinks", rank, -1, tensor * len(sinks) + head] = gradient
    return numbers


def with_summed_sinks(ranks: list[Numbers]) -> Numbers:
    """Numbers of all ranks; gradients of sinks are summed over context ranks, as Megatron does after a pass."""
    numbers: Numbers = {}
    for one in ranks:
        for (index, name, row, position, head), value in one.items():
            key = (index, name, -1 if name == "sinks" else row, position, head)
            assert name == "sinks" or key not in numbers
            numbers[key] = numbers.get(key, 0) + value
    return numbers


@pytest.mark.parametrize("layout", [ParallelLayout(context=2), ParallelLayout(context=2, tensor=2)], ids=str)
def test_options_on_many_ranks_are_those_on_one(layout: ParallelLayout) -> None:
    wanted = with_summed_sinks(run_ranks(1, attended, ParallelLayout()))
    found = with_summed_sinks(run_ranks(layout.ranks, attended, layout))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert np.abs(found[key] - value).max() <= 1e-5 * (1 + np.abs(value).max()), key
