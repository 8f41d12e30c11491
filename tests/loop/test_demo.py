"""The demo as README promises it: every layout learns to carry, and without advantages nothing is learnt."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagrpo.demo.ask import ask
from tests.loop import small_run
from tests.loop.warm_model import warm_model

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "yaml_recipes" / "adder_cpu.yaml"
FIVE_MINUTES = 300.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def adder() -> Path:
    """The model that GRPO starts from."""
    return warm_model()


def run(
    model: Path, output: Path, *overrides: str, module: str = "megagrpo.cli"
) -> tuple[dict[int, dict[str, float]], float]:
    """Metrics by step, and the seconds that the command took."""
    command = ["train"] if module == "megagrpo.cli" else []
    begun = time.monotonic()
    subprocess.run(
        [
            sys.executable,
            "-m",
            module,
            *command,
            str(RECIPE),
            f"model.path={model}",
            f"track.directory={output}",
            "track.mlflow=null",
            *overrides,
        ],
        check=True,
        cwd=REPOSITORY,
        env=small_run.environment(),
        timeout=2 * FIVE_MINUTES,
    )
    return small_run.metrics(output / "adder_cpu"), time.monotonic() - begun


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data"])
def test_two_ranks_of_any_kind_learn_to_carry(adder: Path, axis: str, tmp_path: Path) -> None:
    steps = ["train.total_steps=40"] if axis != "tensor" else []  # as the recipe says for its own layout
    metrics, seconds = run(adder, tmp_path, "train.layout.tensor=1", f"train.layout.{axis}=2", *steps)
    first, last = metrics[0]["eval/mean@1"], metrics[max(metrics)]["eval/mean@1"]
    assert 0.4 <= first <= 0.62
    assert last >= 0.9
    assert seconds < FIVE_MINUTES
    assert "82" in ask(str(tmp_path / "adder_cpu" / "hugging_face"), "37+45=")


def test_without_advantages_nothing_is_learnt(adder: Path, tmp_path: Path) -> None:
    metrics, _ = run(
        adder,
        tmp_path,
        "algorithm.skip_groups_without_signal=false",
        "train.total_steps=40",
        module="tests.loop.without_advantages",
    )
    first, last = metrics[0]["eval/mean@1"], metrics[max(metrics)]["eval/mean@1"]
    assert last <= first + 0.05
