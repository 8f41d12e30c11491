"""Which transformer layers each pipeline stage and model chunk holds."""

from __future__ import annotations


def layers_of_chunk(layers: int, pipeline: int, virtual_pipeline: int, stage: int, chunk: int) -> range:
    """Global indices (from 0) of the layers of model chunk `chunk` on pipeline rank `stage`.

    Interleaved as Megatron does it: chunk c of stage s is the (c * pipeline + s)-th piece of the model.
    `layers` must divide by pipeline * virtual_pipeline (checked in recipe/checks.py).
    """
    per_chunk = layers // (pipeline * virtual_pipeline)
    first = (chunk * pipeline + stage) * per_chunk
    return range(first, first + per_chunk)
