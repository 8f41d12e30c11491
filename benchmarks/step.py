"""Seconds per GRPO step of the demo, phase by phase, beside TRL's GRPOTrainer: same model, prompts, batch and sampling.

    make benchmark-step            # makes .venv-trl, prepares the demo, runs this

Both run in turn on the same machine, `--rounds` times, and the ratio is taken round by round. The first `--warmup`
steps of every run are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "yaml_recipes" / "adder_cpu.yaml"
TENSOR, DATA = ["train.layout.tensor=2"], ["train.layout.tensor=1", "train.layout.data=2"]
ALL_GROUPS = ["algorithm.skip_groups_without_signal=false"]
VARIANTS = {
    "tensor=2": TENSOR,
    "data=2": DATA,
    "data=2, all groups": DATA + ALL_GROUPS,
}
"""TRL trains on all groups, those without signal too; the last row does the same."""
PHASES = ("rollout", "reward", "logprobs", "update", "weight_sync")


def run_megagrpo(overrides: list[str], steps: int, directory: str) -> list[dict[str, float]]:
    """metrics.jsonl of a training run without evaluations, checkpoints in between and trackers."""
    name = "benchmark-step"
    settings = [
        f"name={name}",
        "algorithm.kl.coefficient=0",  # as in TRL's default: no reference
        f"train.total_steps={steps}",
        f"track.directory={directory}",
        "track.console=off",
        "track.mlflow=null",
        "eval.files=[]",
        "eval.early_stopping=null",
        "checkpoint.keep_best=null",
        f"checkpoint.every_steps={steps}",
        "checkpoint.export_hugging_face=false",
    ]
    command = [sys.executable, "-m", "megagrpo.cli", "train", str(RECIPE), *overrides, *settings]
    subprocess.run(command, check=True, cwd=ROOT)
    lines = (Path(directory) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if "seconds/step" in entry]


def run_trl(python: str, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds and mean rewards of TRL's steps after the warm-up."""
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [python, str(ROOT / "benchmarks" / "trl_step.py"), *arguments],
        check=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    result: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-trl" / "bin" / "python"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()

    from megagrpo.recipe.load import load

    recipe = load(RECIPE).recipe
    samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    of_trl = {
        "model": recipe.model.path,
        "data": recipe.data.train[0].path,
        "prompts": recipe.rollout.prompts_per_step,
        "samples": recipe.rollout.samples_per_prompt,
        "response": recipe.rollout.response_tokens_max,
        "lr": recipe.train.optimizer.lr,
        "steps": given.steps,
        "warmup": given.warmup,
    }
    ours: dict[str, list[list[dict[str, float]]]] = {layout: [] for layout in VARIANTS}
    trl: list[float] = []
    for _ in range(given.rounds):
        for layout, overrides in VARIANTS.items():
            with tempfile.TemporaryDirectory() as directory:
                entries = run_megagrpo(overrides, given.warmup + given.steps, directory)
            ours[layout].append(entries[given.warmup :])
        trl.append(statistics.median(run_trl(given.trl_python, of_trl)["seconds"]))

    print(
        f"{recipe.rollout.prompts_per_step} prompts x {recipe.rollout.samples_per_prompt} samples, "
        f"median of {given.steps} steps, {given.rounds} rounds"
    )
    print(
        f"{'':20s} {'s/step':>8s} {'samples/s':>10s} {'TRL/ours':>9s}  "
        + "  ".join(f"{phase:>11s}" for phase in PHASES)
    )
    for layout, rounds in ours.items():
        seconds = [statistics.median(entry["seconds/step"] for entry in entries) for entries in rounds]
        ratio = statistics.median(b / a for a, b in zip(seconds, trl, strict=True))
        phases = [
            statistics.median(entry.get(f"seconds/{phase}", 0.0) for entries in rounds for entry in entries)
            for phase in PHASES
        ]
        middle = statistics.median(seconds)
        print(
            f"{layout:20s} {middle:8.3f} {samples / middle:10.0f} {ratio:9.2f}  "
            + "  ".join(f"{s:11.3f}" for s in phases)
        )
    middle = statistics.median(trl)
    print(f"{'TRL':20s} {middle:8.3f} {samples / middle:10.0f}")


if __name__ == "__main__":
    main()
