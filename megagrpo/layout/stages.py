"""Which transformer layers each pipeline stage and model chunk holds."""

from __future__ import annotations

from megagrpo.layout.parallel import ParallelLayout


def layers_of_chunk(layers: int, layout: ParallelLayout, stage: int, chunk: int) -> range:
    """Global indices (from 0) of the layers of model chunk `chunk` on pipeline rank `stage`.

    Interleaved as Megatron does it: the model passes through all stages once for each chunk, and the chunks of a stage
    are equally long (megatron.core.transformer: get_num_layers_to_build, get_transformer_layer_offset). The sizes must
    fit `layers`: `stage_problems` found nothing.
    """
    counts = layers_of_stages(layers, layout)
    per_chunk = counts[stage] // layout.virtual_pipeline
    first = (chunk * layers + sum(counts[:stage])) // layout.virtual_pipeline
    return range(first, first + per_chunk)


def layers_of_stages(layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """How many layers each pipeline stage holds, in all of its chunks: as given for the first and the last stage, and
    the rest in equal shares."""
    rest, stages = _rest(layers, layout)
    share = rest // stages if stages else 0
    counts = [share] * layout.pipeline
    if layout.first_stage_layers is not None:
        counts[0] = layout.first_stage_layers
    if layout.last_stage_layers is not None:
        counts[-1] = layout.last_stage_layers
    return tuple(counts)


def stage_problems(layers: int, layout: ParallelLayout) -> list[str]:
    """Why these stages cannot hold `layers` layers; an empty list if they can. The sizes by themselves are possible."""
    rest, stages = _rest(layers, layout)
    if rest < stages or (rest and not stages):
        return [f"{rest} layers are left for the {stages} other pipeline stages"]
    if stages and rest % stages:
        return [f"{rest} layers cannot be shared out equally to {stages} pipeline stages"]
    chunks = layout.virtual_pipeline
    uneven = sorted({count for count in layers_of_stages(layers, layout) if count % chunks})
    return [f"{count} layers of a pipeline stage cannot be cut into {chunks} equal chunks" for count in uneven]


def _rest(layers: int, layout: ParallelLayout) -> tuple[int, int]:
    """The layers that no key gives to a stage, and the stages that share them."""
    given = [count for count in (layout.first_stage_layers, layout.last_stage_layers) if count is not None]
    return layers - sum(given), layout.pipeline - len(given)
