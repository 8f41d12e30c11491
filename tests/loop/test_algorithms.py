"""Other methods than GRPO, whole: each learns, and leaves the figures that are its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.loop import small_run

pytestmark = pytest.mark.long
STEPS = 8
SAVED = 5
"""The step of the checkpoint before the last."""

METHODS: dict[str, dict[str, Any]] = {
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
        },
        "train": {"offload": ["optimizer", "gradients", "reference"]},
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
GAIN = {"remax": 1.3}
"""How often the reward must be what it was at first; 2 times where nothing is said. remax comes to 1.8, those that have
other responses to compare with to 5 and more."""
Metrics = dict[int, dict[str, float]]


def recipe(inputs: Path, output: Path, name: str) -> dict[str, Any]:
    """small_run's recipe without its objective, with that of `name`."""
    values = small_run.recipe(inputs, output, name)
    values["algorithm"] = {}
    for section, settings in METHODS[name].items():
        values[section] |= settings
    values["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": 8}
    values["train"] |= {"total_steps": STEPS, "tokens_per_microbatch": 512, "optimizer": {"lr": 1e-2}}
    values["eval"]["every_steps"] = STEPS
    values["checkpoint"]["every_steps"] = SAVED
    return values


def train(inputs: Path, output: Path, ray: Mapping[str, str], name: str) -> Metrics:
    small_run.train(small_run.write(recipe(inputs, output, name), output), environment=ray)
    return small_run.metrics(output / name)


def check(name: str, metrics: Metrics) -> None:
    """That it has learnt, and left its figures."""
    assert sorted(metrics) == list(range(STEPS + 1))
    assert set(FIGURES.get(name, "").split()) <= set(metrics[STEPS])
    rewards = [metrics[step]["reward/share_of_digits"] for step in range(1, STEPS + 1)]
    gain = fmean(rewards[-3:]) / fmean(rewards[:3])
    print(f"{name}: the reward grew {gain:.2f} times")
    assert gain > GAIN.get(name, 2.0)
    if "rollout_logprobs_as_old" not in METHODS[name]["algorithm"]:  # else the policy has moved by then
        assert metrics[1]["logprob_difference/max"] < 1e-4


# dapo and rloo are trained and resumed below.
@pytest.mark.parametrize("names", [("gspo", "remax"), ("cispo", "reinforce_plus_plus"), ("clip_cov",)], ids="-".join)
def test_methods_learn_and_leave_their_figures(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str], names: tuple[str, ...]
) -> None:
    found = small_run.side_by_side(*(partial(train, inputs, tmp_path, ray, name) for name in names))
    for name, metrics in zip(names, found, strict=True):
        check(name, metrics)


def test_resumed_runs_have_the_same_numbers(inputs: Path, tmp_path: Path, ray: Mapping[str, str]) -> None:
    def whole_and_resumed(name: str) -> tuple[Metrics, Metrics]:
        whole = train(inputs, tmp_path, ray, name)
        shutil.rmtree(tmp_path / name / "checkpoints" / f"step_{STEPS:06}")
        printed = small_run.train(tmp_path / f"{name}.yaml", environment=ray)
        assert f"continuing after step {SAVED}" in printed
        return whole, small_run.metrics(tmp_path / name)

    names = ("dapo", "rloo")
    found = small_run.side_by_side(*(partial(whole_and_resumed, name) for name in names))
    for name, (whole, resumed) in zip(names, found, strict=True):
        check(name, whole)
        assert whole[STEPS]["time"] != resumed[STEPS]["time"], "the step was made anew"
        assert small_run.stable(resumed) == small_run.stable(whole)
