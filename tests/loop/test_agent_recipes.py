"""The recipes of agents: with a tool, a search, a program of one's own or a game, held-out success rises; without
advantages it does not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.demo import agents
from examples.demo.adder import fingerprint
from tests.loop import small_run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
RECIPES = small_run.REPOSITORY / "yaml_recipes"
CACHE = small_run.REPOSITORY / ".cache" / "agents"
STEPS = 10
RISE = 0.25


@pytest.fixture(scope="module")
def warm() -> Path:
    """The warm start, made once for this code. Data are then where the recipes name them."""
    recipe = RECIPES / "agents_sft_cpu.yaml"
    runs = CACHE.parent / f"agents_runs_{fingerprint()[:8]}_{hashlib.sha256(recipe.read_bytes()).hexdigest()[:8]}"
    model = runs / "agents_sft_cpu" / "hugging_face"
    if not (model.exists() and (CACHE / "untrained").exists()):
        agents.prepare(CACHE)
        small_run.train(recipe, f"track.directory={runs}", "track.mlflow=null", command="sft")
    return model


def success(
    name: str, *overrides: str, warm: Path, output: Path, environment: Mapping[str, str], **how: tuple[str, ...]
) -> tuple[float, float]:
    """On held-out questions, before and after training."""
    settings = (f"model.path={warm}", f"track.directory={output}", "track.mlflow=null", f"train.total_steps={STEPS}")
    small_run.train(RECIPES / f"agents_{name}_cpu.yaml", *settings, *overrides, environment=environment, **how)
    entries = small_run.metrics(output / f"agents_{name}_cpu")
    (metric,) = [metric for metric in entries[0] if metric.startswith("eval/") and metric.endswith("/mean@1")]
    found = entries[0][metric], entries[STEPS][metric]
    print(name, found)
    return found


def test_a_calculator_is_called_again_and_without_advantages_no_more_than_before(
    warm: Path, ray: Mapping[str, str], tmp_path: Path
) -> None:
    run = partial(success, "calculator", warm=warm, environment=ray)
    keep, altered = "algorithm.skip_groups_without_signal=false", ("tests.loop.altered_runs", "without_advantages")
    learnt, control = small_run.side_by_side(
        partial(run, output=tmp_path), partial(run, keep, output=tmp_path / "control", through=altered)
    )
    assert 0.2 <= learnt[0] <= 0.7
    assert learnt[1] >= learnt[0] + RISE
    assert abs(control[1] - control[0]) <= 0.05


def test_a_search_is_made_again_and_players_agree(warm: Path, ray: Mapping[str, str], tmp_path: Path) -> None:
    names = ["game", *(["retrieval"] if find_spec("bm25s") else [])]
    run = partial(success, warm=warm, output=tmp_path, environment=ray)
    for before, after in small_run.side_by_side(*(partial(run, name) for name in names)):
        assert after >= before + RISE
