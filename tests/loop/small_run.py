"""A whole run that takes seconds: an untrained model of the demo's shape, its data, and a reward with signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.demo.model import make_tokenizer
from megagrpo.data.prepare import prompt_row, write_splits

REPOSITORY = Path(__file__).resolve().parents[2]
T = TypeVar("T")
STEPS = 4
RUN_SECONDS = 600.0
"""A run that is not over by then hangs. Twenty seconds are enough where nothing else runs."""
NURSERY = "MEGAGRPO_TEST_NURSERY"
"""Variable with an interpreter that runs commands at the price of a fork (ray_nursery.py)."""
VOLATILE = ("seconds/", "tokens_per_second", "time", "engines/", "trainer/", "restarts")
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
        "eval": {"sets": {"sums": {"files": [{"path": str(inputs / "test.parquet")}]}}, "every_steps": 2},
        "checkpoint": {"every_steps": 2},
        "track": {"directory": str(output), "console": "lines", "mlflow": None},
        "cluster": {"device": "cpu", "start_timeout_seconds": RUN_SECONDS / 2},
    }


def write(values: dict[str, Any], directory: Path) -> Path:
    path = directory / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def own_environment() -> dict[str, str]:
    """Without the tests' own settings, which a user does not have either."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def start(
    recipe_file: Path,
    *overrides: str,
    command: str = "train",
    through: Sequence[str] = ("megagrpo.cli",),
    environment: Mapping[str, str] | None = None,
    errors: int = subprocess.STDOUT,
    python: str = sys.executable,
) -> subprocess.Popen[str]:
    """Starts `megagrpo train`, or another command. `through`: the module that runs it, and what that is told first.
    `environment`: RayNodes.environment, to join that Ray; otherwise the run starts its own. `errors`: where standard
    error goes, by default to what was printed."""
    return subprocess.Popen(
        [python, "-m", *through, command, str(recipe_file), *overrides],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=REPOSITORY,
        env=environment or own_environment(),
    )


def end(process: subprocess.Popen[str], code: int | None = 0) -> str:
    """Returns the output of a run once it has ended. Fails if it ended with another exit code; None: any."""
    try:
        output, _ = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"not over after {RUN_SECONDS:g} s: {process.communicate()[0]}") from None
    finally:
        process.kill()
    assert code in (None, process.returncode), output
    return output


def train(recipe_file: Path, *overrides: str, **how: Any) -> str:
    """Runs `megagrpo train`, or another command, to its end; what it printed. Fails if it failed. `how`: as `start`.
    If `environment` has a nursery, it is a fork."""
    python = (how.get("environment") or {}).get(NURSERY, sys.executable)
    return end(start(recipe_file, *overrides, python=python, **how))


def side_by_side(*works: Callable[[], T]) -> list[T]:
    """Their results. A run that starts uses one core at most times, so that two take little longer than one."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [started.result() for started in [pool.submit(work) for work in works]]


def wait_until(
    moment: Callable[[], bool],
    what: str,
    seconds: float = RUN_SECONDS,
    process: subprocess.Popen[str] | None = None,
) -> None:
    """Fails with what `process`, a started run, printed, if that ends first or hangs."""
    deadline = time.monotonic() + seconds
    while not moment():
        late, ended = time.monotonic() > deadline, process is not None and process.poll() is not None
        if process is not None and (late or ended):
            process.terminate()
            raise AssertionError(f"{'ended' if ended else f'{seconds:g} s'} before {what}: {end(process, None)}")
        assert not late, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


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
