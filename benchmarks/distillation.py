"""Teaches the demo's careless adder by the trained one and by GRPO, each with three seeds; prints one table, and draws
the curves, docs/images/distillation.png. `make demo` makes student and teacher before.

python benchmarks/distillation.py [--runs DIRECTORY] [--seeds N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from curves import curve

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURE = REPOSITORY / "docs" / "images" / "distillation.png"
TEACHER = REPOSITORY / "runs" / "adder_cpu" / "metrics.jsonl"
SCORE = "eval/adder/mean@1"
SAMPLED_TOKEN = "algorithm.distillation.objective=sampled_token"
WAYS: dict[str, tuple[str, list[str]]] = {
    "GRPO, 256 responses a step": ("adder_cpu", []),
    "GRPO, 256 responses, 4 optimizer steps": ("adder_cpu", ["algorithm.minibatches=4"]),
    "full_vocabulary, 128 responses, 4 optimizer steps": ("distill_adder_cpu", []),
    "sampled_token, 128 responses, 4 optimizer steps": ("distill_adder_cpu", [SAMPLED_TOKEN]),
}
SHARE = 0.95
"""The goal, as a share of the teacher's held-out score."""


def train(recipe: str, name: str, runs: Path, overrides: list[str]) -> Path:
    """Trains a recipe with an evaluation after every step, or leaves it as it is if it is complete; its metrics."""
    command = [sys.executable, "-m", "megagrpo.cli", "train", f"yaml_recipes/{recipe}.yaml", f"name={name}"]
    settings = [f"track.directory={runs}", "track.mlflow=null", "track.console=off", "eval.every_steps=1"]
    subprocess.run([*command, *settings, *overrides], check=True, cwd=REPOSITORY)
    return runs / name / "metrics.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "distillation")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    teacher = curve(TEACHER, SCORE)[1][-1]
    goal = SHARE * teacher
    print(f"the teacher's held-out score: {teacher:.3f}; the goal: {goal:.3f}\n")
    print("| way | seed | first step at the goal | from this step on | last score |")
    print("|---|---|---|---|---|")
    figure, axes = plt.subplots(figsize=(7, 4), dpi=140)
    for number, (way, (recipe, overrides)) in enumerate(WAYS.items()):
        scores = []
        for seed in range(1, given.seeds + 1):
            metrics = train(recipe, f"{recipe}_{number}_{seed}", given.runs, [f"seed={seed}", *overrides])
            steps, score = curve(metrics, SCORE)
            scores.append(score)
            at = np.flatnonzero(np.array(score) >= goal)
            below = np.flatnonzero(np.array(score) < goal)
            first = str(steps[at[0]]) if len(at) else "-"
            since = str(steps[below[-1] + 1]) if below[-1] + 1 < len(steps) else "-"
            print(f"| {way} | {seed} | {first} | {since} | {score[-1]:.3f} |", flush=True)
            axes.plot(steps, score, color=f"C{number}", alpha=0.3, linewidth=0.8)
        axes.plot(steps, np.mean(scores, 0), color=f"C{number}", label=way, linewidth=1.6)
    axes.axhline(goal, color="0.6", linestyle="--", linewidth=0.8)
    axes.set(title="held-out exact match (greedy)", xlabel="step", ylim=(0.4, 1.0), xlim=(0, 60))
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE)
    print(f"\ncurves: {PICTURE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
