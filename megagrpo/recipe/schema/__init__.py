"""The recipe's schema: one file per section, one class per mapping, one docstring per field.

Rules inside one field are in its type; rules between fields are in the `rules` of the smallest section that has them
all. Unknown keys are errors. Methods of the algorithm and their settings are in megagrpo/algorithm/.
"""

from megagrpo.algorithm.advantages import AdvantageConfig
from megagrpo.algorithm.aggregation import AggregationConfig
from megagrpo.algorithm.correction import CorrectionConfig, RejectionConfig
from megagrpo.algorithm.critic import CriticConfig
from megagrpo.algorithm.kl import KLConfig, ReferenceConfig
from megagrpo.algorithm.optimizer import OptimizerConfig
from megagrpo.algorithm.policy_losses import PolicyLossConfig
from megagrpo.recipe.schema.algorithm import AlgorithmConfig
from megagrpo.recipe.schema.data import DataConfig, DataFileConfig
from megagrpo.recipe.schema.eval import EarlyStoppingConfig, EvalConfig
from megagrpo.recipe.schema.model import ModelConfig
from megagrpo.recipe.schema.recipe import Recipe
from megagrpo.recipe.schema.reward import OverlongConfig, RewardConfig, RewardFunctionConfig
from megagrpo.recipe.schema.rollout import (
    DynamicSamplingConfig,
    EngineLayoutConfig,
    MismatchConfig,
    RolloutConfig,
    SglangConfig,
)
from megagrpo.recipe.schema.run import CheckpointConfig, ClusterConfig, MLflowConfig, TrackConfig, WandBConfig
from megagrpo.recipe.schema.sft import ConversationFileConfig, SftDataConfig, SftEvalConfig, SftRecipe
from megagrpo.recipe.schema.train import LayoutConfig, LoraConfig, TrainConfig
from megagrpo.recipe.schema.weights import WeightsConfig

AnyRecipe = Recipe | SftRecipe
"""What they have in common: kind, name, seed, model, train, checkpoint, track, cluster."""

__all__ = [
    "AdvantageConfig",
    "AggregationConfig",
    "AlgorithmConfig",
    "AnyRecipe",
    "CheckpointConfig",
    "ClusterConfig",
    "ConversationFileConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DataFileConfig",
    "DynamicSamplingConfig",
    "EarlyStoppingConfig",
    "EngineLayoutConfig",
    "EvalConfig",
    "KLConfig",
    "LayoutConfig",
    "LoraConfig",
    "MLflowConfig",
    "MismatchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PolicyLossConfig",
    "Recipe",
    "ReferenceConfig",
    "RejectionConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "SftDataConfig",
    "SftEvalConfig",
    "SftRecipe",
    "SglangConfig",
    "TrackConfig",
    "TrainConfig",
    "WandBConfig",
    "WeightsConfig",
]
