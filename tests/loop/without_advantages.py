"""`megagrpo train` with every advantage set to 0: the control that shows what GRPO's signal does."""

from __future__ import annotations

import sys

import numpy as np

from megagrpo import cli
from megagrpo.trainer import step

if __name__ == "__main__":
    step.grpo_advantages = lambda scores, *settings: np.zeros(len(scores))
    sys.exit(cli.main(["train", *sys.argv[1:]]))
