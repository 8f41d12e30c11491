"""Parameters of a model and of a pipeline stage's ranks, and the published models to plan for.

One layer of each kind is counted, in the shapes that the weights' sides load, and multiplied by the number of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapreplace
from math import prod
from pathlib import Path

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk
from megagrpo.plan.units import spans
from megagrpo.recipe.schema import LoraConfig
from megagrpo.weights.blocks import BLOCK, QUANTIZED, lacking_manifest, quantized_shapes
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Tensor
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
    return _elements(arch)[0] + expert_parameters(arch)


def expert_parameters(arch: Architecture) -> int:
    """Returns the number of elements in all routed experts."""
    return _elements(arch)[1] * (arch.experts.count if arch.experts else 0)


def active_parameters(arch: Architecture) -> int:
    """Returns the elements that one token passes, embedding and head included: the second number in "235B-A22B"."""
    return _elements(arch)[0] + _elements(arch)[1] * (arch.experts.per_token if arch.experts else 0)


@lru_cache(maxsize=64)
def _elements(arch: Architecture) -> tuple[int, int]:
    """Returns the elements outside of routed experts, and those of one routed expert over all layers with experts."""
    counted = list(_counted(arch))
    of_expert = sum(elements for tensor, elements in counted if tensor.expert == 0)
    return sum(elements for tensor, elements in counted if tensor.expert is None), of_expert


def _counted(arch: Architecture) -> Iterator[tuple[Tensor, int]]:
    """Yields the tensors outside of layers and of one layer of each kind, with the elements of all such layers."""
    dense, sparse = layer_counts(arch, range(arch.layers))
    for tensor in tensors_of(sample_of(arch)):
        if not (tensor.role == "head" and arch.tied_embeddings):
            times = 1 if tensor.layer is None else dense if dense and tensor.layer == 0 else sparse
            yield tensor, times * prod(tensor.shape)


def layer_counts(arch: Architecture, layers: Iterable[int]) -> tuple[int, int]:
    """Counts the layers with an MLP, and those with experts."""
    first = arch.layers if arch.experts is None else arch.experts.dense_layers
    dense = total = 0
    for layer in layers:
        total += 1
        dense += layer < first
    return dense, total - dense


def sample_of(arch: Architecture, experts: int | None = None) -> Architecture:
    """Returns the same model with a head of its own and one layer of each kind, with `experts` experts if given."""
    layers, kind = 1, arch.experts
    if kind is not None:
        layers = 2 if kind.dense_layers else 1
        kind = replace(kind, dense_layers=layers - 1, count=experts or kind.count)
    return replace(arch, layers=layers, experts=kind, tied_embeddings=False)


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
    held = stages(arch.layers, layout)[stage]
    dense = experts = 0
    for count, (plain, routed) in zip(layer_counts(arch, held.layers), layers, strict=True):
        dense += count * plain
        experts += count * routed
    embedding = outside["chunk0.embedding.word_embeddings.weight"] if held.embedding else 0
    head = 0
    if held.head:
        dense += outside["chunk0.decoder.final_layernorm.weight"]
        if not (arch.tied_embeddings and held.embedding):  # a tied head on another stage is a second copy
            head = outside["chunk0.output_layer.weight"]
    return RankParameters(embedding, head, dense, experts)


def _cuts(layout: ParallelLayout) -> ParallelLayout:
    """Returns the sizes that cut a layer. All ranks have the shapes of the first, and no dtype changes a shape."""
    return ParallelLayout(tensor=layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)


def _manifest(sample: Architecture, cuts: ParallelLayout, fused: bool, rank: int = 0) -> Manifest:
    at, side = RankCoordinates(rank, rank, 0, 0, 0, 0, rank % cuts.expert_tensor, 0), TE_SPEC if fused else LOCAL_SPEC
    return side.manifest(sample, cuts, at, "bfloat16")


@lru_cache(maxsize=256)
def _training_shard(
    arch: Architecture, cuts: ParallelLayout, fused: bool
) -> tuple[dict[str, int], tuple[tuple[int, int], tuple[int, int]]]:
    """Returns `shard_of` of a training rank."""
    return shard_of(arch, _manifest(sample_of(arch, experts=cuts.expert), cuts, fused), cuts.expert)


@lru_cache(maxsize=256)
def matrices(
    arch: Architecture, layout: ParallelLayout, stage: int, fused: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the elements of each layer matrix on every rank of a stage, largest first: of those that all data ranks
    have, and of routed experts."""
    counts = layer_counts(arch, stages(arch.layers, layout)[stage].layers)
    dense, experts = list[int](), list[int]()
    for name, sparse, shape in _by_layer(arch, _manifest(sample_of(arch), _cuts(layout), fused)):
        if sparse is not None and len(shape) == 2:
            (experts if ".experts." in name else dense).extend([prod(shape)] * counts[sparse])
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

    whole: float
    """On every rank: norms, routers, projections down to latents."""
    attention: float
    """Shared by the ranks of one group: attention's heads and the vocabulary."""
    mlp: float
    """Shared by all ranks, as routed experts are."""
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
    dense, sparse = layer_counts(arch, stages(arch.layers, layout)[stage].layers)
    fetched = _fetched_in_layers(arch, _cuts(layout), fused)
    return max(dense * of_dense + sparse * of_sparse for of_dense, of_sparse in fetched)


@lru_cache(maxsize=256)
def _fetched_in_layers(arch: Architecture, cuts: ParallelLayout, fused: bool) -> list[list[int]]:
    """Returns, by tensor rank, the elements that it fetches for a layer with an MLP, and for one with experts."""
    sample = sample_of(arch, experts=cuts.expert)
    shapes, copies = quantized_shapes(sample), arch.experts.count // cuts.expert if arch.experts else 1
    fetched = [[0, 0] for _ in range(cuts.tensor)]
    for rank, layers in enumerate(fetched):
        for name, sparse, shape in _by_layer(arch, lacking_manifest(_manifest(sample, cuts, fused, rank), shapes)):
            layers[bool(sparse)] += prod(shape) * (copies if ".experts." in name else 1)
    return fetched


def shard_of(
    arch: Architecture, sample: Manifest, experts: int
) -> tuple[dict[str, int], tuple[tuple[int, int], tuple[int, int]]]:
    """Returns the elements outside of layers by name, and those of one layer with an MLP and of one with experts. The
    elements of a layer are those outside and inside of routed experts. `sample` has `experts` experts in a layer."""
    outside: dict[str, int] = {}
    layers = [[0, 0], [0, 0]]
    for name, sparse, shape in _by_layer(arch, sample):
        if sparse is None:
            outside[name] = prod(shape)
        elif not name.endswith("router.expert_bias"):  # no parameter of Megatron's
            layers[sparse][".experts." in name] += prod(shape)
    (dense, _), (plain, routed) = layers
    if arch.experts is not None:
        plain += (arch.experts.count - experts) * arch.hidden
        routed = routed * arch.experts.count // experts
    return outside, ((dense, 0), (plain, routed))


def _by_layer(arch: Architecture, sample: Manifest) -> Iterator[tuple[str, bool | None, tuple[int, ...]]]:
    """Yields the name and shape of each storage of a `sample_of`, with the kind of its layer: True with experts, False
    with an MLP, None outside of layers."""
    for name, storage in sample.storages.items():
        layer = re.search(r"\blayers\.(\d+)\.", name)
        sparse = arch.experts is not None and not (arch.has_dense_layers and layer and layer[1] == "0")
        yield name, sparse if layer else None, storage.shape


# --- adapters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of a rank, of a layer with experts if `sparse`, with adapters on `parts` matrices fused in it."""

    sparse: bool
    of_expert: bool
    parts: int
    columns: int
    rows: int


@lru_cache(maxsize=256)
def layer_adapters(arch: Architecture, cuts: ParallelLayout, targets: tuple[str, ...]) -> list[AdaptedLinear]:
    """Returns the adapted linears of a layer with an MLP and of one with experts, of which a rank has one here."""
    sample = sample_of(arch, experts=cuts.expert)
    base = _manifest(sample, cuts, fused=False)
    kinds = {name: bool(sparse) for name, sparse, _ in _by_layer(arch, base)}
    return [
        AdaptedLinear(
            kinds[of.weight], ".experts." in of.weight, len(of.parts), of.columns, base.storages[of.weight].shape[0]
        )
        for of in adapted_linears(sample, base, targets)
    ]


def adapter_parameters(arch: Architecture, layout: ParallelLayout, stage: int, lora: LoraConfig) -> RankParameters:
    """Returns the adapters' elements on every rank of a stage: A [parts x r, columns] and B [rows, r] per linear."""
    held = {False: 0, True: 0}
    counts = layer_counts(arch, stages(arch.layers, layout)[stage].layers)
    for linear in layer_adapters(arch, _cuts(layout), tuple(lora.targets)):
        elements = counts[linear.sparse] * lora.rank * (linear.parts * linear.columns + linear.rows)
        held[linear.of_expert] += elements
    return RankParameters(0, 0, held[False], held[True] * (arch.experts.count // layout.expert if arch.experts else 0))
