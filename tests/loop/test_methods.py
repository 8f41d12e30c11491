"""Other methods than GRPO, whole: each learns, leaves the figures that are its own, and resumes with the same numbers.

Four runs ask it of many methods, which do not disturb each other: a run has one advantage and one policy loss, and what
goes with them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from megagrpo.convert.merge_lora import merge_lora
from tests.loop import small_run
from tests.safetensors_files import saved

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
STEPS = 8
SAVED = 5
"""The step of the checkpoint before the last."""
ADAPTED = ["down_proj", "q_proj", "up_proj", "v_proj"]

METHODS: dict[str, dict[str, Any]] = {
    "lora_rloo_dapo": {
        "algorithm": {
            "advantage": {"name": "rloo"},
            "loss": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1},
            "kl": {"coefficient": 0.01},
            "aggregation": "seq_mean_token_mean",
            "minibatches": 2,
            "correction": {"weights": "token", "reject": [{"level": "sequence", "high": 2.0}], "veto": 1e-4},
        },
        "rollout": {"dynamic_sampling": {"rounds_max": 2}},
        "data": {"no_resampling_pass_rate": 1.0},
        "reward": {"overlong": {"buffer_tokens": 2}, "solved_at": 0.99},
        "train": {
            "lora": {"rank": 4, "alpha": 8, "targets": ADAPTED},
            "offload": ["parameters", "gradients", "optimizer", "reference"],
        },
    },
    "ppo": {
        "algorithm": {
            "advantage": {"name": "gae", "trace": 0.9},
            "critic": {"lr": 1e-2, "warmup_steps": 1},
            "loss": {"name": "cispo", "clip_low": 1.0},
            "kl": {"coefficient": 0.01, "estimator": "k1", "placement": "reward", "target": 0.01, "horizon": 100},
            "reference": {"update_every_steps": 3, "share": 0.5},
            "aggregation": "seq_mean_token_sum",
            "minibatches": 2,
        },
        "train": {"offload": ["critic", "optimizer"]},
    },
    "reinforce_plus_plus": {
        "algorithm": {
            "advantage": {"name": "reinforce_plus_plus", "discount": 0.9},
            "loss": {"name": "clip_cov"},
            "kl": {"coefficient": 0.01, "placement": "reward"},
            "minibatches": 2,
            "rollout_logprobs_as_old": True,
        },
        "train": {"offload": ["optimizer", "gradients", "reference"]},
    },
    "remax": {"algorithm": {"advantage": {"name": "remax"}, "loss": {"name": "reinforce"}}},
    "otb": {
        "algorithm": {
            "advantage": {"name": "otb"},
            "loss": {"name": "dppo_kl"},
            "minibatches": 2,
            "correction": {
                "weights": "geometric",
                "reject": [{"level": "token", "statistic": "binary_kl", "high": 0.1}],
            },
        },
    },
}
RESUMED = ("lora_rloo_dapo", "ppo")
OTHERS = ("reinforce_plus_plus", "remax", "otb")
GAINS = {"ppo": 2.0, "reinforce_plus_plus": 2.0, "remax": 1.3, "otb": 1.3}
"""Least ratio of the last reward to the first. Few adapters on an untrained model learn slowly: with them and its own
settings, every demo of that run's methods learns."""
FIGURES = {
    "lora_rloo_dapo": "groups/rounds groups/sampled groups/left_over groups/missing prompts/set_aside reward/overlong"
    " correction/weight_mean correction/rejected_share correction/vetoed_share",
    "ppo": "kl/mean kl/coefficient critic/explained_variance",
    "reinforce_plus_plus": "kl/mean",
    "remax": "reward/greedy",
    "otb": "correction/rejected_share correction/weight_mean clip/low",
}


@dataclass(frozen=True)
class Trained:
    """Metrics by step of a whole run, and once its last steps were made anew after `SAVED`."""

    directory: Path
    whole: dict[int, dict[str, float]]
    resumed: dict[int, dict[str, float]]


def recipe(inputs: Path, output: Path, name: str) -> dict[str, Any]:
    """small_run's recipe without its objective, with that of `name`."""
    values = small_run.recipe(inputs, output, name)
    values["algorithm"] = {}
    values["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": 8}
    values["train"] |= {"total_steps": STEPS, "tokens_per_microbatch": 512, "optimizer": {"lr": 1e-2}}
    values["eval"]["every_steps"] = STEPS
    values["checkpoint"] |= {"every_steps": SAVED, "keep_batches": STEPS - SAVED}
    for section, settings in METHODS[name].items():
        values[section] |= settings
    return values


def train(inputs: Path, output: Path, ray: Mapping[str, str], name: str) -> Trained:
    path, directory = small_run.write(recipe(inputs, output, name), output), output / name
    small_run.train(path, environment=ray)
    whole = small_run.metrics(directory)
    if name in RESUMED:
        shutil.rmtree(directory / "checkpoints" / f"step_{STEPS:06}")
        said = small_run.train(path, environment=ray)
        assert f"continuing after step {SAVED}" in said
        assert ("adapters, for PEFT " in said) == (name == "lora_rloo_dapo")
    return Trained(directory, whole, small_run.metrics(directory))


def train_all(inputs: Path, output: Path, ray: Mapping[str, str], names: Sequence[str]) -> dict[str, Trained]:
    found = small_run.side_by_side(*(partial(train, inputs, output, ray, name) for name in names))
    return dict(zip(names, found, strict=True))


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory, ray: Mapping[str, str]) -> dict[str, Trained]:
    return train_all(inputs, tmp_path_factory.mktemp("methods"), ray, RESUMED)


@pytest.fixture(scope="module")
def others(inputs: Path, tmp_path_factory: pytest.TempPathFactory, ray: Mapping[str, str]) -> dict[str, Trained]:
    return train_all(inputs, tmp_path_factory.mktemp("others"), ray, OTHERS)


def of(names: Iterable[str], soak: Collection[str] = OTHERS) -> pytest.MarkDecorator:
    """The fixture `method` for each; those of `soak` in `make test-soak`."""
    cases = [pytest.param(name, marks=[pytest.mark.soak] if name in soak else []) for name in names]
    return pytest.mark.parametrize("method", cases, indirect=True)


@pytest.fixture
def method(request: pytest.FixtureRequest) -> tuple[str, Trained]:
    found: dict[str, Trained] = request.getfixturevalue("others" if request.param in OTHERS else "trained")
    return request.param, found[request.param]


@of(METHODS, soak=(*OTHERS, "lora_rloo_dapo"))
def test_steps_of_a_method_have_the_same_numbers_when_they_are_replayed(
    method: tuple[str, Trained], ray: Mapping[str, str]
) -> None:
    arguments = (method[1].directory, "--step", str(STEPS))
    printed = small_run.train(*arguments, command="replay", environment=ray)
    assert ("metrics are equal, bit for bit" in printed, f"step_{SAVED:06}\n" in printed) == (True, True)


@of(METHODS)
def test_a_method_leaves_its_figures(method: tuple[str, Trained]) -> None:
    name, metrics = method[0], method[1].whole
    assert sorted(metrics) == list(range(STEPS + 1))
    assert set(FIGURES[name].split()) <= set(metrics[STEPS])


@of(GAINS)
def test_a_method_learns(method: tuple[str, Trained]) -> None:
    rewards = [method[1].whole[step]["reward/share_of_digits"] for step in range(1, STEPS + 1)]
    gain = fmean(rewards[-3:]) / fmean(rewards[:3])
    print(f"{method[0]}: the reward grew {gain:.2f} times")
    assert gain > GAINS[method[0]]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_numbers(trained: dict[str, Trained], name: str) -> None:
    whole, resumed = trained[name].whole, trained[name].resumed
    assert whole[STEPS]["time"] != resumed[STEPS]["time"], "the step was made anew"
    assert small_run.stable(resumed) == small_run.stable(whole)


def test_engines_sample_from_what_is_trained(trained: dict[str, Trained]) -> None:
    adapted = (("lora_rloo_dapo", step) for step in range(1, STEPS + 1))
    for name, step in (*adapted, ("ppo", 2)):
        assert trained[name].whole[step]["logprob_difference/max"] < 1e-4, (name, step)


def test_the_critic_learns_before_the_policy_does_and_is_saved(trained: dict[str, Trained]) -> None:
    metrics = trained["ppo"].whole
    assert not {"loss/policy", "logprob_difference/max"} & metrics[1].keys()
    assert metrics[1]["critic/value_mean"] == metrics[1]["critic/explained_variance"] == 0.0
    assert metrics[2]["critic/value_mean"] != 0.0
    for step in range(1, STEPS + 1):
        assert metrics[step]["critic/lr"] == 1e-2
        assert metrics[step]["critic/grad_norm"] > 0
        assert step == 1 or metrics[step]["grad_norm"] > 0
    assert not any("groups/with_signal_share" in line for line in metrics.values()), (
        "with a critic every response teaches"
    )
    assert (trained["ppo"].directory / f"checkpoints/step_{STEPS:06}/rank/critic/.metadata").is_file()


def test_adapters_are_left_by_themselves_and_added_to_the_model(
    trained: dict[str, Trained], inputs: Path, tmp_path: Path
) -> None:
    run = trained["lora_rloo_dapo"].directory
    assert trained["lora_rloo_dapo"].whole[STEPS]["kl/mean"] > 1e-6
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ADAPTED)
    exported, start = saved(run / "hugging_face"), saved(inputs / "model")
    for adapter in ("adapter", "checkpoints"):
        merge_lora(inputs / "model", run / adapter, tmp_path / adapter)
        torch.testing.assert_close(saved(tmp_path / adapter), exported, rtol=1e-6, atol=1e-7)
    changed = {name.split(".")[-2] for name, tensor in exported.items() if not torch.equal(tensor, start[name])}
    assert changed == set(ADAPTED)
