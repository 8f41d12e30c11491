"""Rules for train.lora: what adapters can be on."""

from __future__ import annotations

from collections.abc import Iterator

from megagrpo.recipe.rule_problem import RuleProblem, broken
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.families.architecture import Architecture


def lora_problems(recipe: AnyRecipe) -> Iterator[RuleProblem]:
    """Those of the recipe alone."""
    lora = recipe.train.lora
    if lora is None:
        return
    if recipe.train.layer_spec == "transformer_engine":
        yield broken(
            "train.layer_spec",
            reads=("train.lora",),
            given="transformer_engine with train.lora",
            needed="Megatron's local layers: adapters are on their linear layers",
            fix="layer_spec: auto",
        )
    if repeated := sorted({target for target in lora.targets if lora.targets.count(target) > 1}):
        yield broken(
            "train.lora.targets",
            given=f"{', '.join(repeated)} more than once",
            needed="each name once",
            fix="remove the others",
        )


def lora_model_problems(recipe: AnyRecipe, architecture: Architecture) -> Iterator[RuleProblem]:
    if recipe.train.lora is None:
        return
    if architecture.latent is not None:
        yield broken(
            "train.lora",
            given=f"adapters on {architecture.family}, which has latent attention",
            needed="a model with q_proj, k_proj and v_proj",
            fix="remove train.lora, or choose another model",
        )
        return
    layout = recipe.train.layout.parallel()
    if architecture.experts is not None and layout.expert_tensor > 1:
        default = "" if recipe.train.layout.expert_tensor else " (the default: as tensor)"
        yield broken(
            "train.layout.expert_tensor",
            reads=("train.lora", "train.layout.tensor"),
            given=f"{layout.expert_tensor}{default} with train.lora",
            needed="1: adapters are on whole experts",
            fix="expert_tensor: 1, and train.layout.expert to share the experts",
        )
