"""Whole runs whose rollouts come from real SGLang servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from megagrpo.demo.model import make_tokenizer
from tests.loop import small_run
from tests.tiny_models import make_model

ON_SGLANG = ["rollout.engine=sglang", "track.mlflow=null"]
ELSEWHERE = [
    *ON_SGLANG,
    "cluster.placement=disaggregated",
    "rollout.engines=2",
    "cluster.start_timeout_seconds=600",
    "weights.bucket_bytes=8192",
    "weights.transfer=process_group",
]
ADAPTERS = ["train.lora={rank: 4, alpha: 8}", "train.optimizer.lr=1e-2"]


def test_a_run_on_sglang_trains_on_what_its_servers_sampled(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    small_run.train(recipe, *ON_SGLANG, environment=ray)
    by_step = small_run.metrics(tmp_path / "small")
    assert sorted(by_step) == list(range(small_run.STEPS + 1))
    for step, entry in by_step.items():
        if step:
            assert entry["weights/version"] == step
            assert entry["logprob_difference/max"] < 1e-5, "the servers and the training ranks have one policy"
    assert len({entry["eval/mean@1"] for entry in by_step.values() if "eval/mean@1" in entry}) > 1


@pytest.mark.long
def test_a_run_with_latent_attention_samples_from_what_it_trains(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = make_model("deepseek_v3", tmp_path / "model", vocab_size=len(tokenizer), num_hidden_layers=2, **ids)
    tokenizer.save_pretrained(model)
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    overrides = [*ON_SGLANG, f"model.path={model}", "train.total_steps=2"]
    small_run.train(recipe, *overrides, environment=ray)
    by_step = small_run.metrics(tmp_path / "small")
    assert [entry["weights/version"] for step, entry in by_step.items() if step] == [1, 2]
    assert all(entry["logprob_difference/max"] < 1e-5 for step, entry in by_step.items() if step)


@pytest.mark.long
def test_a_run_with_adapters_goes_on_when_a_server_is_killed(inputs: Path, tmp_path: Path) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    process = small_run.start(recipe, *ELSEWHERE, *ADAPTERS, "train.total_steps=6")
    try:
        kill_a_scheduler_after_step(process.pid, tmp_path / "small" / "metrics.jsonl", step=2)
    except BaseException:
        process.kill()
        raise
    output = small_run.end(process)
    assert "restarting engine" in output
    by_step = small_run.metrics(tmp_path / "small")
    assert sorted(by_step) == list(range(7))
    assert all(entry["logprob_difference/max"] < 1e-5 for step, entry in by_step.items() if step)
    assert by_step[6]["kl/mean"] > 1e-5, "the adapters that the servers were sent are not those of the start"


def kill_a_scheduler_after_step(pid: int, metrics: Path, step: int) -> None:
    deadline = time.monotonic() + small_run.RUN_SECONDS
    while not (metrics.exists() and f'"step": {step}' in metrics.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.05)
    schedulers = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "sglang::scheduler" in " ".join(child.cmdline()):
                schedulers.append(child)
    assert len(schedulers) == 2, schedulers
    schedulers[0].kill()
