"""The response tokens whose loss this rank computes: one `ResponseTokens` for each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.sequences import Sequences
from megagrpo.batching.rank_batches import Microbatch
from megagrpo.megatron.packed import PackedTensors


@dataclass
class ResponseTokens:
    """The response tokens of one microbatch on the last pipeline stage. Every tensor is [tokens] unless said otherwise.

    Under context parallelism these are a part of each sequence. What is None at first is filled in by passes over the
    same microbatch and by the update, and never leaves the rank unless asked for.
    """

    positions: Tensor  # int64, rows of the last stage's output
    labels: Tensor  # int64
    rows: Tensor  # int64, row of the sample in the step
    places: Tensor  # int64, index of the token in its sequence, prompt included
    index: Tensor  # int64, index of the token in its response
    sequences: Sequences
    rollout_logprobs: Tensor  # float32
    old_logprobs: Tensor | None = None  # float32, what ratios are to
    reference_logprobs: Tensor | None = None  # float32
    values: Tensor | None = None  # float32, the critic's estimates before its update
    before_update: Tensor | None = None  # float32, the trainer's logprobs when it first saw the tokens in this step
    weights: Tensor | None = None  # float32, in the loss; 0 for tokens that a correction rejects
    importance: Tensor | None = None  # float32, of the policy's loss; None: 1
    chosen: Tensor | None = None  # bool, tokens that a loss by covariance chose


def response_tokens(packed: PackedTensors, microbatch: Microbatch) -> ResponseTokens:
    """Selects the response tokens of `packed`."""
    positions = packed.mask.nonzero()[:, 0]
    rows = packed.rows[positions]
    places = packed.positions[positions] + 1
    device = positions.device
    sequence_of_row = np.zeros(max(microbatch.rows, default=0) + 1, dtype=np.int64)
    sequence_of_row[list(microbatch.rows)] = np.arange(len(microbatch.rows))
    start = np.array([int(s.loss_mask.argmax()) for s in microbatch.sequences], dtype=np.int64)
    index = torch.from_numpy(sequence_of_row).to(device)[rows]
    counts = torch.tensor([float(s.loss_mask.sum()) for s in microbatch.sequences], device=device)
    return ResponseTokens(
        positions=positions,
        labels=packed.labels[positions],
        rows=rows,
        places=places,
        index=places - torch.from_numpy(start).to(device)[index],
        sequences=Sequences(index, counts, over_context_ranks),
        rollout_logprobs=packed.rollout_logprobs[positions],
    )


def joined(responses: Sequence[ResponseTokens], device: torch.device) -> Sequences:
    """The sequences of several microbatches as those of one, their tokens laid end to end."""
    index, count = [torch.empty(0, dtype=torch.int64, device=device)], 0
    for response in responses:
        index.append(response.sequences.index + count)
        count += len(response.sequences.tokens)
    tokens = torch.cat([torch.empty(0, device=device), *(response.sequences.tokens for response in responses)])
    return Sequences(torch.cat(index), tokens, over_context_ranks)


def share_out(values: Tensor, responses: Sequence[ResponseTokens], name: str) -> None:
    """Sets the field `name` of each microbatch to its part of `values` [tokens of all, laid end to end]."""
    parts = values.split([len(response.rows) for response in responses])
    for response, part in zip(responses, parts, strict=True):
        setattr(response, name, part)


def over_context_ranks(sums: Tensor) -> Tensor:
    """Sum over the ranks that hold the other parts of the same sequences."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return sums
    total = sums.clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total
