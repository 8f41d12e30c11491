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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.blocks import family_problems, in_blocks, quantized_shapes
from megagrpo.weights.boxes import Fill, Manifest, Storage
from megagrpo.weights.families import FAMILIES, renamed
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Roles, Rows, Tensor, all_rows
from megagrpo.weights.families.sglang_classes import SglangClass
from megagrpo.weights.families.sglang_gaps import INSTEAD, gap_problems
from megagrpo.weights.sides.assembly import ManifestBuilder, padded_shard, shard, shard_padded, tensors_by_role

VOCABULARY_MULTIPLE = 64
CPU_FFN_MULTIPLE = 32
SHOWN_PROBLEMS = 4


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
    stage, tensor_rank = divmod(rank, layout.tensor)
    builder = ManifestBuilder(f"engine {engine} rank {rank}", dtype)
    held = held_by(LayerOnEngine(arch, layout, tensor_rank, device, builder), stage)
    if quantization is None:
        return held
    # In blocks, with scales of float8 keys and values, always 1: the cache has its own dtype.
    blocks = in_blocks(held, quantized_shapes(arch))
    layers = [name.removesuffix("o_proj.weight") for name in blocks.storages if name.endswith("o_proj.weight")]
    modules = FAMILIES[arch.family].sglang.attentions
    scales = [f"{layer}{module}.{of}_scale" for layer in layers for module in modules for of in "kv"]
    storages = {**blocks.storages, **{name: Storage(name, (), "float32") for name in scales}}
    return replace(blocks, storages=storages, fills=blocks.fills + tuple(Fill(name, (), (), 1.0) for name in scales))


def held_by(rank: LayerOnEngine, stage: int) -> Manifest:
    """Returns the manifest of a rank of this stage, in the model's dtype, under the engine's names."""
    arch, of_class, model = rank.arch, rank.of_class, tensors_by_role(rank.arch)
    first, last = stage == 0, stage == rank.layout.pipeline - 1
    if first or of_class.embedding_on_every_stage:
        rank.add_vocabulary(model.roles["embedding"])
    for layer in stage_layers(len(arch.layers), stage, rank.layout.pipeline):
        arch.layers[layer].on_engine(rank, model.layers[layer])
    if last:
        rank.whole(model.roles["final_norm"])
    if arch.tied_embeddings:
        if last and not first:
            rank.add_vocabulary(model.roles["embedding"], "lm_head.weight")
    elif last or of_class.head_on_every_stage:
        rank.add_vocabulary(model.roles["head"])
    return rank.builder.build().renamed(lambda name: renamed(name, of_class.renamed))


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """Returns the layers of a pipeline stage: equal runs, the last ones longer by one if they do not divide
    (get_pp_indices in sglang/srt/distributed/utils.py)."""
    share, rest = divmod(layers, stages)
    begin = stage * share + max(0, stage - (stages - rest))
    return range(begin, begin + share + (stage >= stages - rest))


@lru_cache(maxsize=256)
def _block_problems(arch: Architecture, layout: EngineSizes) -> tuple[Problem, ...]:
    """Returns the first rank's problems with blocks, which hold for all: equal parts end at multiples of its end."""
    sample, builder = arch.sample(), ManifestBuilder("an engine rank", "bfloat16")
    rank = LayerOnEngine(sample, layout, 0, "cuda", builder)
    for layer, tensors in zip(sample.layers, tensors_by_role(sample).layers, strict=True):
        layer.on_engine(rank, tensors)
    try:
        in_blocks(builder.build(), quantized_shapes(sample))
    except ModelError as error:
        return tuple(error.problems[:SHOWN_PROBLEMS])
    return ()


def split_problems(
    arch: Architecture, layout: EngineSizes, device: str, quantization: str | None = None
) -> list[Problem]:
    """Returns the reasons why an engine of these sizes cannot hold the model."""
    problems = _size_problems(arch, layout, device)
    if problems or quantization is None:
        return problems
    return family_problems(arch) or list(_block_problems(arch, layout))


def _size_problems(arch: Architecture, layout: EngineSizes, device: str) -> list[Problem]:
    of_class = FAMILIES[arch.family].sglang
    if problems := list(gap_problems(arch, of_class.gaps)):
        return problems
    if device == "cpu" and not of_class.on_cpus:
        return [Problem(f"{arch.family} on SGLang", "CPUs", "GPUs, which SGLang's class needs", INSTEAD)]
    if arch.value_head:
        return [Problem(f"{arch.family} on SGLang", "a value head", "a model with logits")]
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
    if layout.pipeline > len(arch.layers):
        problems.append(Problem(where, f"{len(arch.layers)} layers", "a layer for each stage"))
    if arch.tied_embeddings and (of_class.ties == "never" or (layout.pipeline > 1 and of_class.ties != "on stages")):
        wanted = "a head of its own" if of_class.ties == "never" else "pipeline = 1"
        problems.append(Problem(where, "tied embeddings", f"{wanted}: SGLang's class has no head for them"))
    if layout.pipeline > 1 and not of_class.stages:
        problems.append(Problem(where, f"pipeline = {layout.pipeline}", "1: SGLang's class has no stages"))
    if layout.attention_data > 1 and not of_class.attention_groups:
        having = [name for name, family in FAMILIES.items() if family.sglang.attention_groups]
        needed = f"1: SGLang has it for {', '.join(having)}"
        problems.append(Problem(where, f"attention_data = {layout.attention_data}", needed))
    if expert > 1 and not of_class.expert_parallel:
        problems.append(Problem(where, f"expert = {expert}", "1: SGLang's class does not load parts of the experts"))
    if not of_class.fuses and arch.query_groups % tensor:
        problems.append(Problem(where, f"key-value heads: {arch.query_groups}", f"a multiple of {tensor}"))
    if device == "cpu" and not of_class.pads:
        multiple = CPU_FFN_MULTIPLE * tensor
        unlike = sorted({kind.mlp.ffn for kind in arch.kinds if kind.mlp.ffn % multiple})
        needed = f"a multiple of {multiple} on CPUs, where SGLang pads others and fails to load them"
        problems += [Problem(where, f"ffn: {ffn}", needed) for ffn in unlike]
    least = {"one": 1, "tensor": tensor, "tensor / expert": tensor // expert}[of_class.least_experts]
    if 0 < arch.experts < least:
        problems.append(Problem(where, f"experts: {arch.experts}", f"at least {least}, as SGLang demands"))
    parts = dict.fromkeys(part for kind in arch.kinds for part in (kind.attention, kind.mlp))
    return problems + [Problem(where, *unmet) for part in parts for unmet in part.unmet_on_engine(layout, device)]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class LayerOnEngine:
    """Tensor rank `rank` of a stage. Parts of layers add their parameters, under the names in the family's class."""

    arch: Architecture
    layout: EngineSizes
    rank: int
    device: str
    builder: ManifestBuilder

    @property
    def of_class(self) -> SglangClass:
        return FAMILIES[self.arch.family].sglang

    @property
    def group(self) -> int:
        """Returns the number of ranks over which attention and the vocabulary are cut."""
        return self.layout.tensor // self.layout.attention_data

    @property
    def group_rank(self) -> int:
        return self.rank % self.group

    def add_vocabulary(self, tensor: Tensor, storage: str = "") -> None:
        how = "cut" if storage or tensor.role != "embedding" else self.of_class.embedding
        if how == "whole":
            self.builder.whole(tensor.name, tensor)
            return
        ranks = self.group if how == "cut" or self.layout.attention_data == 1 else 1
        padded = _padded(tensor.shape[0], VOCABULARY_MULTIPLE)
        if padded % ranks:
            padded = _padded(tensor.shape[0], VOCABULARY_MULTIPLE * ranks)
        rows = padded_shard(tensor, padded, self.group_rank % ranks, ranks)
        self.builder.rows(storage or tensor.name, rows, tensor.shape[1:])

    # --- for parts ----------------------------------------------------------------------------------------------------

    def whole(self, tensor: Tensor, *, wide: bool = False) -> None:
        """Adds a whole tensor. `wide`: in float32, whatever the model's dtype."""
        self.builder.whole(tensor.name, tensor, "float32" if wide else "")

    def rows(self, rows: Sequence[Rows], fused: tuple[str, str] = ("", ""), *, wide: bool = False) -> None:
        """Adds rows of tensors, one after another. `fused`: a part of the first one's name, and SGLang's in its place
        for all of them. `wide`: in float32."""
        if fused[0] and not self.of_class.fuses:
            for part in rows:
                self.rows([part])
            return
        (first, *_) = (part.tensor for part in rows if part.tensor is not None)
        self.builder.rows(first.name.replace(*fused), rows, first.shape[1:], "float32" if wide else "")

    def shard(self, tensor: Tensor) -> Rows:
        """Returns the rows of the heads of this rank, of those that share the attention."""
        return shard(tensor, self.group_rank, self.group)

    def columns(self, tensor: Tensor) -> None:
        self.builder.columns(tensor.name, tensor, self.group_rank, self.group)

    def mlp(self, up: Sequence[Tensor], down: Tensor, ffn: int) -> None:
        """Adds this rank's part of an MLP with the matrices `up` before its activation. `ffn` is the size of the whole
        MLP with padding."""
        tensor = self.layout.tensor
        for fused in [up] if self.of_class.fuses else [[matrix] for matrix in up]:
            rows = [part for matrix in fused for part in padded_shard(matrix, ffn, self.rank, tensor)]
            name = up[0].name.replace("gate_proj", "gate_up_proj") if self.of_class.fuses else fused[0].name
            self.builder.rows(name, rows, up[0].shape[1:])
        self.builder.columns(down.name, down, self.rank, tensor, ffn)

    def experts(self, router: Tensor, experts: Sequence[Roles], ffn: int, bias: bool) -> None:
        """Adds a run of consecutive experts of `ffn` columns, each cut over the ranks that share the run. Their biases
        are in float32. Of these ranks, whose products are added, one has the bias of the sum."""
        shards = self.layout.tensor // self.layout.expert
        run, index = divmod(self.rank, shards)
        count = len(experts) // self.layout.expert
        held, width = experts[run * count : (run + 1) * count], self.padded(ffn) // shards
        module, _, _ = router.name.removesuffix(".weight").rpartition(".")
        prefix, pair = module + ".experts.", ("expert_gate", "expert_up")
        if self.of_class.alternates:
            for suffix, dtype in (("", ""), ("_bias", "float32"))[: 1 + bias]:
                alternating = [[roles[role + suffix] for role in pair] for roles in held]
                self.builder.alternating(f"{prefix}w13_weight{suffix}", alternating, index, shards, dtype)
        else:
            gate_up = [
                [part for role in pair for part in shard_padded(roles[role], index, shards, width)] for roles in held
            ]
            self.builder.stacked(prefix + "w13_weight", gate_up, (self.arch.hidden,))
        down = [roles["expert_down"] for roles in held]
        self.builder.stacked_columns(prefix + "w2_weight", down, index, shards, width)
        if bias:
            rows = [all_rows(roles["expert_down_bias"]) for roles in held]
            own = [[part if index == 0 else replace(part, tensor=None)] for part in rows]
            self.builder.stacked(prefix + "w2_weight_bias", own, (), "float32")

    def padded(self, ffn: int) -> int:
        """Returns `ffn`, on CPUs padded to a multiple of 32 x tensor (sglang/srt/configs/update_config.py)."""
        return _padded(ffn, CPU_FFN_MULTIPLE * self.layout.tensor) if self.device == "cpu" else ffn
