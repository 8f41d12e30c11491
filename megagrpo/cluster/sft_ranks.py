"""The training ranks of supervised fine-tuning as one object. Every call has a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megagrpo.batching.microbatch import RankBatch
from megagrpo.cluster.actors import SftActor
from megagrpo.cluster.train_ranks import TrainRanks

if TYPE_CHECKING:
    from megagrpo.rank_results import SftUpdate, TokenLoss


class SftRanks(TrainRanks):
    actor_class = SftActor

    def update(self, batches: Sequence[RankBatch], lr: float) -> SftUpdate:
        """One optimizer step on `batches`, one for each data rank."""
        self.load_batch(batches)
        return next(found for found in self.call("update", lr) if found is not None)

    def evaluate(self, batches: Sequence[RankBatch]) -> TokenLoss:
        """Loss of `batches`, one for each data rank, without training on them."""
        self.load_batch(batches)
        return next(found for found in self.call("evaluate") if found is not None)
