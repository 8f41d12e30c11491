"""Directories as runs leave them, of any number of steps, without a run: for tests of `megagrpo report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.tiny_run import recipe_with

PHASES = ("rollout", "reward", "logprobs", "update", "weight_sync")
RECIPE: Mapping[str, Any] = recipe_with("name=synthetic", "train.total_steps=1000").model_dump(mode="json")
ENVIRONMENT: Mapping[str, Any] = {
    "time": "2026-11-20T10:00:00+0000",
    "command": "megagrpo train recipe.yaml",
    "directory": "/home/user",
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "modified": False},
    "python": "3.11.9",
    "libraries": {"megagrpo": "0.1.0", "torch": "2.13.0", "sglang": None},
    "host": {"name": "node-0", "system": "Linux", "cores": 8},
}


def step_metrics(steps: int, seed: int = 0, others: int = 60) -> dict[str, np.ndarray]:
    """A training run's metrics, float64 [steps] by name, of which `others` are rewards of as many data sources.

    In the last tenth the run falls ill: KL and lengths grow, rewards fall, half of the responses are cut off.
    """
    draw = np.random.default_rng(seed)
    at = np.linspace(0, 1, steps)
    ill = np.clip((at - 0.9) * 10, 0, 1)

    def around(values: np.ndarray, spread: float) -> np.ndarray:
        return values + draw.normal(0, spread, steps)

    reward = np.clip(around(0.2 + 0.6 * (1 - np.exp(-4 * at)) - 0.5 * ill, 0.03), 0, 1)
    seconds = {f"seconds/{name}": around(np.full(steps, 2.0 + number), 0.2) for number, name in enumerate(PHASES)}
    metrics = {
        "reward/mean": reward,
        "reward/std": np.sqrt(reward * (1 - reward)),
        "reward/errors": np.zeros(steps),
        "reward/errors_share": np.zeros(steps),
        "groups/with_signal_share": np.clip(around(1 - reward * 0.6, 0.05), 0, 1),
        "grad_norm": np.exp(around(-0.5 + 2 * ill, 0.3)),
        "kl/mean": np.abs(around(0.002 * at + 0.4 * ill, 0.0003)),
        "entropy": np.abs(around(0.8 * np.exp(-2 * at), 0.02)),
        "loss/total": around(np.zeros(steps), 0.01),
        "lr": np.full(steps, 1e-6),
        "response_tokens/mean": np.abs(around(120 + 60 * at + 300 * ill, 6)),
        "response_tokens/truncated_share": np.clip(around(0.01 + 0.5 * ill, 0.005), 0, 1),
        "logprob_difference/mean": np.abs(around(np.full(steps, 0.002), 0.0002)),
        "logprob_difference/k3": np.abs(around(np.full(steps, 2e-5), 2e-6)),
        "staleness/mean": np.zeros(steps),
        "tokens_per_second": around(np.full(steps, 21000.0), 500),
        "engines/serving": np.full(steps, 2.0),
        "engines/idle_share": np.clip(around(np.full(steps, 0.2), 0.02), 0, 1),
        "trainer/idle_share": np.clip(around(np.full(steps, 0.4), 0.02), 0, 1),
        **seconds,
        "seconds/step": sum(seconds.values(), np.full(steps, 0.5)),
    }
    for number in range(others):
        metrics[f"reward/source_{number:02d}/mean"] = around(reward, 0.05)
    return metrics


def evaluations(steps: int, every: int, seed: int = 1) -> dict[int, dict[str, float]]:
    """Metrics of an evaluation set by step, from step 0, before training, on."""
    draw = np.random.default_rng(seed)
    found = {}
    for step in range(0, steps + 1, every):
        score = 0.2 + 0.5 * (1 - np.exp(-4 * step / max(steps, 1))) + draw.normal(0, 0.01)
        found[step] = {"eval/held_out/mean@1": score, "eval/held_out/mean@1/low": score - 0.04,
                       "eval/held_out/mean@1/high": score + 0.04}  # fmt: skip
    return found


def make_run(
    directory: Path,
    steps: int = 1000,
    *,
    seed: int = 0,
    starts: int = 1,
    recipe: Mapping[str, Any] = RECIPE,
    others: int = 60,
    evaluate_every: int = 50,
) -> Path:
    """Writes a run's directory; of its starts each has another learning rate and another version of torch."""
    directory.mkdir(parents=True)
    columns, evaluated = step_metrics(steps, seed, others), evaluations(steps, evaluate_every)
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as lines:
        for step in range(steps + 1):
            line = {name: float(values[step - 1]) for name, values in columns.items()} if step else {}
            line |= {"step": step, "time": 1.8e9 + 20 * step, **evaluated.get(step, {})}
            lines.write(json.dumps(line) + "\n")
    for number in range(1, starts + 1):
        optimizer = {**recipe["train"]["optimizer"], "lr": recipe["train"]["optimizer"]["lr"] * number}
        of_start = {**recipe, "name": directory.name, "train": {**recipe["train"], "optimizer": optimizer}}
        libraries = {**ENVIRONMENT["libraries"], "torch": f"2.{12 + number}.0"}
        environment = {**ENVIRONMENT, "libraries": libraries, "time": f"2026-11-{19 + number}T10:00:00+0000"}
        for part in (f".{number}", ""):
            (directory / f"recipe{part}.yaml").write_text(yaml.safe_dump(of_start, sort_keys=False), encoding="utf-8")
            (directory / f"environment{part}.json").write_text(json.dumps(environment), encoding="utf-8")
    return directory
