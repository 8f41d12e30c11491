"""The policy on one rank: Megatron GPTModels, one per model chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.layers import block_spec
from megagrpo.megatron.output_layer import OutputLayer
from megagrpo.megatron.packed import PackedTensors
from megagrpo.megatron.rotary import inverse_frequencies
from megagrpo.megatron.value_head import ValueHead
from megagrpo.weights.families.architecture import Architecture


def build_chunks(arch: Architecture, config: TransformerConfig, layout: ParallelLayout) -> list[GPTModel]:
    """This rank's model chunks, one unless virtual_pipeline > 1. Their weights are yet to be loaded.

    Collective over all ranks; process.start_parallel must have been called.
    """
    interleaved = layout.virtual_pipeline > 1
    chunks = []
    for stage in range(layout.virtual_pipeline):
        vp_stage = stage if interleaved else None
        if interleaved:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        chunks.append(_build_chunk(arch, config, layout, vp_stage))
    return chunks


def _build_chunk(
    arch: Architecture, config: TransformerConfig, layout: ParallelLayout, vp_stage: int | None
) -> GPTModel:
    fused = config.transformer_impl == "transformer_engine"
    chunk = GPTModel(
        config,
        block_spec(config, arch, vp_stage),
        vocab_size=arch.padded_vocab(layout.tensor),
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope" if fused else "none",  # PackedAttention rotates by itself, latent attention too
        vp_stage=vp_stage,
    )
    if fused and arch.latent is None:
        # GPTModel's arguments do not reach all of Llama 3's scaling.
        chunk.rotary_pos_emb.inv_freq = inverse_frequencies(arch.rope, arch.head_dim).to(torch.cuda.current_device())
    if chunk.post_process:
        chunk.output_layer = ValueHead(config) if arch.value_head else OutputLayer(chunk.output_layer)
    return chunk


def forward(chunk: torch.nn.Module, packed: PackedTensors) -> torch.Tensor:
    """Hidden states [tokens, hidden] if `chunk` (wrapped or not) is the last, else what the next one receives.

    They are those after the last norm, of all tokens of this context rank, also with sequence parallelism, and in the
    model's dtype. A critic's last chunk gives values in their place: float32 [tokens, 1].
    """
    output = chunk(
        input_ids=packed.tokens,
        position_ids=packed.positions[None],
        attention_mask=None,
        packed_seq_params=packed.sequences,
    )
    return output[0] if unwrapped(chunk).post_process else output


def unwrapped(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DistributedDataParallel and the like."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def named_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every weight of this rank by its name in the weights manifest: chunk{c}.{name in that GPTModel}.

    These are the parameters without adapters, and of the buffers the routers' biases.
    """
    found = {}
    for index, chunk in enumerate(map(unwrapped, chunks)):
        for name, parameter in chunk.named_parameters():
            if ".adapter." not in name:  # those of lora.py are no weights of the model
                found[f"chunk{index}.{name}"] = parameter.data
        for name, buffer in chunk.named_buffers():
            if name.endswith("router.expert_bias"):
                found[f"chunk{index}.{name}"] = buffer
    return found
