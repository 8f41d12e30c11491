"""The recipes of small puzzles: with verifiers, a sandbox, a judge, a reward model or reasoning-gym as the reward, the
held-out score rises; without advantages it does not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.demo import puzzles
from examples.demo.adder import fingerprint, prepare
from examples.demo.reward_model import train as train_reward_model
from tests.loop import small_run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
RECIPES = small_run.REPOSITORY / "yaml_recipes"
CACHE = small_run.REPOSITORY / ".cache"
RISE = 0.15
STEPS = 20


@pytest.fixture(scope="module")
def models() -> tuple[Path, Path]:
    """The warm start and the reward model, made once for this code. Prompts are then where the recipes name them."""
    prepare(CACHE / "adder")
    puzzles.prepare(CACHE / "puzzles")
    recipe = RECIPES / "puzzles_sft_cpu.yaml"
    runs = CACHE / "puzzles" / f"runs_{fingerprint()[:8]}_{hashlib.sha256(recipe.read_bytes()).hexdigest()[:8]}"
    warm, reward_model = runs / "puzzles_sft_cpu" / "hugging_face", runs / "reward_model"
    if not reward_model.exists():
        small_run.train(recipe, f"track.directory={runs}", "track.mlflow=null", command="sft")
        assert train_reward_model(str(warm), str(reward_model)) > 0.9
    return warm, reward_model


def scores(
    name: str, *overrides: str, warm: Path, output: Path, environment: Mapping[str, str], **how: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """Held-out score before and after training, by evaluation set."""
    settings = (f"model.path={warm}", f"track.directory={output}", "track.mlflow=null", f"train.total_steps={STEPS}")
    small_run.train(RECIPES / f"{name}.yaml", *settings, *overrides, environment=environment, **how)
    entries = small_run.metrics(output / name)
    names = [metric for metric in entries[0] if metric.startswith("eval/") and metric.endswith("/mean@1")]
    found = {metric.split("/")[1]: (entries[0][metric], entries[STEPS][metric]) for metric in names}
    print(name, found)
    return found


def test_a_mixture_is_learnt_and_without_advantages_nothing(
    models: tuple[Path, Path], ray: Mapping[str, str], tmp_path: Path
) -> None:
    run = partial(scores, "puzzles_mixture_cpu", warm=models[0], environment=ray)
    keep, altered = "algorithm.skip_groups_without_signal=false", ("tests.loop.altered_runs", "without_advantages")
    learnt, control = small_run.side_by_side(
        partial(run, output=tmp_path), partial(run, keep, output=tmp_path / "control", through=altered)
    )
    assert learnt.keys() == {"tens", "larger", "programs"}
    assert all(after >= before + RISE for before, after in learnt.values())
    assert all(after <= before + 0.05 for before, after in control.values())


def test_programs_and_a_task_of_reasoning_gym_are_learnt(
    models: tuple[Path, Path], ray: Mapping[str, str], tmp_path: Path
) -> None:
    names = ["puzzles_code_cpu", *(["puzzles_reasoning_gym_cpu"] if find_spec("reasoning_gym") else [])]
    run = partial(scores, warm=models[0], output=tmp_path, environment=ray)
    for found in small_run.side_by_side(*(partial(run, name) for name in names)):
        ((before, after),) = found.values()
        assert after >= before + RISE


def test_what_a_reward_model_prefers_is_learnt(
    models: tuple[Path, Path], ray: Mapping[str, str], tmp_path: Path
) -> None:
    taught = f"reward.models.taught.path={models[1]}"
    found = scores("puzzles_reward_model_cpu", taught, warm=models[0], output=tmp_path, environment=ray)
    before, after = found["larger"]
    assert after >= before + RISE


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_what_a_judge_on_an_sglang_server_says_is_learnt(
    models: tuple[Path, Path], ray: Mapping[str, str], tmp_path: Path
) -> None:
    teacher = f"reward.models.teacher.path={models[0]}"
    found = scores("puzzles_judge_cpu", teacher, warm=models[0], output=tmp_path, environment=ray)
    before, after = found["larger"]
    assert after >= before + RISE
