"""What the parts of a step have in common."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.batching.work import Work
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.data.cursor import Cursor
from megagrpo.recipe.schema import Recipe
from megagrpo.reward.scorer import Scorer
from megagrpo.trainer.clock import PhaseClock
from megagrpo.trainer.stopping import Stopping
from megagrpo.types import Prompt


@dataclass(frozen=True)
class Run:
    """Everything a step works with."""

    recipe: Recipe
    total_steps: int
    cursor: Cursor[Prompt]
    rollouts: Rollouts
    scorer: Scorer
    policy: Policy
    weights: WeightSync
    clock: PhaseClock
    work: Work
    """Of the policy, by which data ranks are balanced."""
    stopping: Stopping
