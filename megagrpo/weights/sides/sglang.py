"""The manifest of one rank of an SGLang engine, under SGLang's own parameter names (0.5.23).

Read from sglang/srt/models and sglang/srt/layers. A vocabulary is padded to a multiple of 64 and cut by rows. SGLang
cuts q, k and v one by one and then fuses them, gate and up likewise. All experts of a rank are one 3-D parameter. On
the CPU, feed-forward sizes are padded with zeros to a multiple of 32 x tensor: an MLP before it is cut, an expert part
by part. With more ranks than key-value heads, each rank holds one head, and several ranks hold the same. Everything
has the model's dtype, the router too.

SGLang's classes for dense decoders share these names. If one does not, the engine's check of parameter names refuses it
when the run starts. A class's other differences stand in the family's row (SglangClass in weights/families).

Latent attention: the projections down are whole on every rank, those of queries and keys fused; the projections up are
cut by heads. SGLang derives further weights (w_kc, w_vc) from kv_b_proj; they are not parameters and are not described
here: the weight loader makes them anew. Shared experts are an MLP of their own: servers are started with arguments that
keep them apart from the routed experts (rollout/sglang/arguments.py).

With attention data parallelism, attention, the embedding and the head (servers are started with enable_dp_lm_head) are
cut over the ranks of one group, and each group holds them all; MLPs and experts are cut over all tensor ranks as ever.
A pipeline stage holds a run of layers, the first one the embedding, the last one the final norm and the head. Some of
SGLang's classes have an unused head on the other stages too. A tied head on another stage than the embedding is a
parameter of its own.

A quantised engine has the same storages with blocks of float8 in them, and scales beside (weights/blocks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.blocks import in_blocks, quantized_shapes
from megagrpo.weights.boxes import Fill, Manifest, Storage
from megagrpo.weights.families import FAMILIES
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
SHOWN_PROBLEMS = 4
HELD: frozenset[Role] = frozenset([
    "embedding", "head", "final_norm", "input_norm", "post_attention_norm",
    "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o",
    "q_down", "q_down_norm", "q_up", "kv_down", "kv_down_norm", "kv_up",
    "gate", "up", "down", "router", "router_bias", "expert_gate", "expert_up", "expert_down",
    "shared_gate", "shared_up", "shared_down",
])  # fmt: skip
"""The kinds of tensors that this side places."""


class EngineSizes(Protocol):
    """Parallel sizes of one engine: `pipeline` stages of `tensor` ranks. In a stage, groups of tensor / expert
    ranks share each expert, and groups of tensor / attention_data share the attention."""

    tensor: int
    expert: int
    pipeline: int
    attention_data: int

    def __hash__(self) -> int: ...


def manifest(
    arch: Architecture,
    layout: EngineSizes,
    rank: int,
    dtype: str,
    device: str,
    engine: int = 0,
    quantization: str | None = None,
) -> Manifest:
    """Returns the manifest of `rank`, with the names of the model's `named_parameters()` as storages. Ranks count as in
    SGLang: the tensor ranks of the first stage, then those of the second, and so on.

    `device` is cpu or cuda. Raises ModelError if SGLang cannot hold the model in this way.
    """
    if problems := split_problems(arch, layout, device):
        raise ModelError(problems)
    builder = ManifestBuilder(f"engine {engine} rank {rank}", dtype)
    model = tensors_by_role(arch)
    stage, tensor_rank = divmod(rank, layout.tensor)
    first, last = stage == 0, stage == layout.pipeline - 1
    holder = _Rank(arch, layout, tensor_rank, device, builder)
    if first:
        holder.add_vocabulary(model.roles["embedding"])
    for layer in stage_layers(arch.layers, stage, layout.pipeline):
        holder.add_layer(model.layers[layer])
    if last:
        builder.whole(model.roles["final_norm"].name, model.roles["final_norm"])
    if arch.tied_embeddings:
        if last and not first:
            holder.add_vocabulary(model.roles["embedding"], "lm_head.weight")
    elif last or FAMILIES[arch.family].sglang.head_on_every_stage:
        holder.add_vocabulary(model.roles["head"])
    if quantization is None:
        return builder.build()
    # In blocks, with scales of float8 keys and values, always 1: the cache has its own dtype.
    blocks = in_blocks(builder.build(), quantized_shapes(arch))
    layers = [name.removesuffix("o_proj.weight") for name in blocks.storages if name.endswith("o_proj.weight")]
    modules = FAMILIES[arch.family].sglang.attentions
    scales = [f"{layer}{module}.{of}_scale" for layer in layers for module in modules for of in "kv"]
    storages = {**blocks.storages, **{name: Storage(name, (), "float32") for name in scales}}
    return replace(blocks, storages=storages, fills=blocks.fills + tuple(Fill(name, (), (), 1.0) for name in scales))


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """Returns the layers of a pipeline stage: equal runs, the last ones longer by one if they do not divide
    (get_pp_indices in sglang/srt/distributed/utils.py)."""
    share, rest = divmod(layers, stages)
    begin = stage * share + max(0, stage - (stages - rest))
    return range(begin, begin + share + (stage >= stages - rest))


@lru_cache(maxsize=256)
def _block_problems(arch: Architecture, layout: EngineSizes) -> tuple[Problem, ...]:
    """Returns the first rank's problems with blocks, which hold for all: equal parts end at multiples of its end."""
    model, builder = tensors_by_role(arch), ManifestBuilder("an engine rank", "bfloat16")
    holder = _Rank(arch, layout, 0, "cuda", builder)
    for layer in {id(layer.experts): layer for layer in (model.layers[0], model.layers[-1])}.values():
        holder.add_layer(layer)
    try:
        in_blocks(builder.build(), quantized_shapes(arch))
    except ModelError as error:
        return tuple(error.problems[:SHOWN_PROBLEMS])
    return ()


def split_problems(
    arch: Architecture, layout: EngineSizes, device: str, quantization: str | None = None
) -> list[Problem]:
    """Returns the reasons why an engine of these sizes cannot hold the model."""
    problems = _size_problems(arch, layout, device)
    return problems if problems or quantization is None else list(_block_problems(arch, layout))


def _size_problems(arch: Architecture, layout: EngineSizes, device: str) -> list[Problem]:
    of_class = FAMILIES[arch.family].sglang
    problems = role_problems(arch, HELD, "SGLang") + (_variants(arch) if of_class.ignores_variants else [])
    if problems:
        return problems
    tensor, expert = layout.tensor, layout.expert
    sizes = {"expert": expert, "attention_data": layout.attention_data, "pipeline": layout.pipeline}
    where = ", ".join([f"{arch.family} over tensor = {tensor}", *(f"{k} = {v}" for k, v in sizes.items() if v > 1)])
    problems = [
        Problem(where, f"{name} = {size}", f"a divisor of tensor = {tensor}")
        for name, size in sizes.items()
        if name != "pipeline" and tensor % size
    ]
    if problems:
        return problems
    if layout.pipeline > arch.layers:
        problems.append(Problem(where, f"{arch.layers} layers", "a layer for each stage"))
    if layout.pipeline > 1 and arch.tied_embeddings and of_class.head_on_every_stage:
        needed = "pipeline = 1: SGLang's last stage has no head for this family"
        problems.append(Problem(where, "tied embeddings", needed))
    if layout.attention_data > 1 and not of_class.attention_groups:
        having = [name for name, family in FAMILIES.items() if family.sglang.attention_groups]
        needed = f"1: SGLang has it for {', '.join(having)}"
        problems.append(Problem(where, f"attention_data = {layout.attention_data}", needed))
    group = tensor // layout.attention_data
    rules = [("attention heads", arch.heads, tensor if device == "cpu" else group)]
    if arch.has_dense_layers:
        rules.append(("ffn", _padded_ffn(arch.ffn, tensor, device), tensor))
    if arch.experts is not None:
        rules.append(("experts", arch.experts.count, expert))
        shards = tensor // expert
        rules.append(("expert ffn", arch.experts.ffn, shards))
        rules.append(("shared experts' ffn", _padded_shared_ffn(arch.experts, tensor, device), tensor))
        least = {"one": 1, "tensor": tensor, "tensor / expert": shards}[of_class.least_experts]
        if least > arch.experts.count:
            problems.append(Problem(where, f"experts: {arch.experts.count}", f"at least {least}, as SGLang demands"))
    problems += [
        Problem(where, f"{what}: {given}", f"a multiple of {size}") for what, given, size in rules if given % size
    ]
    groups = arch.query_groups
    if arch.latent is not None:
        return problems  # every head has keys and values of its own
    if device == "cpu" and groups % tensor:
        # SGLang pads the heads there instead of repeating them, and then fails to load the weights.
        problems.append(Problem(where, f"key-value heads: {groups}", f"a multiple of {tensor}, on the CPU"))
    elif groups % group and group % groups:
        problems.append(Problem(where, f"key-value heads: {groups}", f"a multiple or a divisor of {group}"))
    return problems


def _variants(arch: Architecture) -> list[Problem]:
    """Returns a problem for each config value that some of SGLang's classes ignore."""
    rules = [
        ("tied embeddings", arch.tied_embeddings, "embeddings that are not tied"),
        ("scaled rotary embedding", arch.rope.factor is not None, "a rotary embedding without scaling"),
        ("head_dim", arch.head_dim * arch.heads != arch.hidden, "hidden_size / num_attention_heads"),
    ]
    return [Problem(f"{arch.family} on SGLang: {what}", "", needed) for what, wrong, needed in rules if wrong]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded_ffn(size: int, tensor: int, device: str) -> int:
    """Pads to a multiple of 32 x `tensor` on the CPU, even for uncut experts (sglang/srt/configs/update_config.py)."""
    return _padded(size, CPU_FFN_MULTIPLE * tensor) if device == "cpu" else size


def _padded_shared_ffn(experts: Experts, tensor: int, device: str) -> int:
    """Pads the size of one expert and multiplies it by the number of shared experts, as SGLang does."""
    return _padded_ffn(experts.ffn, tensor, device) * (experts.shared_ffn // experts.ffn)


@dataclass(frozen=True)
class _Rank:
    """Tensor rank `rank` of a stage."""

    arch: Architecture
    layout: EngineSizes
    rank: int
    device: str
    builder: ManifestBuilder

    @property
    def group(self) -> int:
        """Returns the number of ranks over which attention and the vocabulary are cut."""
        return self.layout.tensor // self.layout.attention_data

    @property
    def group_rank(self) -> int:
        return self.rank % self.group

    def add_vocabulary(self, tensor: Tensor, storage: str = "") -> None:
        padded = _padded(tensor.shape[0], VOCABULARY_MULTIPLE)
        if padded % self.group:
            padded = _padded(tensor.shape[0], VOCABULARY_MULTIPLE * self.group)
        rows = padded_shard(tensor, padded, self.group_rank, self.group)
        self.builder.rows(storage or tensor.name, rows, tensor.shape[1:])

    def add_layer(self, layer: LayerTensors) -> None:
        for role in ("input_norm", "post_attention_norm", "q_norm", "k_norm", "q_down_norm", "kv_down_norm"):
            if role in layer.roles:
                self.builder.whole(layer.roles[role].name, layer.roles[role])
        if self.arch.latent is not None:
            self.add_latent_attention(layer.roles)
        else:
            self.add_attention(layer.roles)
        if not layer.experts:
            padded = _padded_ffn(self.arch.ffn, self.layout.tensor, self.device)
            self.add_mlp(layer.roles["gate"], layer.roles["up"], layer.roles["down"], padded)
            return
        self.add_experts(layer)
        if "shared_gate" in layer.roles and self.arch.experts is not None:
            padded = _padded_shared_ffn(self.arch.experts, self.layout.tensor, self.device)
            self.add_mlp(layer.roles["shared_gate"], layer.roles["shared_up"], layer.roles["shared_down"], padded)

    def add_attention(self, layer: Roles) -> None:
        name = layer["q"].name.replace("q_proj", "qkv_proj")
        self.builder.rows(name, self.qkv(layer["q"], layer["k"], layer["v"]), (self.arch.hidden,))
        if self.arch.qkv_bias:
            name = layer["q_bias"].name.replace("q_proj", "qkv_proj")
            self.builder.rows(name, self.qkv(layer["q_bias"], layer["k_bias"], layer["v_bias"]), ())
        self.builder.columns(layer["o"].name, layer["o"], self.group_rank, self.group)

    def qkv(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Rows]:
        """Yields this rank's queries, then its keys, then its values."""
        queries, heads = q.shape[0] // self.group, max(1, self.arch.query_groups // self.group)
        first_head = self.group_rank * self.arch.query_groups // self.group
        yield Rows(q, self.group_rank * queries, queries)
        for tensor in (k, v):
            yield Rows(tensor, first_head * self.arch.head_dim, heads * self.arch.head_dim)

    def add_latent_attention(self, layer: Roles) -> None:
        """Adds the projections down whole, fused if queries have one, and the projections up, cut by heads."""
        if "q_down" in layer:
            name = layer["q_down"].name.replace("q_a_proj", "fused_qkv_a_proj_with_mqa")
            self.builder.rows(name, [all_rows(layer["q_down"]), all_rows(layer["kv_down"])], (self.arch.hidden,))
        else:
            self.builder.whole(layer["kv_down"].name, layer["kv_down"])
        for tensor in (layer.get("q_up") or layer["q"], layer["kv_up"]):
            self.builder.rows(tensor.name, [shard(tensor, self.group_rank, self.group)], tensor.shape[1:])
        self.builder.columns(layer["o"].name, layer["o"], self.group_rank, self.group)

    def add_mlp(self, gate: Tensor, up: Tensor, down: Tensor, padded: int) -> None:
        """Adds this rank's part of an MLP. `padded` is the size of the whole MLP with padding."""
        rows = [part for tensor in (gate, up) for part in padded_shard(tensor, padded, self.rank, self.layout.tensor)]
        self.builder.rows(gate.name.replace("gate_proj", "gate_up_proj"), rows, (self.arch.hidden,))
        self.builder.columns(down.name, down, self.rank, self.layout.tensor, padded)

    def add_experts(self, layer: LayerTensors) -> None:
        """Adds the whole router, and a run of consecutive experts, each cut over the ranks that share the run."""
        router = layer.roles["router"]
        self.builder.whole(router.name, router)
        if "router_bias" in layer.roles:
            self.builder.whole(layer.roles["router_bias"].name, layer.roles["router_bias"])
        shards = self.layout.tensor // self.layout.expert
        run, index = divmod(self.rank, shards)
        count = len(layer.experts) // self.layout.expert
        held = layer.experts[run * count : (run + 1) * count]
        ffn = held[0]["expert_gate"].shape[0]
        width = _padded_ffn(ffn, self.layout.tensor, self.device) // shards
        gate_up = [
            [part for role in ("expert_gate", "expert_up") for part in shard_padded(roles[role], index, shards, width)]
            for roles in held
        ]
        prefix = router.name.removesuffix("gate.weight") + "experts."
        self.builder.stacked(prefix + "w13_weight", gate_up, self.arch.hidden)
        self.builder.stacked_columns(
            prefix + "w2_weight", [roles["expert_down"] for roles in held], index, shards, width
        )
