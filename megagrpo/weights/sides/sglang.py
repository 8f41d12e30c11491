"""What one tensor-parallel rank of an SGLang engine holds, under SGLang's own parameter names (0.5.23, unquantised).

Read from sglang/srt/models and sglang/srt/layers. A vocabulary is padded to a multiple of 64 and cut by rows. SGLang
cuts q, k and v one by one and then fuses them, gate and up likewise. All experts of a rank are one 3-D parameter. On
the CPU, feed-forward sizes are padded with zeros to a multiple of 32 x tensor: an MLP before it is cut, an expert part
by part. With more ranks than key-value heads, each rank holds one head, and several ranks hold the same. Everything
has the model's dtype, the router too.

A dense decoder needs no entry here: SGLang's classes for them share these names. If one does not, the engine's check of
parameter names refuses it when the run starts.

Latent attention: the projections down are whole on every rank, those of queries and keys fused; the projections up are
cut by heads. SGLang derives further weights (w_kc, w_vc) from kv_b_proj; they are not parameters and are not described
here: the weight loader makes them anew. Shared experts are an MLP of their own: servers are started with arguments that
keep them apart from the routed experts (rollout/sglang/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture, Experts, Role, Tensor
from megagrpo.weights.sides.assembly import (
    LayerTensors,
    ManifestBuilder,
    Roles,
    Rows,
    all_rows,
    padded_shard,
    role_problems,
    shard,
    shard_padded,
    tensors_by_role,
)

VOCABULARY_MULTIPLE = 64
CPU_FFN_MULTIPLE = 32
HELD: frozenset[Role] = frozenset([
    "embedding", "head", "final_norm", "input_norm", "post_attention_norm",
    "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o",
    "q_down", "q_down_norm", "q_up", "kv_down", "kv_down_norm", "kv_up",
    "gate", "up", "down", "router", "router_bias", "expert_gate", "expert_up", "expert_down",
    "shared_gate", "shared_up", "shared_down",
])  # fmt: skip
"""The kinds of tensors that this side places."""


class EngineSizes(Protocol):
    """Parallel sizes of one engine: `tensor` ranks in all, of which groups of tensor / expert share each expert."""

    @property
    def tensor(self) -> int: ...

    @property
    def expert(self) -> int: ...


def manifest(arch: Architecture, layout: EngineSizes, rank: int, dtype: str, device: str, engine: int = 0) -> Manifest:
    """Storages are the names of the model's `named_parameters()` on tensor rank `rank`; a tied head is not among them.

    `device` is cpu or cuda. Raises ModelError if SGLang cannot hold the model in this way.
    """
    if problems := split_problems(arch, layout, device):
        raise ModelError(problems)
    builder = ManifestBuilder(f"engine {engine} rank {rank}", dtype)
    model = tensors_by_role(arch)
    holder = _Rank(arch, layout.tensor, layout.expert, rank, device, builder)
    holder.add_vocabulary(model.roles["embedding"])
    for layer in model.layers:
        holder.add_layer(layer)
    builder.whole(model.roles["final_norm"].name, model.roles["final_norm"])
    if not arch.tied_embeddings:
        holder.add_vocabulary(model.roles["head"])
    return builder.build()


def split_problems(arch: Architecture, layout: EngineSizes, device: str) -> list[Problem]:
    """Every reason why an engine of these sizes cannot hold the model."""
    if problems := role_problems(arch, HELD, "SGLang") + _mixtral_problems(arch):
        return problems
    tensor, expert = layout.tensor, layout.expert
    where = f"{arch.family} over tensor = {tensor}" + (f", expert = {expert}" if expert > 1 else "")
    found = []
    if tensor % expert:
        found.append(Problem(where, f"expert = {expert}", f"a divisor of tensor = {tensor}"))
    rules = [("attention heads", arch.heads, tensor)]
    if arch.has_dense_layers:
        rules.append(("ffn", _padded_ffn(arch.ffn, tensor, device), tensor))
    if arch.experts is not None:
        rules.append(("experts", arch.experts.count, expert))
        shards = max(1, tensor // expert)
        rules.append(("expert ffn", arch.experts.ffn, shards))
        rules.append(("shared experts' ffn", _padded_shared_ffn(arch.experts, tensor, device), tensor))
    found += [
        Problem(where, f"{what}: {given}", f"a multiple of {size}") for what, given, size in rules if given % size
    ]
    groups = arch.query_groups
    if arch.latent is not None:
        return found  # every head has keys and values of its own
    if device == "cpu" and groups % tensor:
        # SGLang pads the heads there instead of repeating them, and then fails to load the weights.
        found.append(Problem(where, f"key-value heads: {groups}", f"a multiple of {tensor}, on the CPU"))
    elif groups % tensor and tensor % groups:
        found.append(Problem(where, f"key-value heads: {groups}", f"a multiple or a divisor of {tensor}"))
    return found


def _mixtral_problems(arch: Architecture) -> list[Problem]:
    """Refuses what sglang/srt/models/mixtral.py does not read from the config, unlike the other families' classes."""
    if arch.family != "mixtral":
        return []
    rules = [
        ("tied embeddings", arch.tied_embeddings, "embeddings that are not tied"),
        ("scaled rotary embedding", arch.rope.factor is not None, "a rotary embedding without scaling"),
        ("head_dim", arch.head_dim * arch.heads != arch.hidden, "hidden_size / num_attention_heads"),
    ]
    return [Problem(f"mixtral on SGLang: {what}", "", needed) for what, wrong, needed in rules if wrong]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded_ffn(size: int, tensor: int, device: str) -> int:
    """Padded by the tensor size even where experts are not cut by it (sglang/srt/configs/update_config.py)."""
    return _padded(size, CPU_FFN_MULTIPLE * tensor) if device == "cpu" else size


def _padded_shared_ffn(experts: Experts, tensor: int, device: str) -> int:
    """SGLang pads the size of one expert and multiplies it by the number of shared experts."""
    return _padded_ffn(experts.ffn, tensor, device) * (experts.shared_ffn // experts.ffn)


@dataclass(frozen=True)
class _Rank:
    arch: Architecture
    tensor: int
    expert: int
    rank: int
    device: str
    builder: ManifestBuilder

    def add_vocabulary(self, tensor: Tensor) -> None:
        padded = _padded(tensor.shape[0], VOCABULARY_MULTIPLE)
        if padded % self.tensor:
            padded = _padded(tensor.shape[0], VOCABULARY_MULTIPLE * self.tensor)
        self.builder.rows(tensor.name, padded_shard(tensor, padded, self.rank, self.tensor), tensor.shape[1:])

    def add_layer(self, layer: LayerTensors) -> None:
        for role in ("input_norm", "post_attention_norm", "q_norm", "k_norm", "q_down_norm", "kv_down_norm"):
            if role in layer.roles:
                self.builder.whole(layer.roles[role].name, layer.roles[role])
        if self.arch.latent is not None:
            self.add_latent_attention(layer.roles)
        else:
            self.add_attention(layer.roles)
        if not layer.experts:
            padded = _padded_ffn(self.arch.ffn, self.tensor, self.device)
            self.add_mlp(layer.roles["gate"], layer.roles["up"], layer.roles["down"], padded)
            return
        self.add_experts(layer)
        if "shared_gate" in layer.roles and self.arch.experts is not None:
            padded = _padded_shared_ffn(self.arch.experts, self.tensor, self.device)
            self.add_mlp(layer.roles["shared_gate"], layer.roles["shared_up"], layer.roles["shared_down"], padded)

    def add_attention(self, layer: Roles) -> None:
        name = layer["q"].name.replace("q_proj", "qkv_proj")
        self.builder.rows(name, self.qkv(layer["q"], layer["k"], layer["v"]), (self.arch.hidden,))
        if self.arch.qkv_bias:
            name = layer["q_bias"].name.replace("q_proj", "qkv_proj")
            self.builder.rows(name, self.qkv(layer["q_bias"], layer["k_bias"], layer["v_bias"]), ())
        self.builder.columns(layer["o"].name, layer["o"], self.rank, self.tensor)

    def qkv(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Rows]:
        """This rank's queries, then its keys, then its values."""
        queries, heads = q.shape[0] // self.tensor, max(1, self.arch.query_groups // self.tensor)
        first_head = self.rank * self.arch.query_groups // self.tensor
        yield Rows(q, self.rank * queries, queries)
        for tensor in (k, v):
            yield Rows(tensor, first_head * self.arch.head_dim, heads * self.arch.head_dim)

    def add_latent_attention(self, layer: Roles) -> None:
        """The projections down are whole, and fused if queries have one too. The projections up are cut by heads."""
        if "q_down" in layer:
            name = layer["q_down"].name.replace("q_a_proj", "fused_qkv_a_proj_with_mqa")
            self.builder.rows(name, [all_rows(layer["q_down"]), all_rows(layer["kv_down"])], (self.arch.hidden,))
        else:
            self.builder.whole(layer["kv_down"].name, layer["kv_down"])
        for tensor in (layer.get("q_up") or layer["q"], layer["kv_up"]):
            self.builder.rows(tensor.name, [shard(tensor, self.rank, self.tensor)], tensor.shape[1:])
        self.builder.columns(layer["o"].name, layer["o"], self.rank, self.tensor)

    def add_mlp(self, gate: Tensor, up: Tensor, down: Tensor, padded: int) -> None:
        """`padded` is the size of the whole MLP with padding."""
        rows = [part for tensor in (gate, up) for part in padded_shard(tensor, padded, self.rank, self.tensor)]
        self.builder.rows(gate.name.replace("gate_proj", "gate_up_proj"), rows, (self.arch.hidden,))
        self.builder.columns(down.name, down, self.rank, self.tensor, padded)

    def add_experts(self, layer: LayerTensors) -> None:
        """The router whole, and a run of consecutive experts, each cut over the ranks that share the run."""
        router = layer.roles["router"]
        self.builder.whole(router.name, router)
        if "router_bias" in layer.roles:
            self.builder.whole(layer.roles["router_bias"].name, layer.roles["router_bias"])
        shards = self.tensor // self.expert
        run, index = divmod(self.rank, shards)
        here = len(layer.experts) // self.expert
        held = layer.experts[run * here : (run + 1) * here]
        ffn = held[0]["expert_gate"].shape[0]
        width = _padded_ffn(ffn, self.tensor, self.device) // shards
        gate_up = [
            [part for role in ("expert_gate", "expert_up") for part in shard_padded(roles[role], index, shards, width)]
            for roles in held
        ]
        prefix = router.name.removesuffix("gate.weight") + "experts."
        self.builder.stacked(prefix + "w13_weight", gate_up, self.arch.hidden)
        self.builder.stacked_columns(
            prefix + "w2_weight", [roles["expert_down"] for roles in held], index, shards, width
        )
