"""The demo as README promises it: every method and layout learns to carry, and without advantages nothing is learnt.

Runs have the recipes' own budgets of 80 steps, and end as soon as enough is learnt: after 15 or 20 steps. So none of
them depends on what a certain step comes to on a certain machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from examples.demo.adder import fingerprint, prepare
from examples.demo.ask import ask
from tests.loop import small_run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
RECIPES = small_run.REPOSITORY / "yaml_recipes"
CACHE = small_run.REPOSITORY / ".cache" / "adder"
GOAL = 0.9
UNTIL_LEARNT = ("eval.early_stopping={metric: adder/mean@1, target: 0.93}",)
# Layouts. The recipes' own is tensor 2.
PIPELINE = ("train.layout.tensor=1", "train.layout.pipeline=2")
DATA = ("train.layout.tensor=1", "train.layout.data=2")


@pytest.fixture(scope="module")
def warm_model() -> str:
    """The model that every recipe starts from, as an override: what `make warm-start` leaves, made once for this code.
    The files that the recipes name are then where they name them."""
    prepare(CACHE)
    recipe = RECIPES / "adder_sft_cpu.yaml"
    runs = CACHE / f"runs_{fingerprint()[:8]}_{hashlib.sha256(recipe.read_bytes()).hexdigest()[:8]}"
    model = runs / "adder_sft_cpu" / "hugging_face"
    if not model.exists():
        small_run.train(recipe, f"track.directory={runs}", command="sft")
    return f"model.path={model}"


def solved(
    name: str, *overrides: str, output: Path, environment: Mapping[str, str], **how: tuple[str, ...]
) -> dict[int, float]:
    """Share of the held-out sums, by step where it was measured, of yaml_recipes/`name`.yaml."""
    settings = (f"track.directory={output}", "track.mlflow=null", *overrides)
    small_run.train(RECIPES / f"{name}.yaml", *settings, environment=environment, **how)
    entries = small_run.metrics(output / name)
    found = {step: entry["eval/adder/mean@1"] for step, entry in entries.items() if "eval/adder/mean@1" in entry}
    print(name, "solved", found)
    return found


def test_the_demo_learns_to_carry_and_without_advantages_nothing(
    warm_model: str, ray: Mapping[str, str], tmp_path: Path
) -> None:
    demo = partial(solved, "adder_cpu", warm_model, environment=ray)
    control = ("algorithm.skip_groups_without_signal=false", "train.total_steps=15")
    shares, of_control = small_run.side_by_side(
        partial(demo, *UNTIL_LEARNT, output=tmp_path / "demo"),
        partial(demo, *control, output=tmp_path / "control", through=("tests.loop.altered_runs", "without_advantages")),
    )
    assert 0.4 <= shares[0] <= 0.62
    assert shares[max(shares)] >= GOAL
    (answer,) = ask(str(tmp_path / "demo" / "adder_cpu" / "hugging_face"), ["37+45="])
    assert "82" in answer
    assert of_control[15] <= of_control[0] + 0.05


@pytest.mark.parametrize(
    "runs", [{"rloo": (), "dapo": DATA}, {"ppo": PIPELINE, "cispo": ()}, {"gspo": DATA, "lora": ()}], ids="-".join
)
def test_every_recipe_learns_to_carry(
    warm_model: str, ray: Mapping[str, str], tmp_path: Path, runs: dict[str, tuple[str, ...]]
) -> None:
    learnt = partial(solved, output=tmp_path, environment=ray)
    recipes = ((f"adder_{name}_cpu", warm_model, *UNTIL_LEARNT, *layout) for name, layout in runs.items())
    for shares in small_run.side_by_side(*(partial(learnt, *recipe) for recipe in recipes)):
        assert shares[max(shares)] >= GOAL


def test_muon_learns_to_carry_at_adams_learning_rate(warm_model: str, ray: Mapping[str, str], tmp_path: Path) -> None:
    muon = ("train.optimizer.kind=muon", *DATA, *UNTIL_LEARNT)
    shares = solved("adder_cpu", warm_model, *muon, output=tmp_path, environment=ray)
    assert shares[max(shares)] >= GOAL
