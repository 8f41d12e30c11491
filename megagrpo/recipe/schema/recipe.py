"""The recipe: everything a user can say, in the order the data flows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.recipe.schema.algorithm import AlgorithmConfig
from megagrpo.recipe.schema.data import DataConfig
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.recipe.schema.model import ModelConfig
from megagrpo.recipe.schema.reward import RewardConfig
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.recipe.schema.run import CheckpointConfig, ClusterConfig, TrackConfig
from megagrpo.recipe.schema.train import TrainConfig
from megagrpo.recipe.schema.weights import WeightsConfig
from megagrpo.section import NonNegativeInt, Section

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Recipe(Section):
    """One experiment, whole."""

    kind: Literal["grpo"] = "grpo"
    """grpo: reinforcement learning, for `megagrpo train`. A recipe of kind sft has other sections: see docs/sft.md."""

    name: RunName
    """Name of the run and of its directory; letters, digits, dot, dash and underscore."""

    seed: NonNegativeInt = 0
    """Seeds the data order, every sample and the ranks' generators."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()
