"""An independent, naive account of what a Megatron rank holds: whole tensors fused by cat and cut by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts import Attention, Experts, LatentAttention, Mlp, Norms, Rope, SigmoidRouter

Tensors = dict[str, torch.Tensor]

# family: the module, and its gate, up and down projections
EXPERT_NAMES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


TINY: dict[str, Any] = {
    "family": "qwen2", "hidden": 20, "vocab": 31, "max_positions": 64, "norm_epsilon": 1e-5, "tied_embeddings": False,
    "heads": 4, "rope": Rope(1e4), "groups": 2, "head_dim": 6, "bias": False, "norm": None,
    "query_rank": 12, "key_value_rank": 10, "plain_dim": 6, "rotary_dim": 2, "value_dim": 5, "ffn": 28,
    "experts": 4, "per_token": 2, "expert_ffn": 12, "normalize_top_k": True, "router": None, "shared_ffn": 0,
}  # fmt: skip
"""Unequal dimensions: fields of an architecture and of its parts."""


def architecture(layers: int = 4, **changes: Any) -> Architecture:
    """A tiny qwen2, or with changed fields."""
    return _of(Attention, [Mlp] * layers, {"bias": changes.get("family", "qwen2") == "qwen2"} | changes)


def moe_architecture(layers: int = 4, **changes: Any) -> Architecture:
    return _of(Attention, [Experts] * layers, {"family": "qwen3_moe", "norm": "head"} | changes)


def latent_architecture(layers: int = 4, dense: int = 1, **changes: Any) -> Architecture:
    """A tiny deepseek_v3: the first layers dense, the others with routed and shared experts."""
    own = {"family": "deepseek_v3", "norm_epsilon": 1e-6, "router": SigmoidRouter(2, 1, 2.5), "shared_ffn": 16}
    return _of(LatentAttention, [Mlp] * dense + [Experts] * (layers - dense), own | changes)


def _of(attention: type, mlps: Sequence[type[Mlp | Experts]], changes: dict[str, Any]) -> Architecture:
    assert changes.keys() <= TINY.keys()
    sizes = TINY | changes

    def made(kind: Any, **own: Any) -> Any:
        given = sizes | own
        return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})

    mixing, parts = made(attention), {Mlp: made(Mlp), Experts: made(Experts, ffn=sizes["expert_ffn"])}
    return made(Architecture, layers=tuple(Layer(mixing, parts[mlp], Norms(mixing.hidden)) for mlp in mlps))


ARCHITECTURES = {"dense": architecture, "experts": moe_architecture, "latent": latent_architecture}


def random_checkpoint(arch: Architecture, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    values = {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in tensors_of(arch)}
    return {name: value if name.endswith("correction_bias") else value.to(dtype) for name, value in values.items()}


def layers_by_piece(layers: int, layout: ParallelLayout) -> list[list[int]]:
    """The model's layers dealt out in order to its pieces: all stages, once for each chunk."""
    given = {0: layout.first_stage_layers, layout.pipeline - 1: layout.last_stage_layers}
    lengths: dict[int, int] = {stage: length for stage, length in given.items() if length is not None}
    for stage in range(layout.pipeline):
        if stage not in lengths:
            others = [length for length in given.values() if length is not None]
            lengths[stage] = (layers - sum(others)) // (layout.pipeline - len(others))
    deck = iter(range(layers))
    return [
        [next(deck) for _ in range(lengths[stage] // layout.virtual_pipeline)]
        for _ in range(layout.virtual_pipeline)
        for stage in range(layout.pipeline)
    ]


def rank_tensors(
    arch: Architecture, layout: ParallelLayout, where: RankCoordinates, checkpoint: Tensors, te: bool = False
) -> Tensors:
    """Every parameter of one rank by name, with the local or the transformer-engine spec's names."""
    held: Tensors = {}
    pieces = layers_by_piece(len(arch.layers), layout)
    for chunk in range(layout.virtual_pipeline):
        piece = chunk * layout.pipeline + where.pipeline
        if piece == 0:
            held[f"chunk{chunk}.embedding.word_embeddings.weight"] = vocabulary(
                checkpoint["model.embed_tokens.weight"], layout.tensor, where.tensor
            )
        for local, number in enumerate(pieces[piece]):
            layer = layer_tensors(arch, layout, where, checkpoint, number, te)
            held |= {f"chunk{chunk}.decoder.layers.{local}.{name}": tensor for name, tensor in layer.items()}
        if piece == layout.pipeline * layout.virtual_pipeline - 1:
            held[f"chunk{chunk}.decoder.final_layernorm.weight"] = checkpoint["model.norm.weight"]
            head = "model.embed_tokens.weight" if arch.tied_embeddings else "lm_head.weight"
            if not arch.tied_embeddings or layout.pipeline > 1:
                held[f"chunk{chunk}.output_layer.weight"] = vocabulary(checkpoint[head], layout.tensor, where.tensor)
    return held


def held_by_ranks(arch: Architecture, layout: ParallelLayout, checkpoint: Tensors, te: bool = False) -> list[Tensors]:
    return [rank_tensors(arch, layout, where, checkpoint, te) for where in rank_grid(layout)]


def vocabulary(weight: torch.Tensor, tensor: int, index: int) -> torch.Tensor:
    missing = -weight.shape[0] % tensor
    return torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]).chunk(tensor)[index]


def layer_tensors(
    arch: Architecture, layout: ParallelLayout, where: RankCoordinates, checkpoint: Tensors, number: int, te: bool
) -> Tensors:
    prefix, attention, experts = f"model.layers.{number}.", arch.layers[number].attention, arch.layers[number].mlp

    def hf(name: str) -> torch.Tensor:
        return checkpoint[prefix + name]

    def fused(kind: str) -> torch.Tensor:
        q, k, v = (hf(f"self_attn.{x}_proj.{kind}").unflatten(0, (attention.groups, -1)) for x in "qkv")
        return torch.cat([q, k, v], dim=1).flatten(0, 1).chunk(layout.tensor)[where.tensor]

    def fc1(gate: torch.Tensor, up: torch.Tensor, shards: int, index: int) -> torch.Tensor:
        return torch.cat([gate.chunk(shards)[index], up.chunk(shards)[index]])

    held = {"self_attention.linear_proj.weight": hf("self_attn.o_proj.weight").chunk(layout.tensor, 1)[where.tensor]}
    if isinstance(attention, LatentAttention):
        held["input_layernorm.weight"] = hf("input_layernorm.weight")
        held |= latent_tensors(layout, where, checkpoint, prefix, te)
    else:
        norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
        held[norm] = hf("input_layernorm.weight")
        held["self_attention.linear_qkv.weight"] = fused("weight")
        if attention.bias:
            held["self_attention.linear_qkv.bias"] = fused("bias")
        if attention.norm:
            held["self_attention.q_layernorm.weight"] = hf("self_attn.q_norm.weight")
            held["self_attention.k_layernorm.weight"] = hf("self_attn.k_norm.weight")
    post = hf("post_attention_layernorm.weight")
    if isinstance(experts, Mlp):
        held["mlp.linear_fc1.layer_norm_weight" if te else "pre_mlp_layernorm.weight"] = post
        gate, up = hf("mlp.gate_proj.weight"), hf("mlp.up_proj.weight")
        held["mlp.linear_fc1.weight"] = fc1(gate, up, layout.tensor, where.tensor)
        held["mlp.linear_fc2.weight"] = hf("mlp.down_proj.weight").chunk(layout.tensor, 1)[where.tensor]
        return held
    held["pre_mlp_layernorm.weight"] = post
    module, *names_of_projections = EXPERT_NAMES[arch.family]
    held["mlp.router.weight"] = hf(f"{module}.gate.weight")
    if experts.router is not None:
        held["mlp.router.expert_bias"] = hf("mlp.gate.e_score_correction_bias")
    if experts.shared_ffn:
        gate, up, down = (hf(f"mlp.shared_experts.{x}_proj.weight") for x in ("gate", "up", "down"))
        held["mlp.shared_experts.linear_fc1.weight"] = fc1(gate, up, layout.tensor, where.tensor)
        held["mlp.shared_experts.linear_fc2.weight"] = down.chunk(layout.tensor, 1)[where.tensor]
    here = experts.experts // layout.expert
    for local in range(here):
        gate, up, down = (
            hf(f"{module}.experts.{where.expert * here + local}.{name}.weight") for name in names_of_projections
        )
        cut = (layout.expert_tensor, where.expert_tensor)
        names = (
            (f"linear_fc1.weight{local}", f"linear_fc2.weight{local}")
            if te
            else (f"local_experts.{local}.linear_fc1.weight", f"local_experts.{local}.linear_fc2.weight")
        )
        held[f"mlp.experts.{names[0]}"] = fc1(gate, up, *cut)
        held[f"mlp.experts.{names[1]}"] = down.chunk(cut[0], 1)[cut[1]]
    return held


def latent_tensors(
    layout: ParallelLayout, where: RankCoordinates, checkpoint: Tensors, prefix: str, te: bool
) -> Tensors:
    """The projections of latent attention. Those down to the latents are whole with transformer-engine."""

    def hf(name: str) -> torch.Tensor:
        return checkpoint[f"{prefix}self_attn.{name}.weight"]

    def cut(weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(layout.tensor)[where.tensor]

    down = hf("kv_a_proj_with_mqa")
    held = {
        "linear_kv_down_proj.weight": down if te else cut(down),
        "linear_kv_up_proj.weight": cut(hf("kv_b_proj")),
        "linear_kv_up_proj.layer_norm_weight" if te else "kv_layernorm.weight": hf("kv_a_layernorm"),
    }
    if f"{prefix}self_attn.q_proj.weight" in checkpoint:
        held["linear_q_proj.weight"] = cut(hf("q_proj"))
    else:
        held["linear_q_down_proj.weight"] = hf("q_a_proj") if te else cut(hf("q_a_proj"))
        held["linear_q_up_proj.weight"] = cut(hf("q_b_proj"))
        held["linear_q_up_proj.layer_norm_weight" if te else "q_layernorm.weight"] = hf("q_a_layernorm")
    return {f"self_attention.{name}": tensor for name, tensor in held.items()}


def engine_tensors(
    arch: Architecture, sizes: EngineLayoutConfig, rank: int, device: str, checkpoint: Tensors
) -> Tensors:
    """Every parameter of one SGLang rank by name: whole tensors padded by cat, cut by chunk, fused by cat and stack."""
    tensor, expert, group = sizes.tensor, sizes.expert, sizes.tensor // sizes.attention_data
    stage, rank = divmod(rank, tensor)
    first, last = stage == 0, stage == sizes.pipeline - 1

    def cut(weight: torch.Tensor, padded: int, dim: int, parts: int = tensor) -> torch.Tensor:
        shape = list(weight.shape)
        shape[dim] = padded - shape[dim]
        return torch.cat([weight, weight.new_zeros(shape)], dim).chunk(parts, dim)[rank % parts]

    def ffn(size: int) -> int:
        return size if device == "cuda" else (size + 32 * tensor - 1) // (32 * tensor) * (32 * tensor)

    def vocabulary(weight: torch.Tensor) -> torch.Tensor:
        padded = (arch.vocab + 63) // 64 * 64
        while padded % group:
            padded += 64
        if padded != (arch.vocab + 63) // 64 * 64:
            padded = (arch.vocab + 64 * group - 1) // (64 * group) * (64 * group)
        return cut(weight, padded, 0, group)

    def key_or_value(weight: torch.Tensor) -> torch.Tensor:
        heads = weight.unflatten(0, (layer.attention.groups, -1))
        copies = max(1, group // layer.attention.groups)
        return heads.repeat_interleave(copies, 0).chunk(group)[rank % group].flatten(0, 1)

    shards, index = tensor // expert, rank % (tensor // expert)

    def part(weights: torch.Tensor, dim: int) -> torch.Tensor:
        weights = weights.chunk(shards, dim)[index]
        shape = list(weights.shape)
        shape[dim] = ffn(layer.mlp.ffn) // shards - shape[dim]
        return torch.cat([weights, weights.new_zeros(shape)], dim)

    held = {"model.embed_tokens.weight": vocabulary(checkpoint["model.embed_tokens.weight"])} if first else {}
    lengths = [len(arch.layers) // sizes.pipeline] * sizes.pipeline
    for longer in range(len(arch.layers) % sizes.pipeline):
        lengths[-1 - longer] += 1
    for number in range(sum(lengths[:stage]), sum(lengths[: stage + 1])):
        prefix, layer = f"model.layers.{number}.", arch.layers[number]
        for name in checkpoint:
            if name.startswith(prefix) and "norm" in name:
                held[name] = checkpoint[name]
        attention = prefix + "self_attn."
        if isinstance(layer.attention, LatentAttention):
            down = [checkpoint[attention + "kv_a_proj_with_mqa.weight"]]
            if f"{attention}q_a_proj.weight" in checkpoint:
                down.insert(0, checkpoint[attention + "q_a_proj.weight"])
            fused = ["kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa"][len(down) - 1]
            held[f"{attention}{fused}.weight"] = torch.cat(down)
            for name in ("q_proj", "q_b_proj", "kv_b_proj"):
                if f"{attention}{name}.weight" in checkpoint:
                    up = checkpoint[f"{attention}{name}.weight"]
                    held[f"{attention}{name}.weight"] = cut(up, up.shape[0], 0, group)
        for kind in ("weight", "bias"):
            if isinstance(layer.attention, Attention) and f"{attention}q_proj.{kind}" in checkpoint:
                q, k, v = (checkpoint[f"{attention}{x}_proj.{kind}"] for x in "qkv")
                qkv = [cut(q, q.shape[0], 0, group), key_or_value(k), key_or_value(v)]
                held[f"{attention}qkv_proj.{kind}"] = torch.cat(qkv)
        o = checkpoint[attention + "o_proj.weight"]
        held[attention + "o_proj.weight"] = cut(o, o.shape[1], 1, group)
        mlp, size, experts = f"{prefix}mlp.", ffn(layer.mlp.ffn), layer.mlp
        if isinstance(experts, Experts):
            mlp, size = f"{prefix}mlp.shared_experts.", experts.shared_ffn // experts.ffn * size
        if f"{mlp}gate_proj.weight" in checkpoint:
            gate, up, down = (checkpoint[f"{mlp}{x}_proj.weight"] for x in ("gate", "up", "down"))
            held[mlp + "gate_up_proj.weight"] = torch.cat([cut(gate, size, 0), cut(up, size, 0)])
            held[mlp + "down_proj.weight"] = cut(down, size, 1)
        if isinstance(experts, Mlp):
            continue
        module, *names = EXPERT_NAMES[arch.family]
        mlp = f"{prefix}{module}."
        gate, up, down = (
            torch.stack([checkpoint[f"{mlp}experts.{e}.{name}.weight"] for e in range(experts.experts)]).chunk(expert)[
                rank // (tensor // expert)
            ]
            for name in names
        )
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            if mlp + name in checkpoint:
                held[mlp + name] = checkpoint[mlp + name]
        held[mlp + "experts.w13_weight"] = torch.cat([part(gate, 1), part(up, 1)], 1)
        held[mlp + "experts.w2_weight"] = part(down, 2)
    if last:
        held["model.norm.weight"] = checkpoint["model.norm.weight"]
    if arch.tied_embeddings and last and not first:
        held["lm_head.weight"] = vocabulary(checkpoint["model.embed_tokens.weight"])
    if not arch.tied_embeddings and (last or arch.family in ("llama", "mistral", "mixtral", "qwen3_moe")):
        held["lm_head.weight"] = vocabulary(checkpoint["lm_head.weight"])
    return held
