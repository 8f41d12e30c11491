"""What one Megatron rank holds. The two layer specs shard in the same way and differ only in some names (SpecNames).

Sharding, as in megatron.core 0.16: column-parallel weights are cut by rows over `tensor`, row-parallel ones by columns,
norms and the router are on every rank, experts are dealt out over `expert` and each is cut over `expert_tensor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megagrpo.errors import ModelError, Problem
from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk, stage_problems
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.sides.assembly import ManifestBuilder, Rows, all_rows, cut, shard
from megagrpo.weights.sides.roles import LayerTensors, Roles, model_tensors


@dataclass(frozen=True)
class SpecNames:
    """What depends on the layer spec: parameter names within a layer, where `{expert}` is the index on this rank."""

    input_norm: str
    latent_input_norm: str
    query_latent_norm: str
    key_value_latent_norm: str
    post_attention_norm: str
    pre_experts_norm: str
    expert_fc1: str
    expert_fc2: str
    cuts_latents: bool
    """Whether the projections down to the latents are cut over tensor ranks, or whole on each of them."""


def manifest_of_rank(
    arch: Architecture, layout: ParallelLayout, where: RankCoordinates, dtype: str, names: SpecNames
) -> Manifest:
    """Storages `chunk{c}.{parameter name}` for each model chunk c of this rank.

    Raises: ModelError if the model cannot be split in this way.
    """
    if problems := split_problems(arch, layout, names):
        raise ModelError(problems)
    rank = _Rank(arch, layout, where, names, ManifestBuilder(f"train rank {where.rank}", dtype))
    for chunk in range(layout.virtual_pipeline):
        rank.add_chunk(chunk)
    return rank.builder.build()


def split_problems(arch: Architecture, layout: ParallelLayout, names: SpecNames) -> list[Problem]:
    """Every size of the model that these parallel sizes do not divide, and layers that do not fit the stages."""
    tensor = layout.tensor
    rules: list[tuple[str, int, str, int]] = [("attention heads", arch.heads, "tensor", tensor)]
    if (latent := arch.latent) is None:
        rules.append(
            ("rows of q, k and v together", (arch.heads + 2 * arch.query_groups) * arch.head_dim, "tensor", tensor)
        )
    elif names.cuts_latents:
        rules.append(("kv_lora_rank + qk_rope_head_dim", latent.key_value_rank + latent.rotary_dim, "tensor", tensor))
        if latent.query_rank is not None:
            rules.append(("q_lora_rank", latent.query_rank, "tensor", tensor))
    if arch.has_dense_layers:
        rules.append(("ffn", arch.ffn, "tensor", tensor))
    if arch.experts is not None:
        rules.append(("experts", arch.experts.count, "expert", layout.expert))
        rules.append(("expert ffn", arch.experts.ffn, "expert_tensor", layout.expert_tensor))
        rules.append(("ffn of the shared experts", arch.experts.shared_ffn, "tensor", tensor))
    found = [
        Problem(f"{arch.family} over {axis} = {size}", f"{what}: {given}", f"a multiple of {size}")
        for what, given, axis, size in rules
        if given % size
    ]
    found += [
        Problem(f"{arch.family} over {layout}", f"layers: {arch.layers}", f"layers for every stage: {problem}")
        for problem in stage_problems(arch.layers, layout)
    ]
    if arch.query_groups % tensor and tensor % arch.query_groups:
        found.append(
            Problem(
                f"{arch.family} over tensor = {tensor}",
                f"query groups (key-value heads): {arch.query_groups}",
                f"a multiple or a divisor of {tensor}",
            )
        )
    return found


@dataclass(frozen=True)
class _Rank:
    arch: Architecture
    layout: ParallelLayout
    where: RankCoordinates
    names: SpecNames
    builder: ManifestBuilder

    def add_chunk(self, chunk: int) -> None:
        arch, layout, stage = self.arch, self.layout, self.where.pipeline
        model = model_tensors(arch)
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
                self.add_mlp(in_layer, held.roles)
        if last:
            self.builder.whole(prefix + "decoder.final_layernorm.weight", model.roles["final_norm"])
            if arch.value_head:
                self.builder.whole(prefix + "output_layer.weight", model.roles["value_head"])
            elif not arch.tied_embeddings:
                self.add_vocabulary(prefix + "output_layer.weight", model.roles["head"])
            elif not first:  # a tied head on another stage than the embedding is a second copy of it
                self.add_vocabulary(prefix + "output_layer.weight", model.roles["embedding"])

    def add_vocabulary(self, storage: str, tensor: Tensor) -> None:
        padded = self.arch.padded_vocab(self.layout.tensor)
        count = padded // self.layout.tensor
        rows = [all_rows(tensor), Rows(None, 0, padded - self.arch.vocab)]
        self.builder.rows(storage, cut(rows, self.where.tensor * count, count), (self.arch.hidden,))

    def add_attention(self, prefix: str, layer: Roles) -> None:
        build = self.builder
        build.whole(prefix + self.names.input_norm, layer["input_norm"])
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
        self.builder.whole(prefix + self.names.latent_input_norm, layer["input_norm"])
        attention = prefix + "self_attention."
        if "q" in layer:
            self.add_rows(attention + "linear_q_proj.weight", layer["q"])
        else:
            self.add_latent(attention + "linear_q_down_proj.weight", layer["q_down"])
            self.builder.whole(attention + self.names.query_latent_norm, layer["q_down_norm"])
            self.add_rows(attention + "linear_q_up_proj.weight", layer["q_up"])
        self.add_latent(attention + "linear_kv_down_proj.weight", layer["kv_down"])
        self.builder.whole(attention + self.names.key_value_latent_norm, layer["kv_down_norm"])
        self.add_rows(attention + "linear_kv_up_proj.weight", layer["kv_up"])
        self.builder.columns(attention + "linear_proj.weight", layer["o"], self.where.tensor, self.layout.tensor)

    def add_latent(self, storage: str, tensor: Tensor) -> None:
        if self.names.cuts_latents:
            self.add_rows(storage, tensor)
        else:
            self.builder.whole(storage, tensor)

    def add_rows(self, storage: str, tensor: Tensor) -> None:
        """This tensor rank's run of rows."""
        self.builder.rows(storage, [shard(tensor, self.where.tensor, self.layout.tensor)], tensor.shape[1:])

    def qkv(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Rows]:
        """This rank's rows of the fused projection: for each query group its queries, its key and its value.

        Also where there are more tensor ranks than groups: Megatron cuts the same fused rows evenly, through the middle
        of a group, and gathers the activations (megatron.core.transformer.attention, get_query_key_value_tensors).
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

    def add_mlp(self, prefix: str, layer: Roles) -> None:
        self.builder.whole(prefix + self.names.post_attention_norm, layer["post_attention_norm"])
        self.add_gated(prefix + "mlp.", layer["gate"], layer["up"], layer["down"])

    def add_gated(self, prefix: str, gate: Tensor, up: Tensor, down: Tensor) -> None:
        index, shards = self.where.tensor, self.layout.tensor
        fc1 = [shard(gate, index, shards), shard(up, index, shards)]
        self.builder.rows(prefix + "linear_fc1.weight", fc1, (self.arch.hidden,))
        self.builder.columns(prefix + "linear_fc2.weight", down, index, shards)

    def add_experts(self, prefix: str, layer: LayerTensors) -> None:
        index, shards = self.where.expert_tensor, self.layout.expert_tensor
        here = len(layer.experts) // self.layout.expert
        self.builder.whole(prefix + self.names.pre_experts_norm, layer.roles["post_attention_norm"])
        self.builder.whole(prefix + "mlp.router.weight", layer.roles["router"])
        if "router_bias" in layer.roles:
            self.builder.whole(prefix + "mlp.router.expert_bias", layer.roles["router_bias"])
        if "shared_gate" in layer.roles:
            shared = (layer.roles["shared_gate"], layer.roles["shared_up"], layer.roles["shared_down"])
            self.add_gated(prefix + "mlp.shared_experts.", *shared)
        for local in range(here):
            expert = layer.experts[self.where.expert * here + local]
            fc1 = [shard(expert["expert_gate"], index, shards), shard(expert["expert_up"], index, shards)]
            self.builder.rows(prefix + self.names.expert_fc1.format(expert=local), fc1, (self.arch.hidden,))
            self.builder.columns(
                prefix + self.names.expert_fc2.format(expert=local), expert["expert_down"], index, shards
            )
