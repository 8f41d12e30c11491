"""Options of attention over packed sequences, against transformers' attention over each sequence alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import attention
from megagrpo.megatron.attention import PackedAttention, attend
from megagrpo.megatron.batch import Packed, pack
from megagrpo.megatron.rotary import inverse_frequencies, magnitude, rotate
from megagrpo.weights.families.parts import LongRope, Rope, Temperature, Yarn
from tests.methods import rows_of

HEADS, GROUPS, HEAD_DIM = 4, 2, 16
LENGTHS = [19, 5, 1, 23, 16]
DIMENSIONS: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Family:
    """A config of transformers, and the options that give each of its two layers."""

    config: str
    changes: dict[str, Any]
    layers: list[dict[str, Any]]
    dimensions: dict[str, Any] = field(default_factory=dict)


def yarn(**changes: Any) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return scaling | changes


GPT_OSS_ROPE = Rope(1e4, yarn=Yarn(4.0, 16, truncate=False))
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
SHORT, LONG = tuple(1 + 0.1 * i for i in range(6)), tuple(2 + 0.7 * i for i in range(6))
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": list(SHORT),
    "long_factor": list(LONG),
}
ROPE_PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FEW_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {
    "gpt_oss": Family(
        "GptOssConfig",
        {"sliding_window": 6, "rope_parameters": yarn(truncate=False), **FEW_EXPERTS},
        [{"rope": GPT_OSS_ROPE, "sinks": True, "window": 6}, {"rope": GPT_OSS_ROPE, "sinks": True}],
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {"layer_types": list(GEMMA_ROPES), "rope_parameters": GEMMA_ROPES, "sliding_window": 4},
        [{"rope": Rope(1e4), "scale": 1 / 16, "window": 4}, {"rope": Rope(1e6, linear=8.0), "scale": 1 / 16}],
    ),
    "gemma2": Family(
        "Gemma2Config",
        {"sliding_window": 4, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 0.5},
        [{"scale": 0.5, "score_cap": 0.5, "window": 4}, {"scale": 0.5, "score_cap": 0.5}],
    ),
    "glm4_moe": Family("Glm4MoeConfig", {"rope_parameters": ROPE_PART}, [{"rope": Rope(1e4, part=0.5)}] * 2),
    "glm4": Family("Glm4Config", {"rope_parameters": ROPE_PART}, [{"rope": Rope(1e4, part=0.5, pairs=True)}] * 2),
    "ernie4_5": Family("Ernie4_5Config", {}, [{"rope": Rope(5e5, pairs=True)}] * 2),
    "phi3": Family(
        "Phi3Config",
        {"original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE},
        [{"rope": Rope(1e4, part=0.75, long=LongRope(4.0, 16, SHORT, LONG))}] * 2,
        {"hidden_size": HEADS * HEAD_DIM},
    ),
    "ministral3": Family(
        "Ministral3Config",
        {"rope_parameters": yarn(llama_4_scaling_beta=0.4, mscale=1.0, mscale_all_dim=0.5), "sliding_window": None},
        [{"rope": Rope(1e4, yarn=Yarn(4.0, 16, mscale_all_dim=0.5)), "query_temperature": Temperature(0.4, 16)}] * 2,
    ),
    "smollm3": Family("SmolLM3Config", {"no_rope_layers": [1, 0]}, [{"rope": Rope(2e6)}, {"rope": None}]),
}


def packed(lengths: list[int], context: int = 1) -> tuple[list[Packed], tuple[TrainSequence, ...]]:
    tokens = [np.arange(length) + 1 for length in lengths]
    sequences = tuple(
        TrainSequence(one, np.zeros(len(one), bool), np.zeros(len(one)), row) for row, one in enumerate(tokens)
    )
    layout = ParallelLayout(context=context)
    ranks = [pack(Microbatch(sequences), layout=layout, context_rank=r, device="cpu") for r in range(context)]
    return ranks, sequences


def core(**options: Any) -> PackedAttention:
    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": HEAD_DIM, "hidden_size": 64}
    one = SimpleNamespace(size=lambda: 1)
    groups: Any = SimpleNamespace(cp=one, tp=one)
    return PackedAttention(TransformerConfig(num_layers=1, **sizes), groups, **({"rope": Rope(1e4)} | options))


def attention_inputs(model: Any, lengths: list[int]) -> list[list[dict[str, Any]]]:
    """The keyword arguments of each layer's attention, for each sequence by itself."""
    calls: list[list[dict[str, Any]]] = [[] for _ in model.layers]
    for layer, found in zip(model.layers, calls, strict=True):
        layer.self_attn.register_forward_pre_hook(lambda _, args, kw, f=found: f.append(kw), with_kwargs=True)
    for length in lengths:
        model(torch.arange(length)[None] + 1)
    for layer in model.layers:
        layer.self_attn._forward_pre_hooks.clear()
        layer.self_attn.o_proj = torch.nn.Identity()
    return calls


def projected(module: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values of a module of transformers before their rotation: [tokens, heads, head_dim]."""
    if hasattr(module, "qkv_proj"):
        parts = module.qkv_proj(hidden).split([HEADS * HEAD_DIM, GROUPS * HEAD_DIM, GROUPS * HEAD_DIM], -1)
    else:
        parts = [getattr(module, f"{name}_proj")(hidden) for name in "qkv"]
    q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in parts)
    norms = [getattr(module, f"{name}_norm", torch.nn.Identity()) for name in "qk"]
    return [norms[0](q), norms[1](k), v]


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_packed_sequences_is_that_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**(DIMENSIONS | family.changes | family.dimensions))
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    ranks, sequences = packed(LENGTHS)
    (part,) = ranks
    order = rows_of(part, sequences)
    assert order.tolist() == [row for row, length in enumerate(LENGTHS) for _ in range(length)]
    for layer, calls, options in zip(model.layers, attention_inputs(model, LENGTHS), family.layers, strict=True):
        module, ours = layer.self_attn, core(**options)
        hidden = [call["hidden_states"].detach().requires_grad_() for call in calls]
        outputs = [
            module(**(call | {"hidden_states": one, "past_key_values": None}))[0]
            for call, one in zip(calls, hidden, strict=True)
        ]
        wanted = torch.cat([output[0].flatten(1) for output in outputs])
        weights, leaves = wanted.detach().cos(), [*hidden]
        gradients = [[*torch.autograd.grad((wanted * weights).sum(), leaves, retain_graph=True)]]
        if ours.softmax_offset is not None:
            gradients[0] += torch.autograd.grad((wanted * weights).sum(), [module.sinks])
            ours.softmax_offset.data.copy_(module.sinks)
            leaves.append(ours.softmax_offset)
        tokens = projected(module, torch.cat(hidden, dim=1)[0])
        output = ours(*tokens, None, packed_seq_params=part.sequences).flatten(1)
        gradients.append([*torch.autograd.grad((output * weights).sum(), leaves)])
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
        for of_theirs, of_ours in zip(*gradients, strict=True):
            assert (of_ours - of_theirs).abs().max() <= 1e-5 * of_theirs.abs().max() + 1e-6


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(1e6, linear=8.0), GEMMA_ROPES["full_attention"]),
        (Rope(15e4, yarn=Yarn(32.0, 4096, truncate=False)), yarn(rope_theta=15e4, factor=32.0, truncate=False)),
        (Rope(1e4, yarn=Yarn(8.0, 4096, magnitude=1.2)), yarn(factor=8.0, attention_factor=1.2)),
        (Rope(1e6, yarn=Yarn(16.0, 4096, 32, 1, 1, 1)), yarn(rope_theta=1e6, factor=16.0, mscale=1, mscale_all_dim=1)),
        (Rope(1e4, yarn=Yarn(4.0, 4096, mscale=0.7)), yarn(mscale=0.7)),
        (Rope(1e4, yarn=Yarn(0.5, 4096, 64, 2)), yarn(factor=0.5, beta_fast=64, beta_slow=2)),
        (Rope(1e4, yarn=Yarn(4.0, 4096), part=0.5), yarn(partial_rotary_factor=0.5)),
        (Rope(1e4, long=LongRope(1.0, 4096, SHORT, LONG), part=0.75), LONG_ROPE | {"factor": 1.0}),
        (Rope(1e4, long=LongRope(32.0, 4096, SHORT, LONG), part=0.75), LONG_ROPE | {"factor": 32.0}),
    ],
)  # fmt: skip
def test_frequencies_and_magnitudes_are_those_of_transformers(rope: Rope, parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(head_dim=HEAD_DIM)
    config.rope_parameters = parameters | {"original_max_position_embeddings": 4096}
    lengths = [4096, 4097] if rope.long else [4096]
    found = inverse_frequencies(rope, HEAD_DIM)
    for of_length, length in zip(found if rope.long else [found], lengths, strict=True):
        wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
        assert torch.equal(of_length, wanted)
        assert magnitude(rope) == pytest.approx(factor, rel=1e-12)


def plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention over one sequence, [tokens, heads, head_dim], by its definition."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if (cap := options["cap"]) is not None:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    near = (distance >= 0) & (distance < (options["window"] or len(q)))
    exponentials = torch.where(near, scores.exp(), 0)
    total = exponentials.sum(-1, keepdim=True)
    if options["sinks"] is not None:
        total = total + options["sinks"].exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", exponentials / total, v)


@patch.object(attention, "CAPPED_SCORES", 300)  # queries in several parts
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 1, 2, 7, 16, 59]),
    st.sampled_from([None, 0.7]),
    st.booleans(),
)
@settings(max_examples=40)
def test_every_mixture_of_options_on_context_ranks_is_attention_of_each_sequence(
    lengths: list[int], context: int, window: int | None, cap: float | None, has_sinks: bool
) -> None:
    torch.manual_seed(len(lengths))
    ranks, sequences = packed(lengths, context)
    sinks = torch.tensor([1.3, -0.4], dtype=torch.float64, requires_grad=True) if has_sinks else None
    options = {"window": window, "cap": cap, "sinks": sinks}
    whole = [[torch.randn(n, h, 4, dtype=torch.float64) for h in (2, 1, 1)] for n in lengths]
    rows = [rows_of(rank, sequences) for rank in ranks]
    local = []
    for rank, of_rank in zip(ranks, rows, strict=True):
        tokens = [torch.randn(len(of_rank), h, 4, dtype=torch.float64) for h in (2, 1, 1)]
        for tensor, kind in zip(tokens, range(3), strict=True):
            for row, sequence in enumerate(whole):
                tensor[of_rank == row] = sequence[kind][rank.sequences.positions[of_rank == row]]
            tensor.requires_grad_()
        local.append(tokens)
    for sequence in whole:
        for tensor in sequence:
            tensor.requires_grad_()
    keys, values = (torch.cat([tokens[kind] for tokens in local]) for kind in (1, 2))
    wanted, found = [plainly(*sequence, **options) for sequence in whole], torch.zeros((), dtype=torch.float64)
    for rank, of_rank, (queries, _, _) in zip(ranks, rows, local, strict=True):
        output = attend(queries, keys, values, rank.sequences.plan, None, **options)
        for row, expected in enumerate(wanted):
            at, positions = of_rank == row, rank.sequences.positions[of_rank == row]
            torch.testing.assert_close(output[at], expected[positions])
            found = found + (output[at] * expected.detach()[positions].cos()).sum()
    loss = sum(((expected * expected.detach().cos()).sum() for expected in wanted), torch.zeros(()))
    shared = [] if sinks is None else [sinks]
    theirs = torch.autograd.grad(loss, [tensor for sequence in whole for tensor in sequence] + shared)
    ours = torch.autograd.grad(found, [tensor for tokens in local for tensor in tokens] + shared)
    for kind in range(3):
        for row in range(len(whole)):
            for rank, of_rank, gradient in zip(ranks, rows, ours[kind::3], strict=False):
                positions = rank.sequences.positions[of_rank == row]
                torch.testing.assert_close(gradient[of_rank == row], theirs[3 * row + kind][positions])
    if shared:
        torch.testing.assert_close(ours[-1], theirs[-1])


def test_sinks_in_bfloat16_are_not_rounded_by_the_scale() -> None:
    sinks = torch.tensor([9.0625, 20.125], dtype=torch.bfloat16)
    q = torch.zeros(1, 2, 1, 24, dtype=torch.bfloat16)
    found = attention._attend_with_sinks(q, q, torch.ones_like(q), None, 24**-0.5, sinks)[0, :, 0, 0]
    torch.testing.assert_close(found.float(), 1 / (1 + sinks.float().exp()), rtol=2**-7, atol=0)


def test_neighbours_and_parts_are_rotated_as_complex_numbers() -> None:
    torch.manual_seed(0)
    heads, angles = torch.randn(9, 3, 10, dtype=torch.float64), torch.randn(9, 1, 2, dtype=torch.float64)
    for pairs, first, second in [(True, [0, 2], [1, 3]), (False, [0, 1], [2, 3])]:
        wide = angles.repeat_interleave(2, -1) if pairs else torch.cat([angles, angles], -1)
        turned = torch.complex(heads[..., first], heads[..., second]) * torch.polar(torch.ones_like(angles), angles)
        wanted = heads.clone()
        wanted[..., first], wanted[..., second] = turned.real, turned.imag
        found = rotate(heads, wide.cos(), wide.sin(), pairs=pairs)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[..., 4:], heads[..., 4:])


def test_windows_compute_no_scores_far_from_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    plain = F.scaled_dot_product_attention

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
        computed.append(len(q) * q.shape[2] * k.shape[2])
        return plain(q, k, v, **arguments)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", counted)
    (part,), _ = packed([1000, 900, 10])
    tokens = [torch.randn(len(part.tokens[0]), heads, 8) for heads in (2, 1, 1)]
    attend(*tokens, part.sequences.plan, None, window=16)
    assert sum(computed) <= 2 * 16 * (2 * 1008) + 10 * 10


def test_layers_with_the_same_rotary_embedding_share_its_tables() -> None:
    (part,), _ = packed([3, 4])
    tokens = [torch.randn(7, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    for rope in (Rope(1e4), Rope(1e4), Rope(1e6), None):
        core(rope=rope)(*tokens, None, packed_seq_params=part.sequences)
    assert len(part.sequences.rotary) == 2
