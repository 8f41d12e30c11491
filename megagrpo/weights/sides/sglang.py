"""What one tensor-parallel rank of an SGLang engine holds, under SGLang's own parameter names (0.5.23, unquantised).

Read from sglang/srt/models and sglang/srt/layers. Vocabularies are padded to a multiple of 64 and cut by rows; q, k and
v are cut one by one and then fused; gate and up likewise; all experts of a rank are one 3-D parameter. On the CPU,
feed-forward sizes are padded with zeros to a multiple of 32 x tensor: an MLP's before it is cut, experts' part by part.
With more ranks than key-value heads, each rank holds one head, the same on several. Everything has the model's dtype,
the router too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.sides.assembly import ManifestBuilder, Rows, padded_shard, shard_padded
from megagrpo.weights.sides.roles import LayerTensors, Roles, model_tensors

VOCABULARY_MULTIPLE = 64
CPU_FFN_MULTIPLE = 32
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")


class EngineSizes(Protocol):
    """Parallel sizes of one engine: `tensor` ranks in all, of which groups of tensor / expert share each expert."""

    @property
    def tensor(self) -> int: ...

    @property
    def expert(self) -> int: ...


def manifest(arch: Architecture, layout: EngineSizes, rank: int, dtype: str, device: str, engine: int = 0) -> Manifest:
    """Storages are the names of the model's `named_parameters()` on tensor rank `rank`; a tied head is not among them.

    `device` is cpu or cuda. Raises: ModelError if SGLang cannot hold the model in this way.
    """
    if problems := split_problems(arch, layout, device):
        raise ModelError(problems)
    builder = ManifestBuilder(f"engine {engine} rank {rank}", dtype)
    model = model_tensors(arch)
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
    if arch.latent is not None:
        # Parts of kv_b_proj by head (w_kc, w_vc) are copied when a server loads; an update would not reach them.
        given = "the engine derives further weights from those of latent attention: unverified"
        return [Problem(f"{arch.family} on SGLang", given, "weights that the engine uses as they are")]
    if arch.family not in FAMILIES:
        return [Problem("SGLang engine", arch.family, f"one of {', '.join(FAMILIES)}")]
    if arch.family == "mixtral" and (problems := _mixtral_problems(arch)):
        return problems
    tensor, expert = layout.tensor, layout.expert
    where = f"{arch.family} over tensor = {tensor}" + (f", expert = {expert}" if expert > 1 else "")
    found = []
    if tensor % expert:
        found.append(Problem(where, f"expert = {expert}", f"a divisor of tensor = {tensor}"))
    rules = [("attention heads", arch.heads, tensor)]
    if arch.experts is None:
        rules.append(("ffn", _padded_ffn(arch.ffn, tensor, device), tensor))
    else:
        rules.append(("experts", arch.experts.count, expert))
        shards = max(1, tensor // expert)
        rules.append(("expert ffn", arch.experts.ffn, shards))
    found += [
        Problem(where, f"{what}: {given}", f"a multiple of {size}") for what, given, size in rules if given % size
    ]
    groups = arch.query_groups
    if device == "cpu" and groups % tensor:
        # SGLang pads the heads there instead of repeating them, and then fails to load the weights.
        found.append(Problem(where, f"key-value heads: {groups}", f"a multiple of {tensor}, on the CPU"))
    elif groups % tensor and tensor % groups:
        found.append(Problem(where, f"key-value heads: {groups}", f"a multiple or a divisor of {tensor}"))
    return found


def _mixtral_problems(arch: Architecture) -> list[Problem]:
    """What other families may have, and sglang/srt/models/mixtral.py does not read from the config."""
    rules = [
        ("tied embeddings", arch.tied_embeddings, "embeddings that are not tied"),
        ("scaled rotary embedding", arch.rope.factor is not None, "a rotary embedding without scaling"),
        ("head_dim", arch.head_dim * arch.heads != arch.hidden, "hidden_size / num_attention_heads"),
    ]
    return [Problem(f"mixtral on SGLang: {what}", "", needed) for what, wrong, needed in rules if wrong]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded_ffn(size: int, tensor: int, device: str) -> int:
    """sglang/srt/configs/update_config.py: by the tensor size, also where experts are not cut by it."""
    return _padded(size, CPU_FFN_MULTIPLE * tensor) if device == "cpu" else size


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
        for role in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
            if role in layer.roles:
                self.builder.whole(layer.roles[role].name, layer.roles[role])
        self.add_attention(layer.roles)
        if layer.experts:
            self.add_experts(layer)
        else:
            self.add_mlp(layer.roles)

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

    def add_mlp(self, layer: Roles) -> None:
        padded = _padded_ffn(self.arch.ffn, self.tensor, self.device)
        rows = [part for role in ("gate", "up") for part in padded_shard(layer[role], padded, self.rank, self.tensor)]
        self.builder.rows(layer["gate"].name.replace("gate_proj", "gate_up_proj"), rows, (self.arch.hidden,))
        self.builder.columns(layer["down"].name, layer["down"], self.rank, self.tensor, padded)

    def add_experts(self, layer: LayerTensors) -> None:
        """The router whole; of the experts a run of consecutive ones, each cut over the ranks that share the run."""
        router = layer.roles["router"]
        self.builder.whole(router.name, router)
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
