"""`megagrpo train` with an engine that lies: one trained token of each step has a logprob that is 3 nats too low.

The token is the third of the first trained sample that has so many; which it is, is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megagrpo import cli
from megagrpo.batching.rank_batches import TrainSequence
from megagrpo.trainer import step
from megagrpo.types import Group

LOWER = 3.0
POSITION = 2

true_sequences = step.train_sequences


def altered_sequences(groups: Sequence[Group], rows: np.ndarray) -> list[TrainSequence]:
    sequences = true_sequences(groups, rows)
    index = next(i for i, sequence in enumerate(sequences) if sequence.loss_mask.sum() > POSITION)
    logprobs = sequences[index].rollout_logprobs.copy()
    logprobs[sequences[index].loss_mask.argmax() + POSITION] -= LOWER
    sequences[index] = replace(sequences[index], rollout_logprobs=logprobs)
    sample = [sample for group in groups for sample in group.samples][sequences[index].row]
    print(f"altered: {sample.tokens[POSITION]} at {POSITION} of sample {sample.index} of prompt {sample.prompt_id}")
    return sequences


if __name__ == "__main__":
    step.train_sequences = altered_sequences
    sys.exit(cli.main(["train", *sys.argv[1:]]))
