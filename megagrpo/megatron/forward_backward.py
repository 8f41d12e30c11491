"""Megatron's pipeline schedules over packed microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.megatron import model
from megagrpo.megatron.packed import PackedTensors

Loss = Callable[[int, Tensor], Tensor]
"""(index of the microbatch, its hidden states [tokens, hidden]) -> the microbatch's part of the loss, a scalar."""


def sum_gradients(config: TransformerConfig) -> None:
    """Have schedules end a backward pass with gradients that are plain sums over all ranks and microbatches.

    The loss's denominators are global already, so Megatron must not divide by a token count of its own.
    """

    def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **arguments: Any) -> None:
        finalize_model_grads(chunks, None, **arguments)

    config.finalize_model_grads_func = finalize


def forward(chunks: Sequence[torch.nn.Module], microbatches: Sequence[PackedTensors], loss: Loss) -> None:
    """Forward only, without gradients; `loss` sees every microbatch's hidden states on the last stage."""
    if not microbatches:  # Megatron's schedules need one
        return
    with torch.no_grad():
        _run(chunks, microbatches, loss, forward_only=True)


def forward_backward(chunks: Sequence[torch.nn.Module], microbatches: Sequence[PackedTensors], loss: Loss) -> None:
    """Forward and backward; adds the gradients of the sum of all losses to the chunks' buffers and reduces them."""
    _run(chunks, microbatches, loss, forward_only=False)


def _run(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[PackedTensors], loss: Loss, *, forward_only: bool
) -> None:
    iterators = [iter(enumerate(microbatches)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=max(packed.tokens.shape[-1] for packed in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _forward_step(loss: Loss, iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    index, packed = next(iterator)
    return model.forward(chunk, packed), partial(_loss_of_output, loss, index)


def _loss_of_output(loss: Loss, index: int, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
    """Megatron's triple: loss, token count, report. The count goes nowhere (sum_gradients)."""
    return loss(index, hidden), torch.zeros((), dtype=torch.int, device=hidden.device), None
