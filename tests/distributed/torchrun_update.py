"""One update under torchrun: `torchrun --nproc-per-node N torchrun_update.py CASE RESULT`.

CASE is a pickle of (recipe, model directory, batches, advantages, lr); the metrics go to RESULT as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

from megagrpo.megatron.rank import TrainRank


def main(case: str, result: str) -> None:
    recipe, directory, batches, advantages, lr = pickle.loads(Path(case).read_bytes())
    rank = TrainRank(recipe, int(os.environ["RANK"]), "env://", directory, "cpu")
    rank.load_batch(batches[rank.where.data])
    metrics = rank.update(advantages, lr, kl_coefficient=0.0, step=1)
    if metrics is not None:
        Path(result).write_text(json.dumps(asdict(metrics)))
    rank.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
