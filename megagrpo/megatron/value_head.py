"""A critic's head: one number for each token, in place of GPTModel's output layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ValueHead(torch.nn.Module):
    """A linear layer from hidden to 1, whole on every tensor rank and in float32 whatever the model's dtype.

    Rounded to bfloat16, values of about 1 would lie 1/128 apart, which is as much as they are to explain.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=torch.float32, device=torch.cuda.current_device())
        )
        # Each tensor rank sees its part of the sequence; finalize_model_grads sums the gradients of what is so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """hidden: [tokens of this rank, 1, hidden]. Values [tokens, 1, 1] float32, on all tensor ranks alike."""
        values = F.linear(hidden.float(), self.weight)
        if self.sequence_parallel:
            # All tensor ranks compute the same loss of all tokens: each needs only its own tokens' gradient back.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
