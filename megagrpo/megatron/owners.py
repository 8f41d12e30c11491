"""Results of a pass over batches that training does not have, brought to the ranks that train on the tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import REPORT, Problem, RankError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.megatron.batch import ResponseTokens

ROW_BITS = 32


def keys_of(tokens: Sequence[ResponseTokens], device: torch.device) -> Tensor:
    """Returns a number for each response token by which all ranks know it: int64 [tokens of all microbatches]."""
    keys = [(one.rows << ROW_BITS) + one.index for one in tokens]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *keys])


def owners_of(batch: RankBatch, tokens: Sequence[ResponseTokens], device: torch.device) -> Tensor:
    """Returns the data rank of the policy that trains on each response token of a batch: int64 [tokens]."""
    micros = [micro for minibatch in batch.minibatches for micro in minibatch]
    parts = [torch.empty(0, dtype=torch.int64, device=device)]
    for micro, of_micro in zip(micros, tokens, strict=False):  # no tokens on ranks without logits
        parts.append(torch.tensor([one.data_rank for one in micro.sequences], device=device)[of_micro.sequences.index])
    return torch.cat(parts)


def to_owners(
    values: Tensor, keys: Tensor, owners: Tensor, wanted: Tensor, layout: ParallelLayout, tensor_ranks: Collection[int]
) -> Tensor:
    """Returns what any rank found for the tokens that this one trains on: [wanted tokens, width]. Collective.

    Each rank sends to the ranks of the policy's last stage that train on its tokens, among `tensor_ranks` of it:
    context ranks get whole sequences, others nothing that they do not need.
    values: [tokens, width] of this rank's pass, of tokens with these keys and owners, int64 [tokens]; wanted: int64
    [wanted tokens], keys; layout: the policy's. Raises RankError if no rank has sent one.
    """
    by_data_rank = [(owners == data).nonzero()[:, 0] for data in range(layout.data)]
    gets = [at.pipeline == layout.pipeline - 1 and at.tensor in tensor_ranks for at in rank_grid(layout)]
    chosen = [by_data_rank[at.data] if get else owners[:0] for at, get in zip(rank_grid(layout), gets, strict=True)]
    sizes, sent = [len(of_rank) for of_rank in chosen], torch.cat(chosen)
    counts = torch.tensor(sizes, device=keys.device)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    splits = received.tolist(), sizes
    keys, order = _exchanged(keys[sent], *splits).sort()
    values = _exchanged(values[sent].view(torch.uint8), *splits).view(values.dtype)
    at = torch.searchsorted(keys, wanted)
    if len(wanted) and (int(at.max()) == len(keys) or not torch.equal(keys[at], wanted)):
        given, needed = f"results for {len(keys)} tokens", f"those of {len(wanted)} others, too"
        raise RankError(Problem("a pass over another batch", given, needed, REPORT))
    return values[order[at]]


def _exchanged(values: Tensor, received: list[int], sent: list[int]) -> Tensor:
    result = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(result, values.contiguous(), received, sent)
    return result
