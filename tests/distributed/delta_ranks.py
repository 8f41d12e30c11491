"""Passes of a gated delta net over packed sequences on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.batching.rank_batches import Microbatch
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.batch import pack
from megagrpo.megatron.delta_net import DeltaNet
from megagrpo.weights.families import parts
from tests.distributed.parity_ranks import train_sequence
from tests.methods import rows_of

SIZES = parts.DeltaNet(hidden=24, key_heads=4, value_heads=8, key_dim=6, value_dim=10, kernel=4)
LENGTHS = (130, 1, 64, 2, 65, 17, 63)
Parts = dict[str, Tensor]
"""A whole net's weights, or their gradients: rows of the projection and of the convolution, and the others."""


@dataclass(frozen=True)
class Result:
    """Outputs and gradients of one rank's tokens, and gradients of its parameters, summed over the ranks that share."""

    rows: Tensor
    positions: Tensor
    outputs: Tensor
    inputs_grad: Tensor
    gradients: dict[str, Tensor]


def held(parts: Parts, rank: int, tensor: int) -> dict[str, Tensor]:
    """Returns a tensor rank's share of all parameters."""

    def share(*names: str) -> Tensor:
        return torch.cat([parts[name].chunk(tensor)[rank] for name in names])

    return {
        "in_proj.weight": share("q", "k", "v", "z", "b", "a"),
        "conv": share("q_conv", "k_conv", "v_conv"),
        "A_log": share("A_log"),
        "dt_bias": share("dt_bias"),
        "out_norm.weight": parts["norm"],
        "out_proj.weight": parts["out"].chunk(tensor, dim=1)[rank],
    }


def run(
    layout: ParallelLayout, parts: Parts, inputs: list[Tensor], upstream: list[Tensor], recomputed: bool = False
) -> Result:
    """Runs the net on this rank's tokens of all sequences. inputs, and gradients of the outputs: [length, hidden]."""
    where = rank_grid(layout)[dist.get_rank()]
    groups: Any = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD)
    if layout.ranks > 1:
        process.start_parallel(layout, seed=1)
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    config = TransformerConfig(
        num_layers=1,
        hidden_size=SIZES.hidden,
        num_attention_heads=4,
        layernorm_epsilon=1e-6,
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        use_cpu_initialization=True,
        cuda_graph_modules=[],
    )
    net = DeltaNet(config, SIZES, groups)
    net.load_state_dict(held(parts, where.tensor, layout.tensor))
    sequences = tuple(train_sequence([0] * len(tokens), row) for row, tokens in enumerate(inputs))
    packed = pack(Microbatch(sequences), layout=layout, context_rank=where.context, device="cpu")
    rows, positions = rows_of(packed, sequences), packed.sequences.positions
    rows, positions = (x.chunk(layout.tensor)[where.tensor] for x in (rows, positions))  # sequence parallelism
    hidden = of_tokens(inputs, rows, positions).requires_grad_()

    def forward(hidden: Tensor) -> Tensor:
        return net(hidden[:, None], packed_seq_params=packed.sequences)[0][:, 0]

    output = checkpoint(forward, False, hidden) if recomputed else forward(hidden)
    (output * of_tokens(upstream, rows, positions)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    for parameter in net.parameters():
        if getattr(parameter, "sequence_parallel", False):  # as Megatron's finalize_model_grads
            dist.all_reduce(parameter.grad, group=groups.tp)
        if layout.context > 1:
            dist.all_reduce(parameter.grad, group=groups.cp)
    return Result(rows, positions, output.detach(), hidden.grad, gradients)


def of_tokens(sequences: list[Tensor], rows: Tensor, positions: Tensor) -> Tensor:
    """Returns each token's vector, 0 in padding."""
    lengths = torch.tensor([0, *(len(one) for one in sequences)])
    flat = torch.cat([*sequences, sequences[0].new_zeros(1, sequences[0].shape[1])])
    return flat[torch.where(rows < 0, len(flat) - 1, lengths.cumsum(0)[rows] + positions)]
