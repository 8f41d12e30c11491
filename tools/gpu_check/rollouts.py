"""The whole loop on one device: two steps of the demo's sums on a 0.5B-shaped model, with the engine that is there.

Weights travel by CUDA IPC into an SGLang server on the same GPU, which gives its memory back while the policy trains,
and samples by CUDA graphs that were captured before the weights came. With products of the output layer in float32 and
without: the difference between trainer and engine is what the first is for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.demo.adder import prepare
from megagrpo.recipe.yaml12 import to_text
from tools.gpu_check.figures import Figure
from tools.gpu_check.training import DENSE, REPORT, Setting

STEPS = 2
RUN_SECONDS = 900.0


def rollouts(setting: Setting) -> Iterator[Figure]:
    if missing := [name for name in ("ray", "sglang") if find_spec(name) is None]:
        yield Figure("the whole loop", 0, note=f"left out: {' and '.join(missing)} not installed")
        return
    made = prepare(setting.directory / "adder")
    model = setting.directory / "model"
    _make_model(setting, made.model, model)
    for logits, named in ((True, "float32 logits"), (False, "bfloat16 logits")):
        if not setting.cuda and not logits:
            return
        metrics, error = _train(setting, model, made.train, logits)
        fix = error or REPORT
        yield Figure(f"{named}: steps that ended", len(metrics), low=STEPS, fix=fix)
        trained = [found for found in metrics if "logprob_difference/mean" in found]
        if trained:
            last = trained[-1]
            limit = (0.02 if logits else 0.05) if setting.cuda else 1e-3
            off = last["logprob_difference/mean"]
            yield Figure(f"{named}: trainer and engine differ, mean", off, "nats", high=limit, fix="docs/mismatch.md")
            yield Figure(f"{named}: p99", last["logprob_difference/p99"], "nats")
            yield Figure(f"{named}: weight sync", last["seconds/weight_sync"], "s")


def _make_model(setting: Setting, demo: Path, directory: Path) -> None:
    """Sizes of the check's dense model with the demo's tokenizer."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    sizes: dict[str, Any] = DENSE[setting.device] | {"vocab_size": len(tokenizer)}
    config = transformers.Qwen2Config(
        **sizes,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _train(setting: Setting, model: Path, data: Path, float32_logits: bool) -> tuple[list[dict[str, Any]], str]:
    """Metrics of each step that ended, and the end of what the run said if it failed."""
    name = "float32" if float32_logits else "bfloat16"
    sglang = {"mem_fraction_static": 0.3, "enable_memory_saver": True} if setting.cuda else {}
    if not float32_logits:
        sglang["enable_fp32_lm_head"] = False
    recipe = {
        "name": name,
        "model": {"path": str(model), "dtype": setting.half},
        "data": {"train": [{"path": str(data)}], "prompt_tokens_max": 16},
        "rollout": {
            "engine": "sglang",
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "response_tokens_max": 32,
            "requests_at_once": 32,
            "sglang": sglang,
        },
        # About half of random responses have such a digit, so that groups differ.
        "reward": {"functions": [{"function": "format", "arguments": {"pattern": "[0-4]"}}]},
        "train": {
            "total_steps": STEPS,
            "tokens_per_microbatch": 2048,
            "offload": ["gradients", "optimizer"],
            "optimizer": {"lr": 1e-6},
        },
        "track": {"directory": str(setting.directory / "runs")},
        "cluster": {"device": setting.device, "start_timeout_seconds": 800},
    }
    path = setting.directory / f"{name}.yaml"
    path.write_text(to_text(recipe))
    log = setting.directory / f"{name}.log"
    error = ""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "megagrpo.cli", "train", str(path)]
        try:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    if code:
        error = f"megagrpo train ended with {code}: " + " | ".join(log.read_text(errors="replace").splitlines()[-8:])
    lines = setting.directory / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [], error
