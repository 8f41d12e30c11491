"""The manifest of one Megatron rank, with either layer spec. The specs shard in the same way and differ in a few names.

Sharding, as in megatron.core 0.19: column-parallel weights are cut by rows over `tensor`, row-parallel ones by columns.
Every rank holds the norms and the router. Experts are dealt out over `expert`, and each is cut over `expert_tensor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megagrpo.errors import ModelError, Problem
from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk, stage_problems
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture, Role, Tensor
from megagrpo.weights.sides.assembly import (
    ManifestBuilder,
    Rows,
    cut,
    padded_shard,
    role_problems,
    shard,
    tensors_by_role,
)

Axis = Literal["tensor", "expert", "expert_tensor"]


Cut = Literal["whole", "rows", "columns", "groups", "latents"]
"""The way in which ranks cut a parameter: not at all, by rows or columns, or by the rows of query groups. Latents are
cut by rows or not at all: MegatronSpec.cuts_latents."""
Parameters = tuple[tuple[str, Cut, tuple[Role, ...]], ...]
"""A layer's parameters, in order: the name (in braces: a name of MegatronSpec), the cut, and the roles of the tensors
that it fuses. A model may lack them."""

ATTENTION: Parameters = (
    ("{input_norm}", "whole", ("input_norm",)),
    ("self_attention.linear_qkv.weight", "groups", ("q", "k", "v")),
    ("self_attention.linear_qkv.bias", "groups", ("q_bias", "k_bias", "v_bias")),
    ("self_attention.q_layernorm.weight", "whole", ("q_norm",)),
    ("self_attention.k_layernorm.weight", "whole", ("k_norm",)),
    ("self_attention.linear_proj.weight", "columns", ("o",)),
)
LATENT_ATTENTION: Parameters = (
    ("input_layernorm.weight", "whole", ("input_norm",)),
    ("self_attention.linear_q_proj.weight", "rows", ("q",)),
    ("self_attention.linear_q_down_proj.weight", "latents", ("q_down",)),
    ("self_attention.{query_latent_norm}", "whole", ("q_down_norm",)),
    ("self_attention.linear_q_up_proj.weight", "rows", ("q_up",)),
    ("self_attention.linear_kv_down_proj.weight", "latents", ("kv_down",)),
    ("self_attention.{key_value_latent_norm}", "whole", ("kv_down_norm",)),
    ("self_attention.linear_kv_up_proj.weight", "rows", ("kv_up",)),
    ("self_attention.linear_proj.weight", "columns", ("o",)),
)
MLP: Parameters = (
    ("{post_attention_norm}", "whole", ("post_attention_norm",)),
    ("mlp.linear_fc1.weight", "rows", ("gate", "up")),
    ("mlp.linear_fc2.weight", "columns", ("down",)),
)
EXPERTS: Parameters = (
    ("pre_mlp_layernorm.weight", "whole", ("post_attention_norm",)),
    ("mlp.router.weight", "whole", ("router",)),
    ("mlp.router.expert_bias", "whole", ("router_bias",)),
    ("mlp.shared_experts.linear_fc1.weight", "rows", ("shared_gate", "shared_up")),
    ("mlp.shared_experts.linear_fc2.weight", "columns", ("shared_down",)),
)
EXPERT: Parameters = (("linear_fc1", "rows", ("expert_gate", "expert_up")), ("linear_fc2", "columns", ("expert_down",)))
IN_LAYERS = (*ATTENTION, *LATENT_ATTENTION, *MLP, *EXPERTS, *EXPERT)
HELD: frozenset[Role] = frozenset(role for *_, roles in IN_LAYERS for role in roles) | {
    "embedding", "head", "value_head", "final_norm"
}  # fmt: skip
"""The kinds of tensors that this side places."""


@dataclass(frozen=True)
class MegatronSpec:
    """The parameter names of one of Megatron's layer specs. In `expert`, {expert} is an index on the rank, and {linear}
    is linear_fc1 or linear_fc2."""

    input_norm: str
    query_latent_norm: str
    key_value_latent_norm: str
    post_attention_norm: str
    expert: str
    cuts_latents: bool
    """True: tensor ranks cut the projections down to the latents. False: each rank holds them whole."""

    def manifest(self, arch: Architecture, layout: ParallelLayout, where: RankCoordinates, dtype: str) -> Manifest:
        """Returns a manifest with storages `chunk{c}.{parameter name}` for each model chunk c of this rank. Raises
        ModelError if the layout does not divide the model."""
        if problems := self._split_problems(arch, layout):
            raise ModelError(problems)
        rank = _Rank(arch, layout, where, self, ManifestBuilder(f"train rank {where.rank}", dtype))
        for chunk in range(layout.virtual_pipeline):
            rank.add_chunk(chunk)
        return rank.builder.build()

    def _split_problems(self, arch: Architecture, layout: ParallelLayout) -> list[Problem]:
        """Returns problems of sizes that the layout does not divide, and of layers that do not fit the stages."""
        rules = divided_sizes(arch)
        if (latent := arch.latent) is None:
            rows = (arch.heads + 2 * arch.query_groups) * arch.head_dim
            rules.append(("tensor", "rows of q, k and v together", rows))
        elif self.cuts_latents:
            rules.append(("tensor", "kv_lora_rank + qk_rope_head_dim", latent.key_value_rank + latent.rotary_dim))
            rules.append(("tensor", "q_lora_rank", latent.query_rank or 0))
        sizes = {"tensor": layout.tensor, "expert": layout.expert, "expert_tensor": layout.expert_tensor}
        problems = [
            Problem(f"{arch.family} over {axis} = {sizes[axis]}", f"{what}: {size}", f"a multiple of {sizes[axis]}")
            for axis, what, size in rules
            if size % sizes[axis]
        ]
        problems += [
            Problem(f"{arch.family} over {layout}", f"layers: {arch.layers}", f"layers for every stage: {problem}")
            for problem in stage_problems(arch.layers, layout)
        ]
        if arch.query_groups % layout.tensor and layout.tensor % arch.query_groups:
            given = f"query groups (key-value heads): {arch.query_groups}"
            needed = f"a multiple or a divisor of {layout.tensor}"
            problems.append(Problem(f"{arch.family} over tensor = {layout.tensor}", given, needed))
        return problems + role_problems(arch, HELD, "Megatron")


LOCAL_SPEC = MegatronSpec(
    input_norm="input_layernorm.weight",
    query_latent_norm="q_layernorm.weight",
    key_value_latent_norm="kv_layernorm.weight",
    post_attention_norm="pre_mlp_layernorm.weight",
    expert="mlp.experts.local_experts.{expert}.{linear}.weight",
    cuts_latents=True,
)
"""Megatron's local layers: norms apart from the linear layers, experts one by one (SequentialMLP)."""

TE_SPEC = MegatronSpec(
    input_norm="self_attention.linear_qkv.layer_norm_weight",
    query_latent_norm="linear_q_up_proj.layer_norm_weight",
    key_value_latent_norm="linear_kv_up_proj.layer_norm_weight",
    post_attention_norm="mlp.linear_fc1.layer_norm_weight",
    expert="mlp.experts.{linear}.weight{expert}",
    cuts_latents=False,
)
"""transformer-engine's layers: norms inside the linear layers, experts in grouped linear layers."""


def config_fields(arch: Architecture) -> dict[str, Any]:
    """Returns the fields of Megatron's TransformerConfig that describe the model. Most have the same names in
    Megatron-LM's parser."""
    fields: dict[str, Any] = {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "ffn_hidden_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.query_groups,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_epsilon,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm or arch.latent is not None,  # of latent attention: the norms of the latents
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if (latent := arch.latent) is not None:
        fields |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.key_value_rank,
            "qk_head_dim": latent.plain_dim,
            "qk_pos_emb_head_dim": latent.rotary_dim,
            "v_head_dim": latent.value_dim,
        }
    if (yarn := arch.rope.yarn) is not None:
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_positions,
            **{name: getattr(yarn, name) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
        }
    if (experts := arch.experts) is not None:
        dense = experts.dense_layers
        fields |= {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.ffn,
            # Megatron stacks layers in its checkpoints unless a list says that they are not all alike.
            "moe_layer_freq": [0] * dense + [1] * (arch.layers - dense) if dense else 1,
            # Softmax over the chosen experts is softmax over all of them, normalised over the chosen.
            "moe_router_pre_softmax": not experts.normalize_top_k,
            **({"moe_shared_expert_intermediate_size": experts.shared_ffn} if experts.shared_ffn else {}),
        }
        if (router := experts.router) is not None:
            fields |= {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": router.scale,
            }
    return fields


def divided_sizes(arch: Architecture) -> list[tuple[Axis, str, int]]:
    """Returns the sizes of the model that a parallel size must divide, with either layer spec: (axis, name, size)."""
    sizes: list[tuple[Axis, str, int]] = [("tensor", "attention heads (num_attention_heads)", arch.heads)]
    if arch.has_dense_layers:
        sizes.append(("tensor", "MLP columns (intermediate_size)", arch.ffn))
    if arch.experts is not None:
        sizes.append(("expert", "experts in a layer", arch.experts.count))
        sizes.append(("expert_tensor", "columns in each expert (moe_intermediate_size)", arch.experts.ffn))
        sizes.append(("tensor", "columns of the shared experts", arch.experts.shared_ffn))
    return sizes


@dataclass(frozen=True)
class _Rank:
    arch: Architecture
    layout: ParallelLayout
    where: RankCoordinates
    spec: MegatronSpec
    builder: ManifestBuilder

    def add_chunk(self, chunk: int) -> None:
        arch, layout, stage = self.arch, self.layout, self.where.pipeline
        model = tensors_by_role(arch)
        prefix = f"chunk{chunk}."
        first = stage == 0 and chunk == 0
        last = stage == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1
        if first:
            self.add_vocabulary(prefix + "embedding.word_embeddings.weight", model.roles["embedding"])
        attention = ATTENTION if arch.latent is None else LATENT_ATTENTION
        tables = [
            [(name.format_map(vars(self.spec)), way, roles) for name, way, roles in (*attention, *of_kind)]
            for of_kind in (MLP, EXPERTS)
        ]
        chunk_layers = layers_of_chunk(arch.layers, layout, stage, chunk)
        for number, layer in enumerate(chunk_layers):
            in_layer = f"{prefix}decoder.layers.{number}."
            held = model.layers[layer]
            for name, way, roles in tables[bool(held.experts)]:
                if fused := [held.roles[role] for role in roles if role in held.roles]:
                    self.add(in_layer + name, way, fused, self.where.tensor, layout.tensor)
            count = len(held.experts) // layout.expert
            for local, expert in enumerate(held.experts[self.where.expert * count :][:count]):
                for linear, way, roles in EXPERT:
                    storage = in_layer + self.spec.expert.format(expert=local, linear=linear)
                    fused = [expert[role] for role in roles]
                    self.add(storage, way, fused, self.where.expert_tensor, layout.expert_tensor)
        if last:
            self.builder.whole(prefix + "decoder.final_layernorm.weight", model.roles["final_norm"])
            if arch.value_head:
                self.builder.whole(prefix + "output_layer.weight", model.roles["value_head"])
            elif not arch.tied_embeddings:
                self.add_vocabulary(prefix + "output_layer.weight", model.roles["head"])
            elif not first:  # a tied head on another stage than the embedding is a second copy of it
                self.add_vocabulary(prefix + "output_layer.weight", model.roles["embedding"])

    def add_vocabulary(self, storage: str, tensor: Tensor) -> None:
        padded, shards = self.arch.padded_vocab(self.layout.tensor), self.layout.tensor
        self.builder.rows(storage, padded_shard(tensor, padded, self.where.tensor, shards), (self.arch.hidden,))

    def add(self, storage: str, way: Cut, fused: Sequence[Tensor], index: int, shards: int) -> None:
        """Adds the `index`-th of `shards` parts of a parameter."""
        if way == "columns":
            self.builder.columns(storage, fused[0], index, shards)
        elif way == "rows" or (way == "latents" and self.spec.cuts_latents):
            self.builder.rows(storage, [shard(tensor, index, shards) for tensor in fused], fused[0].shape[1:])
        elif way == "groups":
            self.builder.rows(storage, self.qkv(*fused), fused[0].shape[1:])
        else:
            self.builder.whole(storage, fused[0])

    def qkv(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Rows]:
        """Returns this rank's rows of the fused projection: for each query group its queries, its key and its value.

        With more tensor ranks than groups Megatron cuts the same fused rows evenly, through the middle of a group, and
        gathers the activations (megatron.core.transformer.attention, get_query_key_value_tensors).
        """
        arch = self.arch
        queries = arch.heads // arch.query_groups * arch.head_dim
        fused = []
        for group in range(arch.query_groups):
            fused.append(Rows(q, group * queries, queries))
            fused.append(Rows(k, group * arch.head_dim, arch.head_dim))
            fused.append(Rows(v, group * arch.head_dim, arch.head_dim))
        count = arch.query_groups * (queries + 2 * arch.head_dim) // self.layout.tensor
        return cut(fused, self.where.tensor * count, count)
