"""A whole run that takes seconds: an untrained model of the demo's shape, its data, and a reward with signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from megagrpo.data.prepared import prompt_row, write_splits
from megagrpo.demo.tokenizer import make_tokenizer

STEPS = 4
VOLATILE = ("seconds/", "tokens_per_second", "time")
"""Metrics that measure the machine and differ from run to run."""


def make_inputs(directory: Path) -> None:
    """model/, train.parquet and test.parquet in `directory`."""
    import torch

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = [
        prompt_row(
            data_source="sums",
            question=f"{a}+{b}=",
            ground_truth=str(a + b),
            extra_info={"index": a},
        )
        for a in range(10, 16)
        for b in range(10, 16)
    ]
    write_splits(directory, [], train=rows[:28], test=rows[28:])


def recipe(inputs: Path, output: Path, name: str = "small") -> dict[str, Any]:
    """KL against a reference, two minibatches, an evaluation and a checkpoint every two steps; no MLflow, which takes
    seconds to start."""
    return {
        "name": name,
        "seed": 3,
        "model": {"path": str(inputs / "model")},
        "data": {"train": [{"path": str(inputs / "train.parquet")}], "prompt_tokens_max": 32},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "response_tokens_max": 8},
        "reward": {"functions": [{"function": f"{Path(__file__).parent / 'digits_reward.py'}:share_of_digits"}]},
        "algorithm": {"minibatches": 2, "kl": {"coefficient": 0.01}},
        "train": {
            "layout": {"tensor": 2},
            "total_steps": STEPS,
            "tokens_per_microbatch": 128,
            "optimizer": {"lr": 1e-3},
        },
        "eval": {"files": [{"path": str(inputs / "test.parquet")}], "every_steps": 2},
        "checkpoint": {"every_steps": 2},
        "track": {"directory": str(output), "console": "lines", "mlflow": None},
        "cluster": {"device": "cpu"},
    }


def write(values: dict[str, Any], directory: Path) -> Path:
    path = directory / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """Without the tests' own settings, which a user does not have either."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def start(recipe_file: Path, *overrides: str, command: str = "train") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megagrpo.cli", command, str(recipe_file), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def train(recipe_file: Path, *overrides: str, timeout_seconds: float = 180.0, command: str = "train") -> str:
    """Runs `megagrpo train`, or another command, to its end; what it printed. Fails if it failed."""
    process = start(recipe_file, *overrides, command=command)
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def metrics(run_directory: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl by step."""
    lines = (run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert len({entry["step"] for entry in entries}) == len(entries), "a step is there twice"
    return {entry["step"]: entry for entry in entries}


def stable(entries: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Without what measures the machine."""
    return {
        step: {name: value for name, value in entry.items() if not name.startswith(VOLATILE)}
        for step, entry in entries.items()
    }
