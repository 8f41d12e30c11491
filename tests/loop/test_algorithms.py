"""Other methods than GRPO, whole: each learns, and leaves the figures that are its own."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.loop import small_run
from tests.loop.warm_model import warm_model

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 8

SHORT: dict[str, dict[str, Any]] = {
    "dapo": {
        "algorithm": {"loss": {"clip_high": 0.28}, "minibatches": 2},
        "rollout": {"dynamic_sampling": {"rounds_max": 2}},
        "data": {"no_resampling_pass_rate": 1.0},
        "reward": {"overlong": {"buffer_tokens": 2}, "solved_at": 0.99},
    },
    "gspo": {
        "algorithm": {
            "loss": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1},
            "aggregation": "seq_mean_token_mean",
            "minibatches": 2,
            "correction": {"weights": "token", "reject": [{"level": "sequence", "high": 2.0}], "veto": 1e-4},
        },
    },
}
LONG: dict[str, dict[str, Any]] = {
    "rloo": {
        "algorithm": {
            "advantage": {"name": "rloo"},
            "loss": {"name": "reinforce"},
            "kl": {"coefficient": 0.01, "estimator": "k1", "placement": "reward", "target": 0.01, "horizon": 100},
            "reference": {"update_every_steps": 3, "share": 0.5},
            "aggregation": "seq_mean_token_sum",
        },
    },
    "cispo": {"algorithm": {"loss": {"name": "cispo", "clip_low": 1.0}, "minibatches": 2}},
    "remax": {"algorithm": {"advantage": {"name": "remax"}, "loss": {"name": "reinforce"}}},
    "reinforce_plus_plus": {
        "algorithm": {
            "advantage": {"name": "reinforce_plus_plus", "discount": 0.9},
            "kl": {"coefficient": 0.01, "placement": "reward"},
        }
    },
    "clip_cov": {
        "algorithm": {"loss": {"name": "clip_cov"}, "minibatches": 2, "rollout_logprobs_as_old": True},
    },
}
FIGURES = {
    "dapo": "groups/rounds groups/sampled groups/left_over groups/missing prompts/set_aside reward/overlong",
    "gspo": "correction/weight_mean correction/rejected_share correction/vetoed_share",
    "rloo": "kl/mean kl/coefficient",
    "remax": "reward/greedy",
}


def recipe(inputs: Path, output: Path, name: str) -> dict[str, Any]:
    """small_run's recipe without its objective, with that of `name`."""
    values = small_run.recipe(inputs, output, name)
    values["algorithm"] = {}
    for section, settings in (SHORT | LONG)[name].items():
        values[section] |= settings
    values["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": 8}
    values["train"] |= {"total_steps": STEPS, "tokens_per_microbatch": 512, "optimizer": {"lr": 1e-2}}
    values["eval"]["every_steps"] = STEPS
    return values


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_a_method_learns_and_leaves_its_figures(inputs: Path, tmp_path: Path, name: str) -> None:
    small_run.train(small_run.write(recipe(inputs, tmp_path, name), tmp_path))
    entries = small_run.metrics(tmp_path / name)
    assert sorted(entries) == list(range(STEPS + 1))
    assert set(FIGURES.get(name, "").split()) <= set(entries[STEPS])
    rewards = [entries[step]["reward/share_of_digits"] for step in range(1, STEPS + 1)]
    assert fmean(rewards[-3:]) > 1.5 * fmean(rewards[:3])
    if "rollout_logprobs_as_old" not in (SHORT | LONG)[name]["algorithm"]:  # else the policy has moved by then
        assert entries[1]["logprob_difference/max"] < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("name", ["dapo", "rloo"])
def test_a_resumed_run_has_the_same_numbers(inputs: Path, tmp_path: Path, name: str) -> None:
    for directory in ("whole", "parts"):
        (tmp_path / directory).mkdir()
    whole = small_run.write(recipe(inputs, tmp_path / "whole", name), tmp_path / "whole")
    small_run.train(whole)
    parts = small_run.write(recipe(inputs, tmp_path / "parts", name), tmp_path / "parts")
    small_run.train(parts, "train.total_steps=5", "eval.every_steps=8", "checkpoint.every_steps=5")
    assert "continuing after step 5" in small_run.train(parts)
    found, expected = (small_run.metrics(tmp_path / directory / name) for directory in ("parts", "whole"))
    for step in (6, 7, 8):
        assert small_run.stable(found)[step] == small_run.stable(expected)[step]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["rloo", "gspo", "dapo", "cispo", "ppo", "lora"])
def test_the_demo_learns_to_carry_by_every_recipe(tmp_path: Path, name: str) -> None:
    recipe_file = REPOSITORY / "yaml_recipes" / f"adder_{name}_cpu.yaml"
    small_run.train(
        recipe_file,
        f"model.path={warm_model()}",
        f"track.directory={tmp_path}",
        "train.total_steps=40",
        "track.mlflow=null",
        timeout_seconds=600,
    )
    metrics = small_run.metrics(tmp_path / recipe_file.stem)
    assert metrics[max(metrics)]["eval/mean@1"] >= 0.9
