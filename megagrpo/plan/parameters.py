"""Parameters of a model and of a pipeline stage's ranks, and the published models to plan for.

One layer of each kind is counted, in the shapes that the weights' sides load, and multiplied by the number of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from math import prod
from operator import mul
from pathlib import Path
from typing import NamedTuple

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk
from megagrpo.plan.units import spans
from megagrpo.recipe.schema import LoraConfig
from megagrpo.weights.blocks import BLOCK, QUANTIZED, lacking_manifest, quantized_shapes
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.part import Role, Tensor
from megagrpo.weights.files.adapters import adapted_linears
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC

CONFIGS = Path(__file__).with_name("configs")


def known_models() -> dict[str, Path]:
    """Returns the directories of published models, by hub id such as Qwen/Qwen3-8B, with their config.json alone.

    They come with megagrpo, so that a plan needs neither a network nor a download.
    """
    return {"/".join(file.parts[-3:-1]): file.parent for file in sorted(CONFIGS.glob("*/*/config.json"))}


# --- whole models ----------------------------------------------------------------------------------------------------


def total_parameters(arch: Architecture) -> int:
    """Returns the number of elements in the checkpoint's tensors; a tied embedding counts once."""
    return _elements(arch).outside + expert_parameters(arch)


def expert_parameters(arch: Architecture) -> int:
    """Returns the number of elements in all routed experts."""
    return sum(elements * kind.mlp.experts for kind, elements in _elements(arch).of_expert.items())


def active_parameters(arch: Architecture) -> int:
    """Returns the elements that one token passes, embedding and head included: the second number in "235B-A22B"."""
    of_token = sum(elements * kind.mlp.per_token for kind, elements in _elements(arch).of_expert.items())
    return _elements(arch).outside + of_token


class _Elements(NamedTuple):
    """The elements outside of routed experts, and for each kind of layer those of one expert over all its layers."""

    outside: int
    of_expert: Mapping[Layer, int]


@lru_cache(maxsize=64)
def _elements(arch: Architecture) -> _Elements:
    kinds, outside = list(arch.kinds), 0
    of_expert = dict.fromkeys(kinds, 0)
    for tensor, elements in _counted(arch):
        if tensor.expert is None:
            outside += elements
        elif tensor.expert == 0 and tensor.layer is not None:
            of_expert[kinds[tensor.layer]] += elements
    return _Elements(outside, of_expert)


def _counted(arch: Architecture) -> Iterator[tuple[Tensor, int]]:
    """Yields the tensors outside of layers and of one layer of each kind, with the elements of all such layers."""
    counts = list(arch.kinds.values())
    for tensor in tensors_of(arch.sample()):
        if not (tensor.role == "head" and arch.tied_embeddings):
            yield tensor, (1 if tensor.layer is None else counts[tensor.layer]) * prod(tensor.shape)


BLOCK_ELEMENT_BYTES = 1 + 4 / BLOCK**2
"""An element in float8, with its part of a scale."""

# --- ranks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: layers of each of its model chunks, from 0, and whether the embedding or the head is there."""

    chunks: tuple[range, ...]
    embedding: bool
    head: bool

    @property
    def layers(self) -> list[int]:
        return [layer for chunk in self.chunks for layer in chunk]

    @property
    def text(self) -> str:
        """Returns a text such as `embedding, 0-4, 20-24`."""
        return ", ".join([*["embedding"] * self.embedding, spans(self.layers), *["head"] * self.head])


@lru_cache(maxsize=4096)
def stages(layers: int, layout: ParallelLayout) -> tuple[Stage, ...]:
    """Returns every stage of a model with `layers` layers."""
    last = layout.pipeline - 1
    chunks = range(layout.virtual_pipeline)
    return tuple(
        Stage(tuple(layers_of_chunk(layers, layout, stage, chunk) for chunk in chunks), stage == 0, stage == last)
        for stage in range(layout.pipeline)
    )


@dataclass(frozen=True)
class RankParameters:
    """Elements that one rank holds, with the vocabulary's padding. `dense` counts all the others: attention, MLPs,
    shared experts, norms and routers."""

    embedding: int
    head: int
    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.dense + self.experts

    def share(self, layout: ParallelLayout) -> int:
        """Returns the elements of one data rank, of those that all data ranks hold together."""
        dense = self.total - self.experts
        return -(-dense // (layout.data * layout.context)) + -(-self.experts // layout.expert_data)


@lru_cache(maxsize=4096)
def rank_parameters(arch: Architecture, layout: ParallelLayout, stage: int, fused: bool) -> RankParameters:
    """Returns the elements on every rank of a pipeline stage. Raises ModelError if sizes do not divide the model."""
    outside, layers = _training_shard(arch, _cuts(layout), fused)
    held = stages(len(arch.layers), layout)[stage]
    dense = experts = 0
    for kind, count in arch.count(held.layers).items():
        plain, routed = layers[kind]
        dense += count * plain
        experts += count * routed
    embedding = outside["embedding"] if held.embedding else 0
    head = 0
    if held.head:
        dense += outside["final_norm"]
        if not (arch.tied_embeddings and held.embedding):  # a tied head on another stage is a second copy
            head = outside["value_head" if arch.value_head else "head"]
    return RankParameters(embedding, head, dense, experts)


def _cuts(layout: ParallelLayout) -> ParallelLayout:
    """Returns the sizes that cut a layer. All ranks have the shapes of the first, and no dtype changes a shape."""
    return ParallelLayout(tensor=layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)


def _manifest(sample: Architecture, cuts: ParallelLayout, fused: bool, rank: int = 0) -> Manifest:
    at, side = RankCoordinates(rank, rank, 0, 0, 0, 0, rank % cuts.expert_tensor, 0), TE_SPEC if fused else LOCAL_SPEC
    return side.manifest(sample, cuts, at, "bfloat16")


@lru_cache(maxsize=256)
def _training_shard(arch: Architecture, cuts: ParallelLayout, fused: bool) -> Shard:
    """Returns the shard of a training rank. What is not trained is no parameter of Megatron's."""
    sample = arch.sample(experts=cuts.expert)
    return shard_of(arch, sample, _manifest(sample, cuts, fused), lambda tensor: tensor.trained)


@lru_cache(maxsize=256)
def matrices(
    arch: Architecture, layout: ParallelLayout, stage: int, fused: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the elements of each layer matrix on every rank of a stage, largest first: of those that all data ranks
    have, and of routed experts."""
    counts = arch.tally(stages(len(arch.layers), layout)[stage].layers)
    dense, experts = list[int](), list[int]()
    for name, layer, shape in _by_layer(_manifest(arch.sample(), _cuts(layout), fused)):
        if layer is not None and len(shape) == 2:
            (experts if ".experts." in name else dense).extend([prod(shape)] * counts[layer])
    return tuple(sorted(dense, reverse=True)), tuple(sorted(experts, reverse=True))


def largest_share(sizes: Sequence[int], ranks: int) -> int:
    """Returns the elements of the fullest of `ranks` ranks. Each matrix goes to the emptiest, the largest first."""
    held = [0] * ranks
    for size in sizes:
        heapreplace(held, held[0] + size)
    return max(held)


@dataclass(frozen=True)
class WeightBytes:
    """The bytes of all weights as engines get them, by the ranks of a stage that share them."""

    whole: float  # on every rank: norms, routers, projections down to latents
    attention: float  # shared by the ranks of one group: attention's heads and the vocabulary
    mlp: float  # shared by all ranks, as routed experts are
    experts: float

    @property
    def total(self) -> float:
        return self.whole + self.attention + self.mlp + self.experts


ON_EVERY_RANK = re.compile("norm|_down|router")
SHARED_BY_ALL = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")


@lru_cache(maxsize=256)
def model_bytes(arch: Architecture, item_bytes: int, *, quantized: bool) -> WeightBytes:
    shared = {"whole": 0.0, "attention": 0.0, "mlp": 0.0}
    for tensor, elements in _counted(arch):
        if tensor.expert is not None:
            continue
        element_bytes = BLOCK_ELEMENT_BYTES if quantized and tensor.role in QUANTIZED else item_bytes
        whole = "whole" if ON_EVERY_RANK.search(tensor.role) else "attention"
        shared["mlp" if tensor.role in SHARED_BY_ALL else whole] += elements * element_bytes
    experts = expert_parameters(arch) * (BLOCK_ELEMENT_BYTES if quantized else item_bytes)
    return WeightBytes(**shared, experts=experts)


def fetched_elements(arch: Architecture, layout: ParallelLayout, stage: int, fused: bool) -> int:
    """Returns the most elements of blocks cut between ranks that a rank of a stage fetches to quantise its own."""
    counts = arch.tally(stages(len(arch.layers), layout)[stage].layers)
    return max(sum(map(mul, counts, of_rank)) for of_rank in _fetched_in_layers(arch, _cuts(layout), fused))


@lru_cache(maxsize=256)
def _fetched_in_layers(arch: Architecture, cuts: ParallelLayout, fused: bool) -> list[list[int]]:
    """Returns, by tensor rank, the elements that it fetches for one layer of each kind."""
    sample = arch.sample(experts=cuts.expert)
    shapes, copies = quantized_shapes(sample), [kind.mlp.experts // cuts.expert for kind in arch.kinds]
    fetched = [[0] * len(copies) for _ in range(cuts.tensor)]
    for rank, layers in enumerate(fetched):
        for name, layer, shape in _by_layer(lacking_manifest(_manifest(sample, cuts, fused, rank), shapes)):
            if layer is not None:
                layers[layer] += prod(shape) * (copies[layer] if ".experts." in name else 1)
    return fetched


class Shard(NamedTuple):
    """The elements on one rank: outside of layers by role, and of one layer of each kind outside and inside of routed
    experts."""

    outside: dict[Role, int]
    layers: dict[Layer, tuple[int, int]]


def shard_of(arch: Architecture, sample: Architecture, held: Manifest, counted: Callable[[Tensor], bool]) -> Shard:
    """Returns a rank's shard of the `counted` tensors, from what it holds of a `sample` with fewer experts."""
    tensors = {tensor.name: tensor for tensor in tensors_of(sample)}
    left_out = {its.storage for its in held.placements if not counted(tensors[its.box.tensor])}
    roles = {its.storage: tensors[its.box.tensor].role for its in held.placements}
    outside, layers = dict[Role, int](), [[0, 0] for _ in sample.layers]
    for name, layer, shape in _by_layer(held):
        if name in left_out:
            continue
        if layer is None:
            outside[roles[name]] = prod(shape)
        else:
            layers[layer][".experts." in name] += prod(shape)
    whole = {}
    for kind, its, (plain, routed) in zip(arch.kinds, sample.layers, layers, strict=True):
        if experts := its.mlp.experts:
            routed = routed * kind.mlp.experts // experts
            plain += (kind.mlp.experts - experts) * _router_row(kind, counted)
        whole[kind] = plain, routed
    return Shard(outside, whole)


def _router_row(layer: Layer, counted: Callable[[Tensor], bool]) -> int:
    """Returns the elements outside of routed experts that each further expert adds to a layer. Every rank has them."""
    one, two = (
        sum(prod(tensor.shape) for tensor in sample.tensors(0) if tensor.expert is None and counted(tensor))
        for sample in (layer.with_experts(1), layer.with_experts(2))
    )
    return two - one


def _by_layer(sample: Manifest) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
    """Yields the name and shape of each storage, with the number of its layer, None outside of layers."""
    for name, storage in sample.storages.items():
        layer = re.search(r"\blayers\.(\d+)\.", name)
        yield name, int(layer[1]) if layer else None, storage.shape


# --- adapters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of a rank, with adapters on `parts` matrices fused in it."""

    of_expert: bool
    parts: int
    columns: int
    rows: int


@lru_cache(maxsize=256)
def layer_adapters(
    arch: Architecture, cuts: ParallelLayout, targets: tuple[str, ...]
) -> Mapping[Layer, list[AdaptedLinear]]:
    """Returns the adapted linears of one layer of each kind, of whose experts a rank has one here."""
    sample = arch.sample(experts=cuts.expert)
    base = _manifest(sample, cuts, fused=False)
    layers = {name: layer for name, layer, _ in _by_layer(base)}
    linears: list[list[AdaptedLinear]] = [[] for _ in sample.layers]
    for of in adapted_linears(sample, base, targets):
        if (layer := layers[of.weight]) is not None:
            rows = base.storages[of.weight].shape[0]
            linears[layer].append(AdaptedLinear(".experts." in of.weight, len(of.parts), of.columns, rows))
    return dict(zip(arch.kinds, linears, strict=True))


def adapter_parameters(arch: Architecture, layout: ParallelLayout, stage: int, lora: LoraConfig) -> RankParameters:
    """Returns the adapters' elements on every rank of a stage: A [parts x r, columns] and B [rows, r] per linear."""
    dense = experts = 0
    adapters = layer_adapters(arch, _cuts(layout), tuple(lora.targets))
    for kind, count in arch.count(stages(len(arch.layers), layout)[stage].layers).items():
        for linear in adapters[kind]:
            elements = count * lora.rank * (linear.parts * linear.columns + linear.rows)
            if linear.of_expert:
                experts += elements * (kind.mlp.experts // layout.expert)
            else:
                dense += elements
    return RankParameters(0, 0, dense, experts)
