"""The manifest of one Megatron rank, with either layer spec. The specs shard in the same way and differ in a few names.

Sharding, as in megatron.core 0.19: column-parallel weights are cut by rows over `tensor`, row-parallel ones by columns.
Every rank holds the norms and the router. Experts are dealt out over `expert`, and each is cut over `expert_tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megagrpo.errors import ModelError, Problem
from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk, stage_problems
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Roles, Rows, Tensor
from megagrpo.weights.sides.assembly import ManifestBuilder, cut, padded_shard, shard, tensors_by_role


@dataclass(frozen=True)
class MegatronSpec:
    """One of Megatron's layer specs. `fused`: norms lie within the linear layers that follow them, and tensor ranks do
    not cut projections down to latents. In `expert`, {expert} is an index on the rank, and {linear} is linear_fc1 or
    linear_fc2."""

    fused: bool
    expert: str

    def manifest(self, arch: Architecture, layout: ParallelLayout, where: RankCoordinates, dtype: str) -> Manifest:
        """Returns a manifest with storages `chunk{c}.{parameter name}` for each model chunk c of this rank. Raises
        ModelError if the layout does not divide the model."""
        if problems := self._split_problems(arch, layout):
            raise ModelError(problems)
        builder = ManifestBuilder(f"train rank {where.rank}", dtype)
        for chunk in range(layout.virtual_pipeline):
            _add_chunk(arch, chunk, LayerOnRank(self, layout, where, builder, f"chunk{chunk}."))
        return builder.build()

    def _split_problems(self, arch: Architecture, layout: ParallelLayout) -> list[Problem]:
        """Returns problems of sizes that the layout does not divide, and of layers that do not fit the stages."""
        sizes = {axis: getattr(layout, axis) for axis in ("tensor", "expert", "expert_tensor")}
        layers = len(arch.layers)
        problems = [
            Problem(f"{arch.family} over {axis} = {sizes[axis]}", f"{name}: {size}", f"a multiple of {sizes[axis]}")
            for axis, name, size in arch.divided()
            if size % sizes[axis]
        ]
        problems += [
            Problem(f"{arch.family} over tensor = {layout.tensor}", *unmet)
            for attention in {kind.attention: None for kind in arch.kinds}
            for unmet in attention.unmet(layout.tensor, self.fused)
        ]
        problems += [
            Problem(f"{arch.family} over {layout}", f"layers: {layers}", f"layers for every stage: {problem}")
            for problem in stage_problems(layers, layout)
        ]
        return problems


LOCAL_SPEC = MegatronSpec(fused=False, expert="mlp.experts.local_experts.{expert}.{linear}.{kind}")
"""Megatron's local layers: norms apart from the linear layers, experts one by one (SequentialMLP)."""

TE_SPEC = MegatronSpec(fused=True, expert="mlp.experts.{linear}.{kind}{expert}")
"""transformer-engine's layers: norms inside the linear layers, experts in grouped linear layers."""


def config_fields(arch: Architecture) -> dict[str, Any]:
    """Returns the fields of Megatron's TransformerConfig that describe the model. Most have the same names in
    Megatron-LM's parser."""
    fields: dict[str, Any] = {
        "num_layers": len(arch.layers),
        "hidden_size": arch.hidden,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_epsilon,
        "add_bias_linear": False,
        **({"layernorm_zero_centered_gamma": True} if arch.zero_centred_norms else {}),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    for kind in arch.kinds:
        fields |= kind.fields()
    if arch.experts:
        # Megatron stacks layers in its checkpoints unless a list says that they are not all alike.
        sparse = [int(layer.mlp.experts > 0) for layer in arch.layers]
        fields["moe_layer_freq"] = 1 if all(sparse) else sparse
    return fields


@dataclass(frozen=True)
class LayerOnRank:
    """One layer on one rank. Its parts add their parameters, under their names in the layer."""

    spec: MegatronSpec
    layout: ParallelLayout
    where: RankCoordinates
    builder: ManifestBuilder
    prefix: str

    @property
    def fused(self) -> bool:
        return self.spec.fused

    def whole(self, name: str, tensor: Tensor) -> None:
        self.builder.whole(self.prefix + name, tensor)

    def rows(self, name: str, *tensors: Tensor) -> None:
        """Adds this tensor rank's rows of each of these tensors, one after another."""
        rows = [shard(tensor, self.where.tensor, self.layout.tensor) for tensor in tensors]
        self.builder.rows(self.prefix + name, rows, tensors[0].shape[1:])

    def columns(self, name: str, tensor: Tensor) -> None:
        self.builder.columns(self.prefix + name, tensor, self.where.tensor, self.layout.tensor)

    def evenly(self, name: str, fused: Sequence[Rows], rest: tuple[int, ...]) -> None:
        """Adds this tensor rank's part of fused rows that are cut evenly. `rest` is the shape after axis 0."""
        count = sum(rows.count for rows in fused) // self.layout.tensor
        self.builder.rows(self.prefix + name, cut(fused, self.where.tensor * count, count), rest)

    def vocabulary(self, name: str, tensor: Tensor, padded: int) -> None:
        """Adds this tensor rank's rows of a matrix that padding extends to `padded` rows."""
        rows = padded_shard(tensor, padded, self.where.tensor, self.layout.tensor)
        self.builder.rows(self.prefix + name, rows, tensor.shape[1:])

    def experts(self, experts: Sequence[Roles], *, bias: bool) -> None:
        """Adds this rank's experts, each cut over the ranks that share it."""
        index, shards, builder = self.where.expert_tensor, self.layout.expert_tensor, self.builder
        count = len(experts) // self.layout.expert
        for local, expert in enumerate(experts[self.where.expert * count :][:count]):
            rows = [shard(expert[role], index, shards) for role in ("expert_gate", "expert_up")]
            builder.rows(self._expert(local, "linear_fc1"), rows, expert["expert_up"].shape[1:])
            builder.columns(self._expert(local, "linear_fc2"), expert["expert_down"], index, shards)
            if bias:
                rows = [shard(expert[role], index, shards) for role in ("expert_gate_bias", "expert_up_bias")]
                builder.rows(self._expert(local, "linear_fc1", "bias"), rows, ())
                builder.whole(self._expert(local, "linear_fc2", "bias"), expert["expert_down_bias"])

    def _expert(self, local: int, linear: str, kind: str = "weight") -> str:
        return self.prefix + self.spec.expert.format(expert=local, linear=linear, kind=kind)


def _add_chunk(arch: Architecture, chunk: int, rank: LayerOnRank) -> None:
    layout, stage, model = rank.layout, rank.where.pipeline, tensors_by_role(arch)
    first, padded = stage == 0 and chunk == 0, arch.padded_vocab(layout.tensor)
    if first:
        rank.vocabulary("embedding.word_embeddings.weight", model.roles["embedding"], padded)
    for number, layer in enumerate(layers_of_chunk(len(arch.layers), layout, stage, chunk)):
        on_rank = replace(rank, prefix=f"{rank.prefix}decoder.layers.{number}.")
        arch.layers[layer].on_megatron(on_rank, model.layers[layer])
    if stage == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1:
        rank.whole("decoder.final_layernorm.weight", model.roles["final_norm"])
        if arch.value_head:
            rank.whole("output_layer.weight", model.roles["value_head"])
        elif not arch.tied_embeddings:
            rank.vocabulary("output_layer.weight", model.roles["head"], padded)
        elif not first:  # a tied head on another stage than the embedding is a second copy of it
            rank.vocabulary("output_layer.weight", model.roles["embedding"], padded)
