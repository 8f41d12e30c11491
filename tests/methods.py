"""Methods of the algorithm by their names, as a recipe gives them, and responses, whole or in parts on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from pydantic import TypeAdapter

from megagrpo.algorithm.advantage_method import AdvantageMethod
from megagrpo.algorithm.advantages import AdvantageConfig
from megagrpo.algorithm.aggregation import AggregationConfig, AggregationMethod
from megagrpo.algorithm.correction import RejectionConfig
from megagrpo.algorithm.over_ranks import Sequences
from megagrpo.algorithm.policy_losses import PolicyLossConfig, PolicyLossMethod
from megagrpo.section import ByName
from tests.rank_threads import SumOverRanks

if TYPE_CHECKING:
    from megagrpo.batching.rank_batches import TrainSequence
    from megagrpo.megatron.batch import Packed

ADVANTAGES, LOSSES, AGGREGATIONS, REJECTIONS = map(
    TypeAdapter, (AdvantageConfig, PolicyLossConfig, AggregationConfig, RejectionConfig)
)


def advantage(**settings: Any) -> AdvantageMethod:
    return ADVANTAGES.validate_python(settings)


def loss(**settings: Any) -> PolicyLossMethod:
    return LOSSES.validate_python(settings)


def aggregation(**settings: Any) -> AggregationMethod:
    return AGGREGATIONS.validate_python(settings)


def rows_of(packed: Packed, sequences: tuple[TrainSequence, ...]) -> torch.Tensor:
    """The row of each token of a microbatch of these sequences, -1 in padding."""
    laid = packed.sequences
    own = np.repeat(np.arange(len(laid.padded)), laid.padded // laid.context)
    lengths, rows = np.array([(len(one.tokens), one.row) for one in sequences] + [(0, -1)]).T
    return torch.from_numpy(np.where(laid.positions.numpy() < lengths[own], rows[own], -1))


def names(union: Any) -> list[str]:
    """Lists the names that a recipe may give, without a user's own function."""
    members, by_name = get_args(union)
    return [name for name in by_name.members(members) if name != ByName.OWN]


def sequences_of(lengths: list[int]) -> Sequences:
    """Responses of these lengths, one after another."""
    counts = torch.tensor(lengths)
    return Sequences(torch.arange(len(lengths)).repeat_interleave(counts), counts.float())


def part_of(whole: Sequences, rank: int, ranks: int, sum_over_ranks: SumOverRanks) -> Sequences:
    """Returns a rank's part of responses whose tokens are dealt out one by one."""

    def over_ranks(sums: torch.Tensor) -> torch.Tensor:
        total = sums.clone()
        sum_over_ranks(total)
        return total

    return Sequences(whole.index[rank::ranks], whole.tokens, over_ranks)
