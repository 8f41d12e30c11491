"""Microbatches of training joined to fewer, larger ones for passes without gradients."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megagrpo.batching.rank_batches import MICROBATCHES_PER_STAGE
from megagrpo.layout.parallel import ParallelLayout


def joined(microbatches: int, at_once: int, layout: ParallelLayout) -> list[range]:
    """Which of so many microbatches pass together: consecutive ones, at most `at_once`, in parts of like size.

    All ranks with as many microbatches join the same ones. Stages of a pipeline keep their share of work: parts are not
    fewer than microbatches would be made for it, and as many as the interleaved schedule takes.
    """
    multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
    full_pipeline = MICROBATCHES_PER_STAGE * layout.pipeline if layout.pipeline > 1 else 1
    parts = max(-(-microbatches // at_once), full_pipeline)
    parts = min(-(-parts // multiple) * multiple, microbatches)
    bounds = np.linspace(0, microbatches, parts + 1).round().astype(int).tolist()
    return [range(a, b) for a, b in pairwise(bounds)]
