"""TRL's GRPOTrainer for benchmarks/step.py. Runs in an environment of its own with trl installed.

Prints one JSON line: seconds, mean reward and mean response tokens of each step after the warm-up ones.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from itertools import pairwise

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWER = re.compile(r"####\s*(-?\d+)")


class StepTimes(TrainerCallback):
    """Wall-clock seconds from one optimizer step's end to the next: generation, scoring and update."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:  # type: ignore[no-untyped-def]
        self.ends.append(time.perf_counter())


def exact(completions, answer, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
    """The strict gsm8k reward: the number after ####."""
    found = [ANSWER.search(completion[0]["content"]) for completion in completions]
    return [float(match is not None and match[1] == wanted) for match, wanted in zip(found, answer, strict=True)]


def matches(pattern: str):  # type: ignore[no-untyped-def]
    """The format reward: whether the pattern is found."""

    def found(completions, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
        return [float(re.search(pattern, completion[0]["content"]) is not None) for completion in completions]

    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {
        "model": str,
        "data": str,
        "reward": str,
        "prompts": int,
        "samples": int,
        "response": int,
        "steps": int,
        "warmup": int,
        "lr": float,
    }.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args()
    torch.set_num_threads(2)
    rows = load_dataset("parquet", data_files=given.data, split="train")
    rows = rows.map(lambda row: {"answer": row["reward_model"]["ground_truth"]})
    times = StepTimes()
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=exact if given.reward == "gsm8k" else matches(given.reward),
        train_dataset=rows.select_columns(["prompt", "answer"]),
        callbacks=[times],
        args=GRPOConfig(
            output_dir="/tmp/trl-benchmark",
            per_device_train_batch_size=given.prompts * given.samples,
            num_generations=given.samples,
            max_completion_length=given.response,
            max_steps=given.warmup + given.steps,
            learning_rate=given.lr,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            scale_rewards="group",
            loss_type="dapo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        ),
    )
    trainer.train()
    ends = times.ends[given.warmup - 1 :]
    logged = [entry for entry in trainer.state.log_history if "reward" in entry][given.warmup :]
    result = {
        "seconds": [b - a for a, b in pairwise(ends)],
        "rewards": [entry["reward"] for entry in logged],
        "tokens": [entry["completions/mean_length"] for entry in logged],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
