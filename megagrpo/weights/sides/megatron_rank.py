"""The manifest of one Megatron rank, with either layer spec. The specs shard in the same way and differ in a few names.

Sharding, as in megatron.core 0.19: column-parallel weights are cut by rows over `tensor`, row-parallel ones by columns.
Every rank holds the norms and the router. Experts are dealt out over `expert`, and each is cut over `expert_tensor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megagrpo.errors import ModelError, Problem
from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk, stage_problems
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture, Role, Tensor
from megagrpo.weights.sides.assembly import (
    LayerTensors,
    ManifestBuilder,
    Roles,
    Rows,
    cut,
    padded_shard,
    role_problems,
    shard,
    tensors_by_role,
)

HELD: frozenset[Role] = frozenset([
    "embedding", "head", "value_head", "final_norm", "input_norm", "post_attention_norm",
    "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o",
    "q_down", "q_down_norm", "q_up", "kv_down", "kv_down_norm", "kv_up",
    "gate", "up", "down", "router", "router_bias", "expert_gate", "expert_up", "expert_down",
    "shared_gate", "shared_up", "shared_down",
])  # fmt: skip
"""The kinds of tensors that this side places."""

Axis = Literal["tensor", "expert", "expert_tensor"]


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
        chunk_layers = layers_of_chunk(arch.layers, layout, stage, chunk)
        for local, layer in enumerate(chunk_layers):
            in_layer = f"{prefix}decoder.layers.{local}."
            held = model.layers[layer]
            if arch.latent is None:
                self.add_attention(in_layer, held.roles)
            else:
                self.add_latent_attention(in_layer, held.roles)
            if held.experts:
                self.add_experts(in_layer, held)
            else:
                self.builder.whole(in_layer + self.spec.post_attention_norm, held.roles["post_attention_norm"])
                self.add_gated(in_layer + "mlp.", held.roles["gate"], held.roles["up"], held.roles["down"])
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

    def add_attention(self, prefix: str, layer: Roles) -> None:
        build = self.builder
        build.whole(prefix + self.spec.input_norm, layer["input_norm"])
        attention = prefix + "self_attention."
        build.rows(attention + "linear_qkv.weight", self.qkv(layer["q"], layer["k"], layer["v"]), (self.arch.hidden,))
        if self.arch.qkv_bias:
            biases = self.qkv(layer["q_bias"], layer["k_bias"], layer["v_bias"])
            build.rows(attention + "linear_qkv.bias", biases, ())
        if self.arch.qk_norm:
            build.whole(attention + "q_layernorm.weight", layer["q_norm"])
            build.whole(attention + "k_layernorm.weight", layer["k_norm"])
        build.columns(attention + "linear_proj.weight", layer["o"], self.where.tensor, self.layout.tensor)

    def add_latent_attention(self, prefix: str, layer: Roles) -> None:
        self.builder.whole(prefix + "input_layernorm.weight", layer["input_norm"])
        attention = prefix + "self_attention."
        if "q" in layer:
            self.add_rows(attention + "linear_q_proj.weight", layer["q"])
        else:
            self.add_latent(attention + "linear_q_down_proj.weight", layer["q_down"])
            self.builder.whole(attention + self.spec.query_latent_norm, layer["q_down_norm"])
            self.add_rows(attention + "linear_q_up_proj.weight", layer["q_up"])
        self.add_latent(attention + "linear_kv_down_proj.weight", layer["kv_down"])
        self.builder.whole(attention + self.spec.key_value_latent_norm, layer["kv_down_norm"])
        self.add_rows(attention + "linear_kv_up_proj.weight", layer["kv_up"])
        self.builder.columns(attention + "linear_proj.weight", layer["o"], self.where.tensor, self.layout.tensor)

    def add_latent(self, storage: str, tensor: Tensor) -> None:
        if self.spec.cuts_latents:
            self.add_rows(storage, tensor)
        else:
            self.builder.whole(storage, tensor)

    def add_rows(self, storage: str, tensor: Tensor) -> None:
        """Adds this tensor rank's run of rows."""
        self.builder.rows(storage, [shard(tensor, self.where.tensor, self.layout.tensor)], tensor.shape[1:])

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

    def add_gated(self, prefix: str, gate: Tensor, up: Tensor, down: Tensor) -> None:
        index, shards = self.where.tensor, self.layout.tensor
        fc1 = [shard(gate, index, shards), shard(up, index, shards)]
        self.builder.rows(prefix + "linear_fc1.weight", fc1, (self.arch.hidden,))
        self.builder.columns(prefix + "linear_fc2.weight", down, index, shards)

    def add_experts(self, prefix: str, layer: LayerTensors) -> None:
        index, shards = self.where.expert_tensor, self.layout.expert_tensor
        here = len(layer.experts) // self.layout.expert
        self.builder.whole(prefix + "pre_mlp_layernorm.weight", layer.roles["post_attention_norm"])
        self.builder.whole(prefix + "mlp.router.weight", layer.roles["router"])
        if "router_bias" in layer.roles:
            self.builder.whole(prefix + "mlp.router.expert_bias", layer.roles["router_bias"])
        if "shared_gate" in layer.roles:
            shared = (layer.roles["shared_gate"], layer.roles["shared_up"], layer.roles["shared_down"])
            self.add_gated(prefix + "mlp.shared_experts.", *shared)
        for local in range(here):
            expert = layer.experts[self.where.expert * here + local]
            fc1 = [shard(expert["expert_gate"], index, shards), shard(expert["expert_up"], index, shards)]
            name = prefix + self.spec.expert
            self.builder.rows(name.format(expert=local, linear="linear_fc1"), fc1, (self.arch.hidden,))
            fc2 = name.format(expert=local, linear="linear_fc2")
            self.builder.columns(fc2, expert["expert_down"], index, shards)
