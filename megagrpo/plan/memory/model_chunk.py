"""What one model chunk of a rank holds: gradient buffers for what is trained, and bytes of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.memory.gradient_buffers import Bucket, Buffer, Run, reversed_runs
from megagrpo.plan.parameters import ChunkContent, LayerShard, ModelShard, Parameter, chunk_content, model_shard
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.families.architecture import Architecture

FUSED_MATRICES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Names in train.lora.targets, by the linear layer in which Megatron has their matrices."""

Layers = Sequence[tuple[tuple[Parameter, ...], int]]
"""Parameters of a layer, and how many such layers follow one another."""


@dataclass(frozen=True)
class AdapterSizes:
    """Of train.lora: inner size, and names of the matrices that have an adapter."""

    rank: int
    targets: frozenset[str]


@dataclass(frozen=True)
class ChunkMemory:
    buffers: tuple[Buffer, ...]
    """Of the parameters that are trained."""

    frozen_bytes: int
    """Weights that are not trained, because their adapters are."""

    buffer_bytes: int
    """What modules register as buffers."""

    @property
    def trained(self) -> int:
        """Elements, without padding."""
        return sum(bucket.total for buffer in self.buffers for bucket in buffer.buckets)


@lru_cache(maxsize=1024)
def chunk_memory(
    arch: Architecture,
    layout: ParallelLayout,
    stage: int,
    chunk: int,
    dtype: str,
    fused: bool,
    adapters: AdapterSizes | None,
) -> ChunkMemory:
    """Of a model in `dtype`. `fused`: with transformer-engine's layers. Raises ModelError if it cannot be so split."""
    shard = model_shard(arch, layout.tensor, layout.expert, layout.expert_tensor, fused)
    content = chunk_content(arch, layout, stage, chunk)
    layers = [
        (layer, count)
        for layer, count in ((shard.dense, content.dense_layers), (shard.sparse, content.sparse_layers))
        if layer is not None and count
    ]
    # A router's bias, and a count of the tokens of each expert: both float32.
    buffer_bytes = sum(count * (2 * 4 * layer.router_bias + _yarn_bytes(arch, layout)) for layer, count in layers)
    if adapters is None:
        return ChunkMemory(_whole_model(arch, layout, dtype, shard, content, layers), 0, buffer_bytes)
    item = ITEM_BYTES[dtype]
    frozen = shard.embedding * content.embedding + shard.final_norm * content.final_norm + shard.head * content.head
    frozen += sum(count * parameter.elements for layer, count in layers for parameter in layer.parameters)
    buffer_bytes += sum(count * item * sum(_owners(layer, adapters)) for layer, count in layers)
    attached = [(tuple(_adapters(layer, adapters)), count) for layer, count in layers]
    buffers = [
        _buffer([_runs(attached, of_experts=False)], dtype),
        _buffer([_runs(attached, of_experts=True)], dtype, over_experts=True),
    ]
    return ChunkMemory(tuple(buffers), frozen * item, buffer_bytes)


def _whole_model(
    arch: Architecture,
    layout: ParallelLayout,
    dtype: str,
    shard: ModelShard,
    content: ChunkContent,
    layers: Sequence[tuple[LayerShard, int]],
) -> tuple[Buffer, ...]:
    """Buffers where all parameters are trained. Each distinct dtype has its own."""
    held = [(layer.parameters, count) for layer, count in layers]
    embedding, head = Run((shard.embedding,), int(content.embedding)), Run((shard.head,), int(content.head))
    apart = layout.expert > 1  # Megatron takes experts for dense parameters where expert is 1
    within = [*_runs(held, of_experts=False if apart else None), Run((shard.final_norm,), int(content.final_norm))]
    own_head = arch.value_head and dtype != "float32"
    if content.shares_embedding:
        buckets = [[head], within, [embedding]]
    else:
        buckets = [[embedding, *within, *([] if own_head else [head])]]
    buffers = [_buffer(buckets, dtype)]
    if own_head:
        buffers.append(_buffer([[head]], "float32"))
    if apart:
        buffers.append(_buffer([_runs(held, of_experts=True)], dtype, over_experts=True))
    return tuple(buffers)


def _yarn_bytes(arch: Architecture, layout: ParallelLayout) -> int:
    """Cosines and sines that every layer of latent attention keeps, float32, for this context rank's positions."""
    if arch.latent is None or arch.rope.yarn is None:
        return 0
    positions = arch.rope.yarn.original_max_positions // layout.context
    return 2 * 4 * positions * arch.latent.rotary_dim


def _runs(layers: Layers, of_experts: bool | None) -> list[Run]:
    """Of the parameters of experts, of the others, or of all (None)."""
    return [
        Run(tuple(p.elements for p in parameters if of_experts is None or p.of_expert == of_experts), count)
        for parameters, count in layers
    ]


def _buffer(buckets: Sequence[Sequence[Run]], dtype: str, over_experts: bool = False) -> Buffer:
    """`buckets` in the buffer's order, each with its runs in the model's."""
    runs = [reversed_runs(bucket) for bucket in buckets]
    return Buffer(tuple(Bucket(of_bucket) for of_bucket in runs if of_bucket), dtype, over_experts)


def _adapters(layer: LayerShard, adapters: AdapterSizes) -> Iterator[Parameter]:
    """A [parts x r, in] and B [out, r] of every linear layer that has some."""
    for linear, parts in _adapted(layer, adapters):
        rows, columns = linear.shape
        module = linear.name.removesuffix("weight")
        yield Parameter(f"{module}adapter.lora_A", (parts * adapters.rank, columns))
        yield Parameter(f"{module}adapter.lora_B", (rows, adapters.rank))


def _owners(layer: LayerShard, adapters: AdapterSizes) -> Iterator[int]:
    """Elements of the masks that say to which adapter a row of a fused layer belongs: one for each row and adapter."""
    for linear, parts in _adapted(layer, adapters):
        yield linear.shape[0] * parts


def _adapted(layer: LayerShard, adapters: AdapterSizes) -> Iterator[tuple[Parameter, int]]:
    """The weights of linear layers with adapters, and how many of the matrices in them have one."""
    for parameter in layer.parameters:
        module, _, kind = parameter.name.rpartition(".")
        matrices = FUSED_MATRICES.get(module.rpartition(".")[2], ())
        if kind == "weight" and (parts := len(adapters.targets.intersection(matrices))):
            yield parameter, parts
