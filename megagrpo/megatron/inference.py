"""The loaded batch on its way through a model without gradients: in larger microbatches than training's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megagrpo.batching.rank_batches import Microbatch, joined_microbatches
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.packed import PackedTensors, pack
from megagrpo.megatron.response import ResponseTokens, response_tokens, share_out

Result = Literal["old_logprobs", "reference_logprobs", "values"]


@dataclass(frozen=True)
class InferenceBatch:
    """`responses` and `parts` are empty on ranks that compute no logits."""

    packed: list[PackedTensors]
    responses: list[ResponseTokens]
    parts: list[list[ResponseTokens]]
    """Of training's microbatches: response tokens i are those of parts[i], laid end to end."""

    def share_out(self, name: Result) -> None:
        """Gives the parts what was found for `responses`."""
        for response, parts in zip(self.responses, self.parts, strict=True):
            share_out(getattr(response, name), parts, name)


def inference_batch(
    microbatches: Sequence[Microbatch],
    responses: Sequence[ResponseTokens],
    at_once: int,
    layout: ParallelLayout,
    context_rank: int,
    device: torch.device,
) -> InferenceBatch:
    """Joins up to `at_once` of training's microbatches. responses: theirs, or none."""
    groups = joined_microbatches(len(microbatches), at_once, layout)
    whole = [Microbatch(tuple(s for i in group for s in microbatches[i].sequences)) for group in groups]
    packed = [pack(each, layout=layout, context_rank=context_rank, device=device) for each in whole]
    if not responses:
        return InferenceBatch(packed, [], [])
    joined_responses = [response_tokens(tensors, each) for tensors, each in zip(packed, whole, strict=True)]
    return InferenceBatch(packed, joined_responses, [[responses[i] for i in group] for group in groups])
