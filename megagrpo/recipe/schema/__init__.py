"""The recipe's schema: a file per large section, one class per mapping, one docstring per field.

Rules inside one field are in its type; rules between fields are in the `rules` of the smallest section that has them
all. Unknown keys are errors. Methods of the algorithm and their settings are in megagrpo/algorithm/.
"""

from megagrpo.recipe.schema.data import DataFileConfig, EntryConfig
from megagrpo.recipe.schema.eval import EarlyStoppingConfig
from megagrpo.recipe.schema.recipe import Recipe
from megagrpo.recipe.schema.reward import ClassifierConfig, OverlongConfig, RewardConfig
from megagrpo.recipe.schema.rollout import EngineLayoutConfig, MismatchConfig, SglangConfig, VllmConfig
from megagrpo.recipe.schema.sft import SftRecipe
from megagrpo.recipe.schema.train import LayoutConfig, LoraConfig, TrainConfig

AnyRecipe = Recipe | SftRecipe
"""Both share the fields kind, name, seed, model, train, checkpoint, track, cluster."""

__all__ = [
    "AnyRecipe", "ClassifierConfig", "DataFileConfig", "EarlyStoppingConfig", "EngineLayoutConfig", "EntryConfig",
    "LayoutConfig", "LoraConfig", "MismatchConfig", "OverlongConfig", "Recipe", "RewardConfig", "SftRecipe",
    "SglangConfig", "TrainConfig", "VllmConfig",
]  # fmt: skip
