"""Megatron-LM's torch_dist checkpoints: tensors of the whole model, whatever the layout of the ranks that wrote them.

They are the parameters of a single rank that holds everything, under the names of GPTModel.sharded_state_dict
(megatron.core 0.19). If all layers of the model are alike, they are one tensor with the layer as its first axis and the
expert as its second; where layers differ, each has its own keys. The two layer specs name a few norms differently:
a checkpoint that we write has both names, and either is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    layer: int | None
    placements: tuple[Placement, ...]


def manifest(arch: Architecture, dtypes: Mapping[str, str]) -> Manifest:
    """Returns the manifest of the tensors to be written, by key. `dtypes` are those of the checkpoint tensors.

    A fused tensor of parts in different dtypes has the smallest dtype that holds all of them exactly.
    """
    storages: dict[str, Storage] = {}
    placements: dict[Placement, None] = {}
    for parameters in _specs(arch):
        stacked = _alike(parameters)
        for parameter in parameters:
            stored = parameter.stored(arch, stacked)
            storages[stored.name] = stored
            placements.update(dict.fromkeys(parameter.placed(stacked)))
    parts: dict[str, set[str]] = defaultdict(set)
    for placement in placements:
        parts[placement.storage].add(dtypes[placement.box.tensor])
    in_dtype = {name: replace(storage, dtype=common_dtype(parts[name])) for name, storage in storages.items()}
    return Manifest("torch_dist", in_dtype, tuple(placements))


def stored_manifest(arch: Architecture, stored: Mapping[str, Storage], holder: str) -> Manifest:
    """Returns the model's manifest in a checkpoint with these tensors. Rows of padding are fills. Raises ModelError."""
    candidates = [
        (parameters, stacked)
        for parameters in _specs(arch)
        for stacked in ((True, False) if _alike(parameters) else (False,))
    ]
    parameters, stacked = min(
        candidates, key=lambda candidate: sum(p.key(candidate[1]) not in stored for p in candidate[0])
    )
    problems: dict[Problem, None] = {}
    storages, placements, fills = {}, [], []
    for parameter in parameters:
        wanted = parameter.stored(arch, stacked)
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
        placements += parameter.placed(stacked)
        if padding:
            fills.append(Fill(wanted.name, (wanted.shape[0], 0), (padding, wanted.shape[1])))
    if problems:
        raise ModelError(problems)
    return Manifest(holder, storages, tuple(placements), tuple(fills))


def other_names(arch: Architecture) -> frozenset[str]:
    """Returns every key that a tensor of this model may have, under any of its names."""
    return frozenset(p.key(stacked) for parameters in _specs(arch) for p in parameters for stacked in (True, False))


def chunks(written: Manifest) -> list[Chunk]:
    """Returns the parts of `written` (from `manifest`) in the order of the model."""
    parts: dict[tuple[str, tuple[int, ...]], list[Placement]] = defaultdict(list)
    for placement in written.placements:
        parts[placement.storage, placement.at[: _indices(placement)]].append(placement)
    result = []
    for (key, index), placements in parts.items():
        shape = written.storages[key].shape
        layer = re.match(r"decoder\.layers\.(\d+)\.", key)
        result.append(
            Chunk(
                key,
                (*index, *(0,) * (len(shape) - len(index))),
                (*(1,) * len(index), *shape[len(index) :]),
                int(layer[1]) if layer else index[0] if key.startswith("decoder.layers.") else None,
                tuple(placements),
            )
        )
    return result


def extra_states(written: Manifest) -> list[str]:
    """Returns the keys of the empty objects beside the tensors, one per module, which Megatron asks for.

    transformer_engine would keep fp8 scales in them.
    """
    keys: dict[str, None] = {}
    for chunk in chunks(written):
        module = chunk.key.rpartition(".")[0]
        if module.endswith(WITHOUT_EXTRA_STATE):
            continue
        count = _indices(chunk.placements[0])
        index = ".".join(map(str, chunk.start[:count] or (0,)))
        sizes = ".".join(map(str, written.storages[chunk.key].shape[:count] or (1,)))
        for name in (module, module.replace("linear_proj", "core_attention")):
            keys[f"{name}._extra_state/shard_{index}_{sizes}"] = None
    return list(keys)


def common_dtype(dtypes: set[str]) -> str:
    """Returns the smallest dtype that holds the values of all of these exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return "float64" if "float64" in dtypes else "float32"


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of the model on a single rank. `name` is within its layer, if it has one."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    layer: int | None = None
    expert: int | None = None
    experts: int = 0

    def key(self, stacked: bool) -> str:
        if self.layer is None:
            return self.name
        return f"decoder.layers.{self.name}" if stacked else f"decoder.layers.{self.layer}.{self.name}"

    def stored(self, arch: Architecture, stacked: bool) -> Storage:
        layers = () if self.layer is None or not stacked else (arch.layers,)
        experts = () if self.expert is None else (self.experts,)
        return Storage(self.key(stacked), (*layers, *experts, *self.shape), "float32")

    def placed(self, stacked: bool) -> list[Placement]:
        key = self.key(stacked)
        index = [number for number in (self.layer if stacked else None, self.expert) if number is not None]
        return [
            Placement(key, (*index, *held.at), (*(None for _ in index), *held.axes), held.box)
            for held in self.placements
        ]


def _specs(arch: Architecture) -> Iterator[tuple[_Parameter, ...]]:
    """Yields the model's parameters with transformer-engine's names, then with the local layer's."""
    layout, rank = ParallelLayout(), rank_grid(ParallelLayout())[0]
    yield tuple(_parameters(TE_SPEC.manifest(arch, layout, rank, "float32"), {}))
    yield tuple(_parameters(LOCAL_SPEC.manifest(arch, layout, rank, "float32"), LOCAL_NORMS))


def _parameters(rank: Manifest, renamed: Mapping[str, str]) -> Iterator[_Parameter]:
    placements: dict[str, list[Placement]] = defaultdict(list)
    for placement in rank.placements:
        placements[placement.storage].append(placement)
    experts: dict[int, int] = defaultdict(int)
    for name in rank.storages:
        if (match := IN_LAYER.fullmatch(name)) and (expert := EXPERT.fullmatch(match[2])):
            experts[int(match[1])] = max(experts[int(match[1])], 1 + int(expert[1] or expert[3]))
    if not any(".self_attention.linear_qkv." in name for name in rank.storages):  # latent attention
        renamed = {}
    for name, storage in rank.storages.items():
        match = IN_LAYER.fullmatch(name)
        held = tuple(placements[name])
        if match is None:
            yield _Parameter(name.removeprefix("chunk0."), storage.shape, held)
            continue
        layer, within = int(match[1]), match[2]
        if expert := EXPERT.fullmatch(within):
            common = f"mlp.experts.experts.{expert[2]}.weight"
            yield _Parameter(common, storage.shape, held, layer, int(expert[1] or expert[3]), experts[layer])
            continue
        for local, saved in renamed.items():
            if within.startswith(local):
                within = saved + within.removeprefix(local)
        yield _Parameter(within, storage.shape, held, layer)


def _alike(parameters: tuple[_Parameter, ...]) -> bool:
    """Returns whether all layers have the same parameters."""
    layers: dict[int, set[tuple[str, tuple[int, ...], int | None]]] = defaultdict(set)
    for parameter in parameters:
        if parameter.layer is not None:
            layers[parameter.layer].add((parameter.name, parameter.shape, parameter.expert))
    return len({frozenset(names) for names in layers.values()}) == 1


def _indices(placement: Placement) -> int:
    """Returns the number of leading axes for the layer and the expert, which the box does not have."""
    return sum(axis is None for axis in placement.axes)
