"""Megatron's GPTModels on one rank, one per model chunk: their layers, and schedules over packed microbatches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.batch import Batch, Packed, ResponseTokens, TokenTensors
from megagrpo.megatron.heads import OutputLayer, ValueHead
from megagrpo.megatron.layers import block_spec
from megagrpo.megatron.rotary import inverse_frequencies
from megagrpo.weights.families.architecture import Architecture


def build_chunks(arch: Architecture, config: TransformerConfig, layout: ParallelLayout) -> list[GPTModel]:
    """Builds this rank's model chunks, one unless virtual_pipeline > 1. The caller loads their weights.

    Collective over all ranks, after process.start_parallel.
    """
    if config.deterministic_mode:
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine reads it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)
    fused, device = config.transformer_impl == "transformer_engine", torch.cuda.current_device()
    embedding_scale = torch.tensor(arch.embedding_scale, dtype=config.params_dtype).item()  # as Gemma's in transformers
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
        if chunk.pre_process and embedding_scale != 1.0:
            chunk.embedding.word_embeddings.register_forward_hook(lambda _, __, output: output * embedding_scale)
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


@contextmanager
def other_weights(parameters: Iterable[torch.nn.Parameter], weights: Iterable[Tensor]) -> Iterator[None]:
    """Puts `weights` behind these parameters inside the block. Gradients still go to the parameters."""
    own = [(parameter, parameter.data) for parameter in parameters]
    try:
        for (parameter, _), weight in zip(own, weights, strict=True):
            parameter.data = weight
        yield
    finally:
        for parameter, weight in own:
            parameter.data = weight


Loss = Callable[[int, Tensor], Tensor]
"""(index of the microbatch, the last chunk's output for it) -> the microbatch's part of the loss, a scalar.

The output is hidden states [tokens, hidden] in the model's dtype, after the last norm, for all tokens of this context
rank, also with sequence parallelism. A critic's are values: float32 [tokens, 1]."""


def sum_gradients(config: TransformerConfig) -> None:
    """Makes schedules end a backward pass with plain sums of gradients over all ranks and microbatches.

    The loss's denominators are global already, so Megatron must not divide by a token count of its own.
    """
    if config.transformer_impl == "local":  # norms are marked; by this Megatron also sums those that tensor ranks share
        config.qk_layernorm = False

    def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **arguments: Any) -> None:
        finalize_model_grads(chunks, None, **arguments)

    config.finalize_model_grads_func = finalize


def forward(chunks: Sequence[torch.nn.Module], microbatches: Sequence[Packed], loss: Loss) -> None:
    """Runs a pass without gradients. On the last stage `loss` is called with every microbatch's output."""
    if microbatches:  # Megatron's schedules need one
        with torch.no_grad():
            forward_backward(chunks, microbatches, loss, forward_only=True)


def read_tokens(
    chunks: Sequence[torch.nn.Module], batch: Batch, read: Callable[[Tensor, ResponseTokens], Tensor]
) -> TokenTensors:
    """Runs a pass over the batch without gradients. Returns the result of `read` for each response token.

    `read` takes the last stage's output for a microbatch and its response tokens, and returns [response tokens, ...].
    """
    results: dict[int, Tensor] = {}

    def keep(index: int, output: Tensor) -> Tensor:
        joined, parts = batch.joined[index]
        values = read(output, *joined.responses)
        lengths = [len(batch.responses[part].rows) for part in parts]
        results.update(zip(parts, values.split(lengths), strict=True))
        return values.sum()

    forward(chunks, [joined for joined, _ in batch.joined], keep)
    return tuple(results[part] for part in sorted(results))


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
