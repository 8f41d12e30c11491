"""Megatron builds the layers that layout/stages.py places: its own functions say so, for stages of any lengths."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk
from megagrpo.megatron.config import transformer_config
from megagrpo.recipe.schema import LayoutConfig, TrainConfig
from tests.unit.test_layout_parallel import uneven_stages
from tests.unit.test_megatron_options import ARCHITECTURE


def megatron_layers(config: TransformerConfig, stage: int, chunk: int | None) -> range:
    first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))


@settings(max_examples=100)
@given(uneven_stages())
def test_megatron_places_layers_on_the_same_stages(case: tuple[int, ParallelLayout]) -> None:
    layers, layout = case
    train = TrainConfig(layout=LayoutConfig(**vars(layout)))
    arch = type(ARCHITECTURE)(**(vars(ARCHITECTURE) | {"layers": layers}))
    config = transformer_config(arch, train, torch.float32, "cpu")
    for stage in range(layout.pipeline):
        for chunk in range(layout.virtual_pipeline):
            megatron = megatron_layers(config, stage, chunk if layout.virtual_pipeline > 1 else None)
            assert megatron == layers_of_chunk(layers, layout, stage, chunk)
