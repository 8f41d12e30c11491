"""The results of a teacher's pass over its own batches, sent to the ranks that train on the tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.batching.rank_batches import Microbatch
from megagrpo.errors import REPORT, Problem, RankError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.megatron.batch import ResponseTokens

ROW_BITS = 32


def keys_of(tokens: Sequence[ResponseTokens], device: torch.device) -> Tensor:
    """Returns a number for each response token by which all ranks know it: int64 [tokens of all microbatches]."""
    keys = [(one.rows << ROW_BITS) + one.index for one in tokens]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *keys])


def owners_of(micro: Microbatch, tokens: Sequence[ResponseTokens], device: torch.device) -> Tensor:
    """Returns the data rank of the policy that trains on each response token of a microbatch, int64 [tokens]; none on
    ranks without logits."""
    of_sequences = torch.tensor([sequence.data_rank for sequence in micro.sequences], dtype=torch.int64, device=device)
    return torch.cat([of_sequences[:0], *(of_sequences[one.sequences.index] for one in tokens)])


def to_owners(
    values: Tensor, keys: Tensor, owners: Tensor, layout: ParallelLayout, tensor_ranks: Collection[int]
) -> tuple[Tensor, Tensor]:
    """Sends results to the ranks of the policy's last stage that train on the tokens, among `tensor_ranks` of it.
    Returns what this rank gets, and its keys. Collective over all ranks.

    Context ranks get whole sequences, others nothing that they do not need. values: [tokens, width], of tokens with
    these keys and owners, int64 [tokens]; layout: the policy's.
    """
    by_data_rank = owners.argsort(stable=True).split(owners.bincount(minlength=layout.data).tolist())
    chosen = []
    for at in rank_grid(layout):
        gets = at.pipeline == layout.pipeline - 1 and at.tensor in tensor_ranks
        chosen.append(by_data_rank[at.data] if gets else owners[:0])
    sizes, sent = [*map(len, chosen)], torch.cat(chosen)
    counts = torch.tensor(sizes, device=keys.device)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    splits = received.tolist(), sizes
    of_values = _exchanged(values[sent].view(torch.uint8), *splits).view(values.dtype)
    return of_values, _exchanged(keys[sent], *splits)


def of_tokens_wanted(values: Tensor, keys: Tensor, wanted: Tensor) -> Tensor:
    """Returns the rows of `values` for these keys, int64 [wanted tokens]. Raises RankError if one is not there."""
    keys, order = keys.sort()
    at = torch.searchsorted(keys, wanted)
    if len(wanted) and (int(at.max()) == len(keys) or not torch.equal(keys[at], wanted)):
        given, needed = f"results for {len(keys)} tokens", f"those of {len(wanted)} others, too"
        raise RankError(Problem("a teacher's pass over its own batch", given, needed, REPORT))
    return values[order[at]]


def _exchanged(values: Tensor, received: list[int], sent: list[int]) -> Tensor:
    result = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(result, values.contiguous(), received, sent)
    return result
