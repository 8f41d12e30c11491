"""The recipe's schema: a file per large section, one class per mapping, one docstring per field.

Rules inside one field are in its type; rules between fields are in the `rules` of the smallest section that has them
all. Unknown keys are errors. Methods of the algorithm and their settings are in megagrpo/algorithm/.
"""

from megagrpo.algorithm.advantages import AdvantageConfig
from megagrpo.algorithm.aggregation import AggregationConfig
from megagrpo.algorithm.critic import CriticConfig
from megagrpo.algorithm.optimizer import OptimizerConfig
from megagrpo.algorithm.policy_losses import PolicyLossConfig
from megagrpo.recipe.schema.data import DataFileConfig, EntryConfig
from megagrpo.recipe.schema.eval import EarlyStoppingConfig
from megagrpo.recipe.schema.recipe import Recipe
from megagrpo.recipe.schema.reward import (
    ClassifierConfig,
    GenerativeConfig,
    OverlongConfig,
    RewardConfig,
    RewardFunctionConfig,
)
from megagrpo.recipe.schema.rollout import (
    DynamicSamplingConfig,
    EngineLayoutConfig,
    MismatchConfig,
    SglangConfig,
    VllmConfig,
)
from megagrpo.recipe.schema.sft import ConversationFileConfig, SftRecipe
from megagrpo.recipe.schema.train import LayoutConfig, LoraConfig, TrainConfig

AnyRecipe = Recipe | SftRecipe
"""Both share the fields kind, name, seed, model, train, checkpoint, track, cluster."""

__all__ = [
    "AdvantageConfig", "AggregationConfig", "AnyRecipe", "ClassifierConfig",
    "ConversationFileConfig", "CriticConfig", "DataFileConfig",
    "DynamicSamplingConfig", "EarlyStoppingConfig", "EngineLayoutConfig", "EntryConfig", "GenerativeConfig",
    "LayoutConfig", "LoraConfig",
    "MismatchConfig", "OptimizerConfig", "OverlongConfig", "PolicyLossConfig", "Recipe",
    "RewardConfig", "RewardFunctionConfig", "SftRecipe", "SglangConfig", "TrainConfig", "VllmConfig",
]  # fmt: skip
