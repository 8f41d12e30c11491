"""What may differ between a checkpoint's recipe and the one that continues from it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megagrpo.checkpoint.trainer_state import FIXED, allow_changes
from megagrpo.errors import RecipeError
from megagrpo.recipe.schema import Recipe


def recipe() -> dict[str, Any]:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"path": "model"},
            "data": {"train": [{"path": "a.parquet"}, {"path": "b.parquet", "amount": 100}]},
            "rollout": {"prompts_per_step": 8},
            "reward": {"functions": [{"function": "gsm8k"}]},
            "train": {"total_steps": 10},
        }
    ).model_dump(mode="json")


def test_layout_learning_rate_and_run_length_may_change() -> None:
    allow_changes(recipe(), recipe())
    new = recipe()
    new["train"]["layout"]["tensor"] = 2
    new["train"]["optimizer"]["lr"] = 1e-5
    new["train"]["total_steps"] = 20
    new["model"]["dtype"] = "float32"
    del new["cluster"]["device"]
    allow_changes(recipe(), new)


def test_a_checkpoint_with_the_settings_of_all_advantages_may_be_continued() -> None:
    saved = recipe()
    saved["algorithm"]["advantage"] |= {"discount": 1.0, "trace": 1.0}
    allow_changes(saved, recipe())


def test_model_seed_and_data_may_not_change_and_all_are_named_at_once() -> None:
    new = recipe()
    new["seed"] = 1
    new["model"]["path"] = "other"
    new["data"]["train"][1]["amount"] = 200
    new["data"]["train"][0]["path"] = "c.parquet"
    with pytest.raises(RecipeError) as refused:
        allow_changes(recipe(), new)
    assert [problem.where for problem in refused.value.problems] == [
        "seed", "model.path", "data.train[0].path", "data.train[1].amount",
    ]  # fmt: skip
    assert "100, as in the run so far" in refused.value.problems[3].needed
    assert refused.value.problems[3].given == "200"


def test_a_file_added_to_the_data_is_refused() -> None:
    new = recipe()
    new["data"]["train"].append({"path": "c.parquet", "amount": "all"})
    with pytest.raises(RecipeError, match=r"data\.train"):
        allow_changes(recipe(), new)
    saved = recipe()
    del saved["seed"]
    with pytest.raises(RecipeError, match="not given, as in the run so far"):
        allow_changes(saved, recipe())


@pytest.mark.parametrize("key", FIXED)
def test_every_fixed_key_is_a_key_of_the_recipe(key: str) -> None:
    value: Any = recipe()
    for part in key.split("."):
        value = value[part]
    saved, new = {"x": 1}, {"x": 1}
    for part in reversed(key.split(".")):
        saved, new = {part: copy.deepcopy(saved)}, {part: copy.deepcopy(new)}
    leaf: Any = new
    for part in key.split("."):
        leaf = leaf[part]
    leaf["x"] = 2
    with pytest.raises(RecipeError):
        allow_changes(saved, new)
