"""PPO from end to end: the critic learns before the policy does, is saved with it, and goes on with it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.loop import small_run

pytestmark = pytest.mark.long


def test_a_run_of_ppo_continues_with_its_critic(inputs: Path, tmp_path: Path, ray: Mapping[str, str]) -> None:
    values = small_run.recipe(inputs, tmp_path, "ppo")
    values["algorithm"] = {
        "advantage": {"name": "gae", "trace": 0.9},
        "critic": {"lr": 1e-2, "warmup_steps": 1},
        "kl": {"coefficient": 0.01, "placement": "reward"},
        "minibatches": 2,
    }
    values["rollout"] |= {"prompts_per_step": 16, "samples_per_prompt": 1}
    values["train"]["offload"] = ["critic", "optimizer"]
    recipe = small_run.write(values, tmp_path)
    small_run.train(recipe, environment=ray)
    whole = small_run.stable(small_run.metrics(tmp_path / "ppo"))

    assert "loss/policy" not in whole[1]
    assert "logprob_difference/max" not in whole[1]
    for step in range(2, small_run.STEPS + 1):
        assert whole[step]["grad_norm"] > 0
        assert whole[step]["logprob_difference/max"] < 1e-3
    assert whole[1]["critic/value_mean"] == whole[1]["critic/explained_variance"] == 0.0
    assert all(whole[step]["critic/lr"] == 1e-2 for step in range(1, small_run.STEPS + 1))
    assert all(whole[step]["critic/grad_norm"] > 0 for step in range(1, small_run.STEPS + 1))
    assert whole[2]["critic/value_mean"] != 0.0

    saved = tmp_path / "ppo" / "checkpoints"
    assert (saved / "step_000004" / "rank" / "critic" / ".metadata").is_file()
    shutil.rmtree(saved / "step_000004")
    small_run.train(recipe, environment=ray)
    again = small_run.stable(small_run.metrics(tmp_path / "ppo"))
    assert again == whole
