"""The recipe's schema: one file per section, one class per mapping, one docstring per field.

Rules inside one field are in its type; rules between fields are in recipe/checks.py. Unknown keys are errors.
"""

from megagrpo.recipe.schema.algorithm import (
    KL,
    Advantage,
    Algorithm,
    Correction,
    Critic,
    PolicyLoss,
    Reference,
    Rejection,
)
from megagrpo.recipe.schema.data import Data, DataFile
from megagrpo.recipe.schema.eval import EarlyStopping, Eval
from megagrpo.recipe.schema.model import Model
from megagrpo.recipe.schema.recipe import Recipe
from megagrpo.recipe.schema.reward import Overlong, Reward, RewardFunction
from megagrpo.recipe.schema.rollout import DynamicSampling, EngineLayout, Mismatch, Rollout, Sglang
from megagrpo.recipe.schema.run import Checkpoint, Cluster, MLflow, Track, WandB
from megagrpo.recipe.schema.section import Section
from megagrpo.recipe.schema.sft import ConversationFile, SftData, SftEval, SftRecipe
from megagrpo.recipe.schema.train import Layout, Lora, Optimizer, Train
from megagrpo.recipe.schema.weights import Weights

AnyRecipe = Recipe | SftRecipe
"""What they have in common: kind, name, seed, model, train, checkpoint, track, cluster."""

__all__ = [
    "KL",
    "Advantage",
    "Algorithm",
    "AnyRecipe",
    "Checkpoint",
    "Cluster",
    "ConversationFile",
    "Correction",
    "Critic",
    "Data",
    "DataFile",
    "DynamicSampling",
    "EarlyStopping",
    "EngineLayout",
    "Eval",
    "Layout",
    "Lora",
    "MLflow",
    "Mismatch",
    "Model",
    "Optimizer",
    "Overlong",
    "PolicyLoss",
    "Recipe",
    "Reference",
    "Rejection",
    "Reward",
    "RewardFunction",
    "Rollout",
    "Section",
    "SftData",
    "SftEval",
    "SftRecipe",
    "Sglang",
    "Track",
    "Train",
    "WandB",
    "Weights",
]
