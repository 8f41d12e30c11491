"""What adapters can be on: rules of the recipe, and of the recipe and the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagrpo.recipe.checks import recipe_problems
from megagrpo.recipe.model_checks import model_problems
from megagrpo.recipe.overrides import apply_overrides
from megagrpo.recipe.places import Places
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import architecture_of, read_architecture
from tests.tiny_models import make_model
from tests.tiny_run import CONFIG, EXPERTS, recipe


def with_lora(*overrides: str) -> Recipe:
    overrides = ("train.lora={rank: 4}", *overrides)
    tree, _, problems = apply_overrides(recipe(Path("tiny")), Places("recipe.yaml"), overrides)
    assert not problems
    return Recipe.model_validate(tree)


@pytest.mark.parametrize(
    ("override", "where", "said"),
    [
        ("train.lora.targets=[q_proj, o_proj, q_proj]", "train.lora.targets", "q_proj more than once"),
        ("train.layer_spec=transformer_engine", "train.layer_spec", "Megatron's local layers"),
    ],
)
def test_rules_of_the_recipe(override: str, where: str, said: str) -> None:
    found = recipe_problems(with_lora(override, "cluster.device=cuda"))
    assert [problem.where for problem in found if said in str(problem)] == [where]


def test_experts_have_adapters_only_where_they_are_whole() -> None:
    architecture = architecture_of(CONFIG | EXPERTS)
    layout = ["train.layout.tensor=2", "train.layout.expert=2"]
    (problem,) = model_problems(with_lora("train.layout.tensor=2"), architecture)
    assert problem.where == "train.layout.expert_tensor"
    assert "2 (the default: as tensor) with train.lora" in problem.given
    assert model_problems(with_lora(*layout, "train.layout.expert_tensor=1"), architecture) == []
    assert model_problems(with_lora("train.layout.tensor=2"), architecture_of(CONFIG)) == []


def test_latent_attention_has_none(tmp_path: Path) -> None:
    architecture = read_architecture(make_model("deepseek_v3", tmp_path / "model"))
    assert "train.lora" in {problem.where for problem in model_problems(with_lora(), architecture)}
