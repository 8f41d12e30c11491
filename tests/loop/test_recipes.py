"""Recipes of the demos begin with untrained models, make two steps and leave a model. That they learn is for
`make test-soak`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.demo import adder, agents, language_model, puzzles
from megagrpo.cli import main
from megagrpo.recipe.load import load_any
from megagrpo.recipe.schema import SftRecipe
from tests.loop import small_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
RECIPES = small_run.REPOSITORY / "yaml_recipes"
CACHE = small_run.REPOSITORY / ".cache"
STEPS = 2
SHORT = ("track.mlflow=null", f"train.total_steps={STEPS}", "train.total_epochs=null", "train.optimizer.warmup_steps=0")
FEW = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "eval.before_training=false")
NEEDS = {
    "adder_sglang_cpu": "sglang",
    "agents_openai_cpu": "openai",
    "agents_retrieval_cpu": "bm25s",
    "agents_verifiers_cpu": "verifiers",
    "puzzles_reasoning_gym_cpu": "reasoning_gym",
}
IN_EVERY_RUN = {
    *("adder_cpu", "adder_sft_cpu"),  # test_methods.py has what is different in adder's others
    "adder_moe_cpu",  # whose every token passes the experts of the engine's choice
    "adder_fp8_cpu",  # which ends with an error if the trainer's logprobs are not the engine's
    *("puzzles_mixture_cpu", "agents_retrieval_cpu"),
}
AT_ONCE = 2
"""Recipes that run side by side."""


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """By demo or recipe, with which it starts from untrained models. Data are where the recipes name them."""
    adder.prepare(CACHE / "adder")
    puzzles.prepare(CACHE / "puzzles")
    agents.prepare(CACHE / "agents")
    language_model.prepare_sums(CACHE / "smollm2")
    untrained, classifier = CACHE / "adder" / "untrained", tmp_path_factory.mktemp("models") / "classifier"
    AutoModelForSequenceClassification.from_pretrained(untrained, num_labels=1).save_pretrained(classifier)
    AutoTokenizer.from_pretrained(untrained).save_pretrained(classifier)
    return {
        "adder": (f"model.path={untrained}",),
        "adder_moe_cpu": (
            f"model.path={untrained}_qwen3_moe",
            "rollout.mismatch.own_routes_every_steps=1",
            "algorithm.skip_groups_without_signal=false",
        ),
        "adder_ppo_cpu": (f"model.path={untrained}", "algorithm.critic.warmup_steps=1"),
        "puzzles": (f"model.path={untrained}",),
        "puzzles_reward_model_cpu": (f"model.path={untrained}", f"reward.models.taught.path={classifier}"),
        "smollm2": (f"model.path={untrained}",),
        "agents": (f"model.path={CACHE / 'agents' / 'untrained'}",),
    }


def run(
    file: Path, changes: Mapping[str, tuple[str, ...]], output: Path, environment: Mapping[str, str]
) -> dict[int, dict[str, float]]:
    """Metrics by step."""
    name, sft = file.stem, isinstance(load_any(file).recipe, SftRecipe)
    changed = changes.get(name) or changes[name.partition("_")[0]]
    settings = (*SHORT, f"track.directory={output}", *changed, *(() if sft else FEW))
    small_run.train(file, *settings, command="sft" if sft else "train", environment=environment)
    assert (output / name / "hugging_face" / "config.json").is_file()
    return small_run.metrics(output / name)


@pytest.mark.parametrize("soak", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "all others"])
def test_recipes_begin_and_make_steps(
    soak: bool, changes: Mapping[str, tuple[str, ...]], ray: Mapping[str, str], tmp_path: Path
) -> None:
    files = [
        file
        for file in sorted(RECIPES.glob("*_cpu.yaml"))
        if file.stem != "puzzles_judge_cpu"  # an untrained judge gives no verdict; see test_reward_models.py
        and (file.stem not in IN_EVERY_RUN) == soak
        and (file.stem not in NEEDS or find_spec(NEEDS[file.stem]))
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for file, metrics in zip(files, pool.map(lambda file: run(file, changes, tmp_path, ray), files), strict=True):
            assert {*range(1, STEPS + 1)} <= metrics.keys(), file.stem
            if file.stem == "adder_moe_cpu":
                assert {metrics[step]["routes/replayed_share"] for step in range(1, STEPS + 1)} == {1.0}
                assert main(["report", str(tmp_path / file.stem), "--mismatch"]) == 0
