"""The end of the last pipeline stage: hidden states, so that whoever reads them makes no logits that nobody needs."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


class OutputLayer(torch.nn.Module):
    """Takes the place of a GPTModel's output layer: keeps its weight, under its name, but does not multiply by it.

    Its output is the hidden states of all tokens of this context rank, alike on all tensor ranks. Each of those
    computes with its own rows of the weight, so their gradients are summed.
    """

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.register_parameter("weight", linear.weight)  # None: the embedding's serves
        self.sharded_state_dict = linear.sharded_state_dict  # Megatron's own checkpoints see no difference
        self.group = linear.tp_group
        self.sequence_parallel = linear.sequence_parallel

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[tokens, or tokens / tensor with sequence parallelism, 1, hidden] -> [tokens, 1, hidden]."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.group), None
        return copy_to_tensor_model_parallel_region(hidden, group=self.group), None


def output_weight(chunk: GPTModel) -> Tensor:
    """The rows of the output matrix that this rank holds, [padded vocab / tensor, hidden]; `chunk` is the last."""
    own: Tensor | None = chunk.output_layer.weight
    return chunk.embedding.word_embeddings.weight if own is None else own
