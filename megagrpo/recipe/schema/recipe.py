"""The recipe: everything a user can say, in the order the data flows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.recipe.schema.algorithm import Algorithm
from megagrpo.recipe.schema.data import Data
from megagrpo.recipe.schema.eval import Eval
from megagrpo.recipe.schema.model import Model
from megagrpo.recipe.schema.reward import Reward
from megagrpo.recipe.schema.rollout import Rollout
from megagrpo.recipe.schema.run import Checkpoint, Cluster, Track
from megagrpo.recipe.schema.section import NonNegativeInt, Section
from megagrpo.recipe.schema.train import Train
from megagrpo.recipe.schema.weights import Weights

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Recipe(Section):
    """One experiment, whole."""

    kind: Literal["grpo"] = "grpo"
    """grpo: reinforcement learning, for `megagrpo train`. A recipe of kind sft has other sections: see docs/sft.md."""

    name: RunName
    """Name of the run and of its directory; letters, digits, dot, dash and underscore."""

    seed: NonNegativeInt = 0
    """Seeds the data order, every sample and the ranks' generators."""

    model: Model
    data: Data
    rollout: Rollout
    reward: Reward
    algorithm: Algorithm = Algorithm()
    train: Train
    weights: Weights = Weights()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()
    cluster: Cluster = Cluster()
