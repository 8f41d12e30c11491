"""Trains the mixture of experts of `make demo-moe` with an engine whose routers are perturbed, with routing replay and
without; prints one table and draws the curves, docs/images/routing.png.

python benchmarks/routing.py [--runs DIRECTORY] [--noise DEVIATION ...] [--seeds N] [PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from curves import curve

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "yaml_recipes" / "adder_moe_cpu.yaml"
PICTURE = REPOSITORY / "docs" / "images" / "routing.png"
PERTURBED = REPOSITORY / "benchmarks" / "other_routes"
PANELS = {
    "eval/adder/mean@1": "held-out exact match (greedy)",
    "logprob_difference/p99": "p99 of the mismatch, nats",
}
COLOURS = {"replay": "tab:blue", "own": "tab:red"}
Runs = dict[tuple[float, str], list[Path]]


def train(noise: float, routing: str, seed: int, runs: Path, overrides: list[str]) -> Path:
    """Trains the recipe, or leaves it as it is if it is complete; its metrics."""
    name = f"noise_{noise:g}_{routing}_{seed}"
    changes = [f"name={name}", f"seed={seed}", f"track.directory={runs}", f"algorithm.routing={routing}"]
    every = "null" if routing == "own" else "10"
    changes += [f"rollout.mismatch.own_routes_every_steps={every}", "track.mlflow=null", "track.console=off"]
    path = os.pathsep.join([str(PERTURBED), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ROUTER_NOISE": str(noise), "PYTHONPATH": path}
    command = [sys.executable, "-m", "megagrpo.cli", "train", str(RECIPE), *changes, *overrides]
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment)
    return runs / name / "metrics.jsonl"


def draw(found: Runs) -> None:
    figure, panels = plt.subplots(1, len(PANELS), figsize=(10, 4), dpi=140)
    styles = dict(zip(sorted({noise for noise, _ in found}), ("-", "--", ":", "-."), strict=False))
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        for (noise, routing), seeds in found.items():
            for number, metrics in enumerate(seeds):
                label = f"{routing}, noise {noise:g}" if number == 0 else None
                axes.plot(*curve(metrics, metric), styles[noise], color=COLOURS[routing], label=label, linewidth=1.0)
        axes.set(title=title, xlabel="step")
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_yscale("log")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "routing")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE")
    given = parser.parse_args()
    found: Runs = {}
    print("| noise | routing | before | after, by seed | p99 of the mismatch | k3 |")
    print("|---|---|---|---|---|---|")
    for noise in given.noise:
        for routing in COLOURS:
            seeds = [train(noise, routing, seed, given.runs, given.overrides) for seed in range(1, given.seeds + 1)]
            found[noise, routing] = seeds
            matches = [curve(metrics, "eval/adder/mean@1")[1] for metrics in seeds]
            after = ", ".join(f"{of[-1]:.3f}" for of in matches)
            p99, k3 = (
                np.median([np.median(curve(metrics, f"logprob_difference/{name}")[1]) for metrics in seeds])
                for name in ("p99", "k3")
            )
            print(f"| {noise:g} | {routing} | {matches[0][0]:.3f} | {after} | {p99:.2g} | {k3:.2g} |", flush=True)
    draw(found)
    print(f"curves: {PICTURE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
