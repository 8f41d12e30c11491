"""`megagrpo train` with every advantage set to 0: the control that shows what GRPO's signal does."""

from __future__ import annotations

import sys

import numpy as np

from megagrpo import cli
from megagrpo.algorithm.advantages import Advantages, GroupMethod

if __name__ == "__main__":
    GroupMethod.advantages = lambda self, inputs: Advantages(np.zeros(len(inputs.scores)))
    sys.exit(cli.main(sys.argv[1:]))
