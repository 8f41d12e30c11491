"""SGLang's parameters on each of its ranks, against whole tensors padded, cut and fused; and what it cannot hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.coverage import storage_problems
from megagrpo.weights.families.architecture import Architecture, Experts, LatentAttention, SigmoidRouter, critic_of
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from tests.unit.test_weights_plan import carry_out
from tests.weights_oracle import (
    architecture,
    engine_tensors,
    latent_architecture,
    moe_architecture,
    random_checkpoint,
    rank_tensors,
)


@st.composite
def engines(draw: st.DrawFn) -> tuple[Architecture, EngineLayoutConfig, str]:
    """A model and an engine that can hold it. Sizes that need padding, and sizes that do not."""
    tensor, device = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(["cpu", "cuda"]))
    per_rank = draw(st.integers(1, 2))
    groups = tensor * per_rank if device == "cpu" or tensor == 3 else draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(groups, tensor) * draw(st.integers(1, 2))
    changes: dict[str, Any] = {
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "query_groups": groups,
        "head_dim": draw(st.sampled_from([3, 6])),
        "vocab": draw(st.sampled_from([31, 64, 65, 129, 192])),
        "ffn": 12 * draw(st.integers(1, 9)),
    }
    kind = draw(st.sampled_from(["dense", "experts", "mixtral", "latent"]))
    if kind == "dense":
        return architecture(**changes, tied_embeddings=draw(st.booleans())), EngineLayoutConfig(tensor=tensor), device
    expert = draw(st.sampled_from([size for size in (1, 2, 3, 4) if tensor % size == 0]))
    experts = Experts(12, 2, 12 * draw(st.integers(1, 9)), True)
    if kind == "mixtral":
        hidden = heads * changes["head_dim"]  # SGLang's mixtral derives head_dim from it
        changes |= {"family": "mixtral", "hidden": hidden, "qk_norm": False}
    if kind == "latent":
        shared, dense = experts.ffn * draw(st.integers(1, 2)), draw(st.integers(0, 1))
        experts = replace(experts, router=SigmoidRouter(2, 1, 2.5), shared_ffn=shared, dense_layers=dense)
        latent = LatentAttention(draw(st.sampled_from([None, 12])), 10, changes["head_dim"] - 2, 2, 5)
        changes |= {"latent": latent, "query_groups": heads, "experts": experts}
        return latent_architecture(**changes), EngineLayoutConfig(tensor=tensor, expert=expert), device
    return moe_architecture(**changes, experts=experts), EngineLayoutConfig(tensor=tensor, expert=expert), device


@settings(max_examples=40)
@given(engine=engines())
def test_engine_ranks_get_what_the_oracle_says(engine: tuple[Architecture, EngineLayoutConfig, str]) -> None:
    arch, layout, device = engine
    checkpoint = random_checkpoint(arch)
    train = ParallelLayout()
    manifests = [sglang.manifest(arch, layout, rank, "float32", device, engine=3) for rank in range(layout.tensor)]
    assert [manifest.holder for manifest in manifests] == [f"engine 3 rank {rank}" for rank in range(layout.tensor)]
    assert not [problem for manifest in manifests for problem in storage_problems(manifest)]
    source = LOCAL_SPEC.manifest(arch, train, rank_grid(train)[0], "float32")
    arrived = carry_out(make_plan([source], manifests), [rank_tensors(arch, train, rank_grid(train)[0], checkpoint)])
    for rank, tensors in enumerate(arrived):
        expected = engine_tensors(arch, layout.tensor, layout.expert, rank, device, checkpoint)
        assert tensors.keys() == expected.keys()
        for name in expected:
            assert torch.equal(tensors[name], expected[name]), (rank, name)


def test_sizes_are_those_that_servers_have() -> None:
    """Names and shapes as 0.5.23 reports them on the CPU for a model with vocabulary 130 and ffn 200, tensor 2."""
    arch = architecture(layers=1, hidden=96, ffn=200, heads=6, query_groups=2, head_dim=16, vocab=130)
    manifest = sglang.manifest(arch, EngineLayoutConfig(tensor=2), 1, "bfloat16", "cpu")
    layer = "model.layers.0."
    assert {name: storage.shape for name, storage in manifest.storages.items()} == {
        "model.embed_tokens.weight": (96, 96),  # 130 -> 192
        layer + "input_layernorm.weight": (96,),
        layer + "post_attention_layernorm.weight": (96,),
        layer + "self_attn.qkv_proj.weight": (80, 96),
        layer + "self_attn.qkv_proj.bias": (80,),
        layer + "self_attn.o_proj.weight": (96, 48),
        layer + "mlp.gate_up_proj.weight": (256, 96),  # 200 -> 256
        layer + "mlp.down_proj.weight": (96, 128),
        "model.norm.weight": (96,),
        "lm_head.weight": (96, 96),
    }
    assert {storage.dtype for storage in manifest.storages.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("arch", "layout", "device", "named"),
    [
        (architecture(), {"tensor": 3}, "cuda", ["attention heads: 4", "ffn: 28", "a multiple or a divisor of 3"]),
        (architecture(), {"tensor": 4}, "cpu", ["key-value heads: 2", "a multiple of 4, on the CPU"]),
        (architecture(heads=12, query_groups=4), {"tensor": 6}, "cuda", ["key-value heads: 4"]),
        (moe_architecture(), {"tensor": 4, "expert": 3}, "cuda", ["a divisor of tensor = 4", "experts: 4"]),
        (moe_architecture(experts=Experts(4, 2, 9, True)), {"tensor": 2}, "cuda", ["expert ffn: 9"]),
        (critic_of(architecture()), {"tensor": 1}, "cuda", ["qwen2 on SGLang", "value_head"]),
        (latent_architecture(), {"tensor": 3}, "cpu", ["deepseek_v3", "attention heads: 4"]),
        (moe_architecture(family="mixtral", tied_embeddings=True), {"tensor": 1}, "cuda", ["tied", "head_dim"]),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_hold_is_refused(
    arch: Architecture, layout: dict[str, int], device: str, named: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        sglang.manifest(arch, EngineLayoutConfig(**layout), 0, "float32", device)
    assert all(text in str(caught.value) for text in named), caught.value


def test_a_model_with_latent_attention_has_the_parameters_that_servers_have() -> None:
    """Names and shapes as 0.5.23 reports them on the CPU for tests/tiny_models.py's deepseek_v3, tensor 2."""
    latent = LatentAttention(query_rank=36, key_value_rank=28, plain_dim=14, rotary_dim=8, value_dim=10)
    experts = Experts(8, 4, 20, True, SigmoidRouter(4, 2, 2.5), shared_ffn=40, dense_layers=1)
    sizes = {"layers": 2, "hidden": 48, "ffn": 80, "vocab": 131, "head_dim": 22}
    arch = latent_architecture(**sizes, latent=latent, experts=experts)
    manifest = sglang.manifest(arch, EngineLayoutConfig(tensor=2), 1, "bfloat16", "cpu")
    attention = {
        "input_layernorm.weight": (48,),
        "post_attention_layernorm.weight": (48,),
        "self_attn.q_a_layernorm.weight": (36,),
        "self_attn.kv_a_layernorm.weight": (28,),
        "self_attn.fused_qkv_a_proj_with_mqa.weight": (72, 48),
        "self_attn.q_b_proj.weight": (44, 36),
        "self_attn.kv_b_proj.weight": (48, 28),
        "self_attn.o_proj.weight": (48, 20),
    }
    dense = {"mlp.gate_up_proj.weight": (128, 48), "mlp.down_proj.weight": (48, 64)}  # 80 -> 128
    sparse = {
        "mlp.gate.weight": (8, 48),
        "mlp.gate.e_score_correction_bias": (8,),
        "mlp.experts.w13_weight": (8, 64, 48),  # 20 -> 64
        "mlp.experts.w2_weight": (8, 48, 32),
        "mlp.shared_experts.gate_up_proj.weight": (128, 48),  # 2 x 20 -> 2 x 64
        "mlp.shared_experts.down_proj.weight": (48, 64),
    }
    outside = {"model.embed_tokens.weight": (96, 48), "model.norm.weight": (48,), "lm_head.weight": (96, 48)}
    layers = [attention | dense, attention | sparse]
    expected = {f"model.layers.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items()}
    assert {name: storage.shape for name, storage in manifest.storages.items()} == outside | expected
    wide = [name for name, storage in manifest.storages.items() if storage.dtype != "bfloat16"]
    assert wide == ["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_padding_lets_the_cpu_hold_mlps_that_do_not_divide_but_no_such_experts() -> None:
    sglang.manifest(architecture(ffn=27), EngineLayoutConfig(tensor=2), 0, "float32", "cpu")
    with pytest.raises(ModelError, match="expert ffn: 9"):  # SGLang would leave the last row out
        sglang.manifest(
            moe_architecture(experts=Experts(4, 2, 9, True)), EngineLayoutConfig(tensor=2), 0, "float32", "cpu"
        )
