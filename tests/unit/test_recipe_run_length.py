"""Steps of a run, from its recipe and the rows of an epoch."""

import pytest

from megagrpo.recipe.defaults import total_steps
from megagrpo.recipe.schema import SftRecipe
from tests.plans import recipe


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"total_steps": 7}, 7),
        ({"total_steps": None, "total_epochs": 3}, 12),  # 3 x 1,000 prompts, 256 in a step
        ({"total_steps": None, "total_episodes": 2049}, 2),  # 2,048 responses in a step
    ],
)
def test_steps_are_rounded_up(length: dict[str, int | None], steps: int) -> None:
    assert total_steps(recipe(**{f"train__{name}": value for name, value in length.items()}), 1000) == steps


def test_steps_of_fine_tuning_count_examples() -> None:
    of = SftRecipe.model_validate(
        {
            "kind": "sft",
            "name": "examples",
            "model": {"path": "model"},
            "data": {"train": [{"path": "train.jsonl"}], "tokens_max": 64, "examples_per_step": 32},
            "train": {"total_epochs": 2},
        }
    )
    assert total_steps(of, 100) == 7
