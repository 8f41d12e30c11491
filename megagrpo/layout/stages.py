"""Which transformer layers each pipeline stage and model chunk holds."""

from __future__ import annotations

from megagrpo.layout.parallel import ParallelLayout


def layers_of_chunk(layers: int, layout: ParallelLayout, stage: int, chunk: int) -> range:
    """Global indices (from 0) of the layers of model chunk `chunk` on pipeline rank `stage`.

    Interleaved as Megatron does it: chunk c of stage s is the (c * pipeline + s)-th piece of the model.
    `layers` must divide by pipeline * virtual_pipeline (checked in recipe/model_checks.py).
    """
    per_chunk = layers // (layout.pipeline * layout.virtual_pipeline)
    first = (chunk * layout.pipeline + stage) * per_chunk
    return range(first, first + per_chunk)
