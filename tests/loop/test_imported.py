"""A recipe that `megagrpo import` wrote is trained, with overrides for a small model and two CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megagrpo.cli import main
from tests.data_files import write_parquet
from tests.golden.record_imported import PEERS
from tests.loop import digits_reward, small_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
STEPS = 2
SOURCE = "openai/gsm8k"
SMALL = (
    *("cluster.device=cpu", "rollout.engine=transformers", "rollout.vllm={}", "rollout.engines=1"),
    *("data.prompt_tokens_max=32", "rollout.prompts_per_step=8", "rollout.response_tokens_max=8"),
    *("train.layout.data=2", "train.total_epochs=null", f"train.total_steps={STEPS}", "train.optimizer.lr=1e-3"),
    *("eval.every_steps=2", "track.mlflow=null", "track.wandb=null"),
)


def row(split: str, index: int) -> dict[str, Any]:
    """With the columns that verl's examples/data_preprocess/gsm8k.py writes."""
    question, total = f"1{index}+{index}=", 10 + 2 * index
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(total)},
        "extra_info": {"split": split, "index": index, "answer": f"#### {total}", "question": question},
    }


def test_a_recipe_from_verls_gsm8k_script_trains_on_verls_rows(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    for split, count in (("train", 10), ("test", 4)):
        write_parquet(tmp_path / f"data/gsm8k/{split}.parquet", *(row(split, index) for index in range(count)))
    recipe = tmp_path / "recipe.yaml"
    assert not main(["import", "verl", str(PEERS / "verl_gsm8k.sh"), "-o", str(recipe), "--set", f"HOME={tmp_path}"])
    # An untrained model gets nothing from gsm8k; the other function gives its groups a signal.
    functions = f"[{{function: gsm8k}}, {{function: '{digits_reward.__file__}:share_of_digits'}}]"
    rewards = f"reward.by_source.{SOURCE}={functions}"
    places = (f"model.path={inputs / 'model'}", f"track.directory={tmp_path}")
    small_run.train(recipe, *places, *SMALL, rewards, environment=ray)
    run = tmp_path / "qwen2.5_0.5b_gsm8k"
    steps = small_run.metrics(run)
    assert {*range(STEPS + 1)} == steps.keys()
    for step in range(1, STEPS + 1):
        assert steps[step]["groups/with_signal_share"] > 0
        assert steps[step]["grad_norm"] > 0
        assert {"kl/mean", "reward/gsm8k", "reward/share_of_digits"} <= steps[step].keys()
    assert "eval/gsm8k/mean@1" in steps[STEPS]
    assert AutoConfig.from_pretrained(run / "hugging_face").num_hidden_layers == 2
