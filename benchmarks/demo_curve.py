"""Draws the demo's held-out accuracy from the metrics of real runs: docs/images/demo.png.

python benchmarks/demo_curve.py docs/images/demo.png "tensor=2:runs/a/metrics.jsonl" "data=2:runs/b/metrics.jsonl" …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

STYLES = ("-", "--", ":", "-.")
EVALUATION = "eval/mean@1"


def curve(path: str) -> tuple[list[int], list[float]]:
    """Steps and accuracies of the evaluations in a metrics.jsonl."""
    entries = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    evaluated = [entry for entry in entries if EVALUATION in entry]
    return [entry["step"] for entry in evaluated], [entry[EVALUATION] for entry in evaluated]


def main() -> None:
    output, *runs = sys.argv[1:]
    figure, axes = plt.subplots(figsize=(7.5, 3.6), dpi=140)
    for index, run in enumerate(runs):
        label, path = run.split(":", 1)
        axes.plot(*curve(path), STYLES[index % len(STYLES)], label=label, linewidth=2.4 - 0.4 * index)
    axes.axhline(0.9, color="0.7", linewidth=0.8)
    axes.set(xlabel="step (32 prompts x 8 samples)", ylabel="held-out exact match", ylim=(0.4, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    main()
