"""Draws the demo's reward and held-out accuracy from the metrics of real runs: docs/images/demo.png.

python benchmarks/demo_curve.py docs/images/demo.png "tensor=2:runs/a/metrics.jsonl" "data=2:runs/b/metrics.jsonl" …
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from curves import curve

STYLES = ("-", "--", ":", "-.")
PANELS = {"reward/mean": "mean reward of the step's samples", "eval/adder/mean@1": "held-out exact match (greedy)"}


def main() -> None:
    output, *runs = sys.argv[1:]
    figure, panels = plt.subplots(1, len(PANELS), figsize=(9, 3.4), dpi=140, sharey=True)
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        for index, run in enumerate(runs):
            label, path = run.split(":", 1)
            axes.plot(*curve(Path(path), metric), STYLES[index % len(STYLES)], label=label, linewidth=2.4 - 0.4 * index)
        axes.set(title=title, xlabel="step (32 prompts x 8 samples)", ylim=(0.3, 1.0))
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.58))
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    main()
