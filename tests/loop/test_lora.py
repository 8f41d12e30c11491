"""Adapters from end to end: engines sample from the sum, the run continues, and leaves both forms of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megagrpo.convert.merge_lora import merge_lora
from tests.loop import small_run
from tests.safetensors_files import saved

pytestmark = pytest.mark.long


def test_a_run_with_adapters(inputs: Path, tmp_path: Path, ray: Mapping[str, str]) -> None:
    values = small_run.recipe(inputs, tmp_path, "lora")
    values["train"] |= {
        "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]},
        "optimizer": {"lr": 1e-2},
        "offload": ["parameters", "gradients", "optimizer", "reference"],
    }
    recipe = small_run.write(values, tmp_path)
    small_run.train(recipe, environment=ray)
    run = tmp_path / "lora"
    whole = small_run.stable(small_run.metrics(run))

    for step in range(1, small_run.STEPS + 1):
        assert whole[step]["logprob_difference/max"] < 1e-4
        assert whole[step]["grad_norm"] > 0
    assert whole[small_run.STEPS]["kl/mean"] > 1e-6

    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == ["down_proj", "q_proj", "up_proj", "v_proj"]
    merge_lora(inputs / "model", run / "adapter", tmp_path / "merged")
    merge_lora(inputs / "model", run / "checkpoints", tmp_path / "merged-from-checkpoint")
    exported, start = saved(run / "hugging_face"), saved(inputs / "model")
    for merged in (saved(tmp_path / "merged"), saved(tmp_path / "merged-from-checkpoint")):
        assert merged.keys() == exported.keys()
        for name, tensor in exported.items():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-7)
    changed = {name.split(".")[-2] for name, tensor in exported.items() if not torch.equal(tensor, start[name])}
    assert changed == set(config["target_modules"])

    shutil.rmtree(run / "checkpoints" / f"step_{small_run.STEPS:06}")
    small_run.train(recipe, environment=ray)
    assert small_run.stable(small_run.metrics(run)) == whole
