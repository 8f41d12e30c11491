"""Trains the demo by every method that has a recipe; prints one table and draws the curves, docs/images/algorithms.png.

python benchmarks/algorithms.py [--runs DIRECTORY] [PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from curves import curve

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = sorted((REPOSITORY / "yaml_recipes").glob("adder_*cpu.yaml"))
NOT_A_METHOD = ("adder_sglang_cpu", "adder_sft_cpu", "adder_moe_cpu", "adder_fp8_cpu")
PICTURE = REPOSITORY / "docs" / "images" / "algorithms.png"
PANELS = {
    "reward/solved_share": "solved share of the step's samples",
    "eval/adder/mean@1": "held-out exact match (greedy)",
}
GOAL = 0.9


def train(recipe: Path, runs: Path, overrides: list[str]) -> Path:
    """Trains a recipe, or leaves it as it is if it is complete; its metrics."""
    command = [sys.executable, "-m", "megagrpo.cli", "train", str(recipe), f"track.directory={runs}", *overrides]
    subprocess.run([*command, "track.mlflow=null", "track.console=off"], check=True, cwd=REPOSITORY)
    return runs / recipe.stem / "metrics.jsonl"


def draw(found: dict[str, Path]) -> None:
    figure, panels = plt.subplots(1, len(PANELS), figsize=(10, 4), dpi=140, sharey=True)
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        for label, metrics in found.items():
            axes.plot(*curve(metrics, metric), label=label, linewidth=1.4)
        axes.set(title=title, xlabel="step", ylim=(0.4, 1.0))
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "algorithms")
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE")
    given = parser.parse_args()
    found = {}
    print("| recipe | before | after | steps to 0.9 | seconds |")
    print("|---|---|---|---|---|")
    for recipe in RECIPES:
        if recipe.stem in NOT_A_METHOD:
            continue
        metrics = train(recipe, given.runs, given.overrides)
        label = recipe.stem.removeprefix("adder_").removesuffix("_cpu").removesuffix("cpu") or "grpo"
        found[label] = metrics
        steps, matches = curve(metrics, "eval/adder/mean@1")
        reached = next((step for step, match in zip(steps, matches, strict=True) if match >= GOAL), None)
        seconds = sum(curve(metrics, "seconds/step")[1])
        to_goal = "-" if reached is None else reached
        print(f"| {label} | {matches[0]:.3f} | {matches[-1]:.3f} | {to_goal} | {seconds:.0f} |", flush=True)
    draw(found)
    print(f"curves: {PICTURE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
