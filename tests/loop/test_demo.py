"""The demo as README promises it: every method and layout learns to carry, and without advantages nothing is learnt.

Runs have the recipes' own budgets of 80 steps, and end as soon as enough is learnt: after 15 or 20 steps. So none of
them depends on what a certain step comes to on a certain machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from megagrpo.demo.ask import ask
from tests.loop import demo_run, small_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]


def test_the_demo_learns_to_carry(grpo: tuple[Path, demo_run.Metrics]) -> None:
    run, metrics = grpo
    shares = demo_run.solved(metrics)
    assert 0.4 <= shares[0] <= 0.62
    assert shares[40] >= demo_run.GOAL
    assert "82" in ask(str(run / "hugging_face"), "37+45=")


def test_without_advantages_nothing_is_learnt(adder: str, ray: Mapping[str, str], tmp_path: Path) -> None:
    overrides = ("track.mlflow=null", "algorithm.skip_groups_without_signal=false", "train.total_steps=15")
    shares = demo_run.solved(
        demo_run.train(ray, tmp_path, "adder_cpu", adder, *overrides, through=("tests.loop.without_advantages",))
    )
    assert shares[15] <= shares[0] + 0.05


@pytest.mark.parametrize(
    "runs",
    [
        (("rloo", "tensor"), ("dapo", "data")),
        (("ppo", "pipeline"), ("cispo", "tensor")),
        (("gspo", "data"), ("lora", "tensor")),
    ],
    ids=lambda runs: "-".join(name for name, _ in runs),
)
def test_every_recipe_learns_to_carry(
    adder: str, ray: Mapping[str, str], tmp_path: Path, runs: tuple[tuple[str, str], ...]
) -> None:
    def train(name: str, axis: str) -> demo_run.Metrics:
        overrides = (adder, *demo_run.UNTIL_LEARNT, *demo_run.LAYOUTS[axis])
        return demo_run.train(ray, tmp_path, f"adder_{name}_cpu", *overrides)

    found = small_run.side_by_side(*(partial(train, *run) for run in runs))
    for metrics in found:
        shares = demo_run.solved(metrics)
        assert shares[max(shares)] >= demo_run.GOAL
