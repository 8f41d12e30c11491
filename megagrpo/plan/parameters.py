"""What parameters a training rank holds, counted once for each kind of layer: no list of a whole model's tensors.

Shapes come from the weights' sides, which also load them; the order is that in which Megatron's modules register them,
because its buffers lay parameters out by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.boxes import Storage
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC

MODULES = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts.local_experts",
    "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Of a transformer layer, in the order in which they are registered (megatron.core 0.16)."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of one layer on one rank; `name` is relative to the layer."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def of_expert(self) -> bool:
        return self.name.startswith("mlp.experts.")


@dataclass(frozen=True)
class LayerShard:
    """A rank's part of a layer, in Megatron's order."""

    parameters: tuple[Parameter, ...]
    router_bias: int
    """Elements of the bias that chooses experts, which is no parameter."""


@dataclass(frozen=True)
class ModelShard:
    """A rank's part of every kind of layer and of what is outside the layers: elements, with the vocabulary's padding.

    `dense` is a layer with an MLP, `sparse` one with experts; None where the model has none.
    """

    dense: LayerShard | None
    sparse: LayerShard | None
    embedding: int
    final_norm: int
    head: int
    """Over the vocabulary, or a critic's: its own, or the second copy of a tied embedding."""


@dataclass(frozen=True)
class ChunkContent:
    """What one model chunk holds: how many layers of each kind, and whether it has the ends of the model."""

    dense_layers: int
    sparse_layers: int
    embedding: bool
    final_norm: bool
    head: bool
    """A head of its own. A tied one on the embedding's stage is the embedding."""
    shares_embedding: bool
    """Its embedding or its head is one of two copies of a tied embedding, on the first and the last stage."""


@dataclass(frozen=True)
class RankParameters:
    """Elements that a rank holds, with the vocabulary's padding. `dense` is all that is none of the others: attention,
    MLPs, shared experts, norms and routers."""

    embedding: int
    head: int
    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.dense + self.experts


def fused_layers(train: TrainConfig, device: str) -> bool:
    """Whether ranks on `device` (cpu or cuda) have transformer-engine's layers.

    A plan takes `layer_spec: auto` on CUDA for a machine that has transformer-engine, whatever this one has. Adapters
    are on Megatron's local layers.
    """
    if train.layer_spec == "auto":
        return device == "cuda" and train.lora is None
    return train.layer_spec == "transformer_engine"


@lru_cache(maxsize=1024)
def rank_parameters(arch: Architecture, layout: ParallelLayout, stage: int, fused: bool) -> RankParameters:
    """Of any rank of a pipeline stage: they all hold equally many."""
    shard = model_shard(arch, layout.tensor, layout.expert, layout.expert_tensor, fused)
    contents = [chunk_content(arch, layout, stage, chunk) for chunk in range(layout.virtual_pipeline)]
    dense = sum(shard.final_norm for content in contents if content.final_norm)
    experts = 0
    for layer, count in (
        (shard.dense, sum(content.dense_layers for content in contents)),
        (shard.sparse, sum(content.sparse_layers for content in contents)),
    ):
        if layer is not None:
            dense += count * sum(p.elements for p in layer.parameters if not p.of_expert)
            experts += count * sum(p.elements for p in layer.parameters if p.of_expert)
    embedding = sum(shard.embedding for content in contents if content.embedding)
    head = sum(shard.head for content in contents if content.head)
    return RankParameters(embedding, head, dense, experts)


@lru_cache(maxsize=64)
def total_parameters(arch: Architecture) -> int:
    """Elements of the checkpoint's tensors; a tied embedding counts once."""
    return _elements(arch, arch.experts.count if arch.experts else 0)


@lru_cache(maxsize=64)
def expert_parameters(arch: Architecture) -> int:
    """Those of total_parameters that are in routed experts."""
    return total_parameters(arch) - _elements(arch, 0)


@lru_cache(maxsize=64)
def active_parameters(arch: Architecture) -> int:
    """Those that one token passes, embedding and head included: of a layer's experts `per_token` and the shared ones.

    It is the second number in names such as 235B-A22B. The same as total_parameters without experts.
    """
    return _elements(arch, arch.experts.per_token if arch.experts else 0)


def chunk_content(arch: Architecture, layout: ParallelLayout, stage: int, chunk: int) -> ChunkContent:
    layers = layers_of_chunk(arch.layers, layout, stage, chunk)
    dense = sum(layer < _dense_layers(arch) for layer in layers)
    first = stage == 0 and chunk == 0
    last = stage == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1
    return ChunkContent(
        dense_layers=dense,
        sparse_layers=len(layers) - dense,
        embedding=first,
        final_norm=last,
        head=last and not (arch.tied_embeddings and first),
        shares_embedding=arch.tied_embeddings and first != last,
    )


@lru_cache(maxsize=256)
def model_shard(arch: Architecture, tensor: int, expert: int, expert_tensor: int, fused: bool) -> ModelShard:
    """Raises ModelError if these sizes do not divide the model."""
    sample = _sample(arch)
    layout = ParallelLayout(tensor=tensor, expert=expert, expert_tensor=expert_tensor)
    side = TE_SPEC if fused else LOCAL_SPEC
    # float32 or bfloat16 does not change a shape, and every rank's shapes are those of the first.
    held = side.manifest(sample, layout, RankCoordinates(0, 0, 0, 0, 0, 0, 0, 0), "float32").storages
    elements = {name: prod(storage.shape) for name, storage in held.items()}
    layers = [_layer(held, f"chunk0.decoder.layers.{index}.") for index in range(sample.layers)]
    return ModelShard(
        dense=layers[0] if arch.has_dense_layers else None,
        sparse=layers[-1] if arch.experts else None,
        embedding=elements["chunk0.embedding.word_embeddings.weight"],
        final_norm=elements["chunk0.decoder.final_layernorm.weight"],
        head=elements["chunk0.output_layer.weight"],
    )


def _sample(arch: Architecture) -> Architecture:
    """The same model with one layer of each kind that it has, and a head of its own."""
    layers, experts = 1, arch.experts
    if experts is not None and experts.dense_layers:
        layers, experts = 2, replace(experts, dense_layers=1)
    return replace(arch, layers=layers, experts=experts, tied_embeddings=False)


def _layer(held: Mapping[str, Storage], prefix: str) -> LayerShard:
    parameters, bias = [], 0
    for name, storage in held.items():
        if not name.startswith(prefix):
            continue
        if name.endswith("router.expert_bias"):
            bias = prod(storage.shape)
        else:
            parameters.append(Parameter(name.removeprefix(prefix), storage.shape))
    return LayerShard(tuple(sorted(parameters, key=_place)), bias)


def _place(parameter: Parameter) -> tuple[int, bool]:
    """Sorts by module, and a norm inside a fused linear layer before its weight; the rest stays in order."""
    module = next(index for index, name in enumerate(MODULES) if parameter.name.startswith(f"{name}."))
    return module, not parameter.name.endswith("layer_norm_weight")


def _elements(arch: Architecture, experts: int) -> int:
    """Of the checkpoint, with `experts` experts in a layer that has some."""
    sample = _sample(arch)
    outside, per_layer, of_expert = 0, [0] * sample.layers, 0
    for tensor in tensors_of(sample):
        if tensor.role == "head" and arch.tied_embeddings:
            continue
        if tensor.layer is None:
            outside += prod(tensor.shape)
        elif tensor.expert is None:
            per_layer[tensor.layer] += prod(tensor.shape)
        elif tensor.expert == 0:
            of_expert += prod(tensor.shape)
    dense = _dense_layers(arch)
    sparse = arch.layers - dense
    return outside + dense * per_layer[0] + sparse * (per_layer[-1] + experts * of_expert)


def _dense_layers(arch: Architecture) -> int:
    return arch.layers if arch.experts is None else arch.experts.dense_layers
