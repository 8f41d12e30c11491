"""Megatron-LM's torch_dist checkpoints: tensors of the whole model, whatever the layout of the ranks that wrote them.

They are the parameters of a single rank that holds everything, under the names of GPTModel.sharded_state_dict
(megatron.core 0.19). If all layers of the model are alike, they are one tensor with the layer as its first axis and the
expert as its second; where layers differ, each has its own keys. The two layer specs name a few norms differently:
a checkpoint that we write has both names, and either is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from megagrpo.errors import ModelError, Problem
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Fill, Manifest, Placement, Storage
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC

IN_LAYER = re.compile(r"chunk0\.decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d*)")
LOCAL_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""The renaming of the norms of Megatron's local layer in a checkpoint. Layers with latent attention keep theirs."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
WITHOUT_EXTRA_STATE = ("embedding.word_embeddings", "output_layer", "router")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a stored tensor that is one parameter of one layer, or of one expert."""

    stored: Storage
    start: tuple[int, ...]
    shape: tuple[int, ...]
    layer: int | None
    placements: tuple[Placement, ...]


def written(arch: Architecture, dtypes: Mapping[str, str]) -> list[Chunk]:
    """Returns the parts of the tensors to be written, in the order of the model. `dtypes` are those of the checkpoint
    tensors.

    A fused tensor of parts in different dtypes has the smallest dtype that holds all of them exactly.
    """
    chunks = dict.fromkeys(chunk for of_spec in _ways(arch) for chunk in of_spec[0])
    parts: dict[str, set[str]] = defaultdict(set)
    for chunk in chunks:
        parts[chunk.stored.name] |= {dtypes[placement.box.tensor] for placement in chunk.placements}
    return [
        replace(chunk, stored=replace(chunk.stored, dtype=common_dtype(parts[chunk.stored.name]))) for chunk in chunks
    ]


def stored_manifest(arch: Architecture, stored: Mapping[str, Storage], holder: str) -> Manifest:
    """Returns the model's manifest in a checkpoint with these tensors. Rows of padding are fills. Raises ModelError."""
    ways = [chunks for of_spec in _ways(arch) for chunks in of_spec]
    nearest = min(ways, key=lambda chunks: sum(chunk.stored.name not in stored for chunk in chunks))
    problems: dict[Problem, None] = {}
    storages: dict[str, Storage] = {}
    placements: list[Placement] = []
    fills: list[Fill] = []
    for chunk in nearest:
        wanted = chunk.stored
        storage = stored.get(wanted.name)
        padding = 0
        if storage is not None and wanted.name in VOCABULARY and len(storage.shape) == 2:
            padding = storage.shape[0] - wanted.shape[0]
        if storage is None or padding < 0 or storage.shape != (wanted.shape[0] + padding, *wanted.shape[1:]):
            given = "no such key" if storage is None else str(list(storage.shape))
            fix = "give the config.json that belongs to it" if storage is not None else ""
            problems[Problem(f"{holder}: {wanted.name}", given, f"{list(wanted.shape)} by config.json", fix)] = None
            continue
        storages[wanted.name] = storage
        placements += chunk.placements
        if padding:
            fills.append(Fill(wanted.name, (wanted.shape[0], 0), (padding, wanted.shape[1])))
    if problems:
        raise ModelError(problems)
    return Manifest(holder, storages, tuple(placements), tuple(fills))


def known_keys(arch: Architecture) -> frozenset[str]:
    """Returns every key that a tensor of this model may have, under any of its names."""
    names = {chunk.stored.name for of_spec in _ways(arch) for chunks in of_spec for chunk in chunks}
    return frozenset(names | {re.sub(r"(?<=^decoder\.layers\.)\d+\.", "", name) for name in names})


def extra_states(chunks: Iterable[Chunk]) -> list[str]:
    """Returns the keys of the empty objects beside the tensors, one per module, which Megatron asks for.

    transformer_engine would keep fp8 scales in them.
    """
    keys: dict[str, None] = {}
    for chunk in chunks:
        module = chunk.stored.name.rpartition(".")[0]
        if module.endswith(WITHOUT_EXTRA_STATE):
            continue
        count = sum(axis is None for axis in chunk.placements[0].axes)  # axes of the layer and the expert
        index = ".".join(map(str, chunk.start[:count] or (0,)))
        sizes = ".".join(map(str, chunk.stored.shape[:count] or (1,)))
        for name in (module, module.replace("linear_proj", "core_attention")):
            keys[f"{name}._extra_state/shard_{index}_{sizes}"] = None
    return list(keys)


def common_dtype(dtypes: set[str]) -> str:
    """Returns the smallest dtype that holds the values of all of these exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return "float64" if "float64" in dtypes else "float32"


@lru_cache(maxsize=1)
def _ways(arch: Architecture) -> list[list[tuple[Chunk, ...]]]:
    """Returns the ways in which a checkpoint may store the model: with transformer-engine's names, then with the local
    layer's; each with stacked layers, if they are alike, then with keys for each layer. Cached: they take seconds."""
    layout, rank = ParallelLayout(), rank_grid(ParallelLayout())[0]
    ways = []
    for spec, renamed in ((TE_SPEC, dict[str, str]()), (LOCAL_SPEC, LOCAL_NORMS)):
        held = spec.manifest(arch, layout, rank, "float32")
        apart = tuple(_chunks(held, renamed, 0))
        ways.append([tuple(_chunks(held, renamed, arch.layers)), apart] if _alike(apart) else [apart])
    return ways


def _chunks(rank: Manifest, renamed: Mapping[str, str], layers: int) -> Iterator[Chunk]:
    """Yields a single rank's parameters as they are stored. `layers` is the number of stacked layers; 0: none are."""
    placements: dict[str, list[Placement]] = defaultdict(list)
    for placement in rank.placements:
        placements[placement.storage].append(placement)
    experts: dict[int | None, int] = defaultdict(int)
    for name in rank.storages:
        if (match := IN_LAYER.fullmatch(name)) and (expert := EXPERT.fullmatch(match[2])):
            experts[int(match[1])] = max(experts[int(match[1])], 1 + int(expert[1] or expert[3]))
    if not any(".self_attention.linear_qkv." in name for name in rank.storages):  # latent attention
        renamed = {}
    for name, storage in rank.storages.items():
        match = IN_LAYER.fullmatch(name)
        layer, key = (int(match[1]), match[2]) if match else (None, name.removeprefix("chunk0."))
        stack = [(layer, layers)] if layer is not None and layers else []
        if expert := EXPERT.fullmatch(key):
            key = f"mlp.experts.experts.{expert[2]}.weight"
            stack.append((int(expert[1] or expert[3]), experts[layer]))
        for local, saved in renamed.items():
            if key.startswith(local):
                key = saved + key.removeprefix(local)
        if layer is not None:
            key = f"decoder.layers.{key}" if layers else f"decoder.layers.{layer}.{key}"
        index, sizes = [number for number, _ in stack], [size for _, size in stack]
        yield Chunk(
            Storage(key, (*sizes, *storage.shape), storage.dtype),
            (*index, *(0 for _ in storage.shape)),
            (*(1 for _ in index), *storage.shape),
            layer,
            tuple(
                Placement(key, (*index, *held.at), (*(None for _ in index), *held.axes), held.box)
                for held in placements[name]
            ),
        )


def _alike(apart: Iterable[Chunk]) -> bool:
    """Returns whether all layers, each with its own keys, have the same parameters."""
    layers: dict[int, set[tuple[str, tuple[int, ...], tuple[int, ...]]]] = defaultdict(set)
    for chunk in apart:
        if chunk.layer is not None:
            key = chunk.stored.name.removeprefix(f"decoder.layers.{chunk.layer}.")
            layers[chunk.layer].add((key, chunk.shape, chunk.start))
    return len({frozenset(names) for names in layers.values()}) == 1
