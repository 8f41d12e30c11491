"""Megatron's GPTModels on one rank, one per model chunk: their layers, and schedules over packed microbatches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.attention import PackedAttention, PackedLatentAttention, inverse_frequencies
from megagrpo.megatron.batch import Packed
from megagrpo.megatron.heads import OutputLayer, ValueHead
from megagrpo.weights.families import parts
from megagrpo.weights.families.architecture import Architecture, Layer


def build_chunks(arch: Architecture, config: TransformerConfig, layout: ParallelLayout) -> list[GPTModel]:
    """Builds this rank's model chunks, one unless virtual_pipeline > 1. The caller loads their weights.

    Collective over all ranks, after process.start_parallel.
    """
    if config.deterministic_mode:
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine reads it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)
    fused, device = config.transformer_impl == "transformer_engine", torch.cuda.current_device()
    chunks = []
    for vp_stage in range(layout.virtual_pipeline) if layout.virtual_pipeline > 1 else (None,):
        if vp_stage is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        where: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        chunk = GPTModel(
            config,
            block_spec(config, arch, vp_stage),
            vocab_size=arch.padded_vocab(layout.tensor),
            max_sequence_length=arch.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope" if fused else "none",  # our attention and latent attention rotate themselves
            vp_stage=vp_stage,
        )
        if fused and not config.multi_latent_attention:
            # GPTModel's arguments cannot express all of Llama 3's scaling.
            chunk.rotary_pos_emb.inv_freq = inverse_frequencies(arch.rope, config.kv_channels).to(device)
        if chunk.post_process:
            chunk.output_layer = ValueHead(config) if arch.value_head else OutputLayer(chunk.output_layer)
        chunk.to(device)  # Megatron makes routers' weights on the CPU
        chunks.append(chunk)
    return chunks


def unwrapped(chunk: torch.nn.Module) -> GPTModel:
    """Returns the GPTModel inside DistributedDataParallel and other wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def named_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Returns every weight of this rank by its name in the weights manifest: chunk{c}.{name in that GPTModel}.

    Weights are all parameters but the adapters', and the routers' biases, which are buffers.
    """
    weights: dict[str, torch.Tensor] = {}
    for index, chunk in enumerate(map(unwrapped, chunks)):
        parameters = {name: one.data for name, one in chunk.named_parameters() if ".adapter." not in name}
        biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
        weights |= {f"chunk{index}.{name}": tensor for name, tensor in (parameters | biases).items()}
    return weights


def block_spec(config: TransformerConfig, arch: Architecture, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Returns the modules of one model chunk's layers, by config.transformer_impl."""
    if config.transformer_impl == "transformer_engine":
        # flash-attn 4, which SGLang installs, has no backward pass before sm90. Its 4.0.0b36 returns zeros for causal
        # attention, without an error, called as Transformer Engine 2.17.1 does (Transformer Engine's issue 3528).
        from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils

        FlashAttentionUtils.v4_is_installed, FlashAttentionUtils.v4_warning_printed = False, True
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if config.multi_latent_attention:
            for layer in block.layer_specs:
                layer.submodules.self_attention.module = LatentAttention
        return block
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    of_chunk = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [_local_layer(config, arch.layers[layer]) for layer in of_chunk]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _local_layer(config: TransformerConfig, layer: Layer) -> ModuleSpec:
    """Returns Megatron's local layer with our norm and our attention over packed sequences."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if layer.mlp.experts else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    ATTENTION[type(layer.attention)](spec.submodules.self_attention, layer.attention)
    return spec


def _grouped_attention(spec: ModuleSpec, part: parts.Attention) -> None:
    modules = spec.submodules
    modules.core_attention = ModuleSpec(module=PackedAttention, params={"rope": part.rope})
    if part.norm:
        modules.q_layernorm = modules.k_layernorm = RMSNorm


def _latent_attention(spec: ModuleSpec, part: parts.LatentAttention) -> None:
    modules, spec.module = spec.submodules, LatentAttention
    modules.core_attention = ModuleSpec(module=PackedLatentAttention, params={"rope": part.rope})
    modules.q_layernorm = modules.kv_layernorm = RMSNorm


ATTENTION: dict[type, Callable[[ModuleSpec, Any], None]] = {
    parts.Attention: _grouped_attention,
    parts.LatentAttention: _latent_attention,
}
"""Functions that set the modules of a part in the spec of Megatron's self-attention."""


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention, made of the modules in its spec, with values of their own size, as before 0.19.

    Megatron 0.19 decides once more where norms are, and asks queries without a latent to have one before their
    projection: such models have none there. It pads the values of packed sequences to the size of keys, which makes
    attention slower (github.com/NVIDIA/Megatron-LM/issues/6240).
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _run_core_attention(self, *tensors: Any, **arguments: Any) -> Tensor:
        if arguments.get("attn_mask_type") is None:
            arguments["attn_mask_type"] = self.attn_mask_type
        return self.core_attention(*tensors, **arguments)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467). Megatron's own local norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each tensor rank sees its part of the sequence; finalize_model_grads sums the gradients of what is so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


Loss = Callable[[int, Tensor], Tensor]
"""(index of the microbatch, the last chunk's output for it) -> the microbatch's part of the loss, a scalar.

The output is hidden states [tokens, hidden] in the model's dtype, after the last norm, for all tokens of this context
rank, also with sequence parallelism. A critic's are values: float32 [tokens, 1]."""


def sum_gradients(config: TransformerConfig) -> None:
    """Makes schedules end a backward pass with plain sums of gradients over all ranks and microbatches.

    The loss's denominators are global already, so Megatron must not divide by a token count of its own.
    """

    def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **arguments: Any) -> None:
        finalize_model_grads(chunks, None, **arguments)

    config.finalize_model_grads_func = finalize


def forward(chunks: Sequence[torch.nn.Module], microbatches: Sequence[Packed], loss: Loss) -> None:
    """Runs a pass without gradients. On the last stage `loss` is called with every microbatch's output."""
    if microbatches:  # Megatron's schedules need one
        with torch.no_grad():
            forward_backward(chunks, microbatches, loss, forward_only=True)


def forward_backward(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[Packed], loss: Loss, *, forward_only: bool = False
) -> None:
    """Runs a pass with gradients: adds those of the sum of all losses to the chunks' buffers, reduced over ranks."""
    sizes = {packed.tokens.shape[-1] for packed in microbatches}
    config = unwrapped(chunks[0]).config
    config.variable_seq_lengths = len(sizes) > 1  # stages then tell each other the size of each
    iterators = [iter(enumerate(microbatches)) for _ in chunks]

    def step(iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Returns a chunk's output, and the function that makes of it Megatron's triple: loss, token count, report.

        The count is not used (sum_gradients).
        """
        index, packed = next(iterator)
        none = torch.zeros((), dtype=torch.int, device=packed.tokens.device)
        output = chunk(
            input_ids=packed.tokens,
            position_ids=packed.sequences.positions[None],
            attention_mask=None,
            packed_seq_params=packed.sequences,
        )
        output = output[0] if unwrapped(chunk).post_process else output
        return output, lambda output: (loss(index, output), none, None)

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=max(sizes) * config.context_parallel_size,
        micro_batch_size=1,
        forward_only=forward_only,
    )
