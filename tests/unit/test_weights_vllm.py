"""Refusals of vLLM's side, answers of its workers, and weights that are made anew inside them; without vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagrpo.errors import EngineError, ModelError, WeightSyncError
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import FAMILIES, architecture_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.vllm_classes import CLASSES, REFUSED
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import vllm
from megagrpo.weights.transport.choice import Channel, TransportName
from megagrpo.weights.transport.rendezvous import RendezvousHost
from megagrpo.weights.transport.vllm import VllmWeights, WeightsExtension, derive, refuse_packed
from tests.tiny_models import LONG_ROPE, YARN_ROPE, config_of


def architecture(family: str, **changes: Any) -> Architecture:
    return architecture_of(config_of(family, **changes).to_dict())


def wheres(arch: Architecture, device: str = "cuda", quantization: str | None = None, **sizes: int) -> list[str]:
    problems = vllm.split_problems(arch, EngineLayoutConfig(**sizes), device, quantization)
    return [f"{problem.where}: {problem.given}" for problem in problems]


FULL = {"layer_types": ["full_attention"] * 4}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("family", "changes", "asked", "named"),
    [
        ("qwen3", {}, {}, []),
        ("qwen3", {}, {"quantization": "fp8"}, ["qwen3 on vLLM: fp8"]),
        ("qwen3", {}, {"pipeline": 2}, ["qwen3 over tensor = 1: pipeline = 2"]),
        ("qwen3", {}, {"tensor": 3}, ["qwen3 over tensor = 3: attention heads: 4", "key-value heads: 2", "ffn: 80"]),
        ("qwen3", {"vocab_size": 60, "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 128},
         {"tensor": 128}, ["64 rows of the padded vocabulary"]),
        ("qwen3", {}, {"device": "cpu"}, ["head_dim: 16"]),
        ("qwen3", {"head_dim": 32}, {"device": "cpu"}, []),
        ("deepseek_v3", {}, {"device": "cpu"}, ["kv_lora_rank and qk_rope_head_dim: 28 and 8"]),
        ("deepseek_v3", LATENT, {"device": "cpu"}, []),
        ("deepseek_v3", LATENT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"device": "cpu"},
         ["a plain rotary embedding"]),
        ("gpt_oss", {"tie_word_embeddings": True}, {}, ["gpt_oss over tensor = 1: tied embeddings"]),
        ("gemma2", {}, {}, ["tie_word_embeddings: a head of its own"]),
        ("gemma2", {"tie_word_embeddings": True}, {}, []),
        ("ministral3", {}, {}, ["original_max_position_embeddings: 16"]),
        ("ministral3", {"rope_parameters": YARN_ROPE}, {}, []),
        ("phi3_long", {}, {}, []),
        ("phi3_long", {"rope_parameters": {**LONG_ROPE, "factor": 9.0}}, {}, ["rope_scaling.factor: 9.0"]),
        ("qwen2", {"head_dim": 16}, {}, ["head_dim: 16"]),
        ("qwen2_moe", {"qkv_bias": False}, {}, ["qkv_bias: false"]),
        ("exaone4", FULL, {}, ["layer_types: no window, and no rotary embedding"]),
        ("exaone4", FULL | {"sliding_window": None}, {}, []),
        ("gpt_oss", FULL, {}, ["layer_types: other layers with windows"]),
        ("gpt_oss", {"rms_norm_eps": 1e-6, "swiglu_limit": 5.0}, {}, ["rms_norm_eps: 1e-06", "swiglu_limit: 5.0"]),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}, ["rope_type: no scaling"]),
        ("gpt_oss", {"rope_parameters": YARN_ROPE}, {}, ["attention_factor or mscale_all_dim: 0.7"]),
        ("gpt_oss", {"rope_parameters": YARN_ROPE | {"attention_factor": 1.5}}, {}, ["mscale_all_dim: 1.5"]),
        ("olmo2", {}, {"tensor": 2}, ["olmo2 over tensor = 2: norms of all heads together"]),
        ("qwen3_next", {}, {}, ["qwen3_next on vLLM: gated delta nets"]),
        ("mistral3", {}, {}, ["a vision tower"]),
    ],
)  # fmt: skip
def test_what_vllm_cannot_hold_is_named(
    family: str, changes: dict[str, Any], asked: dict[str, Any], named: list[str]
) -> None:
    found = wheres(architecture(family, **changes), **asked)
    assert len(found) == len(named)
    assert all(part in line for part, line in zip(named, found, strict=True))


def test_every_family_is_served_or_refused_with_a_reason() -> None:
    assert sorted([*CLASSES, *REFUSED]) == sorted(FAMILIES)


def test_a_critic_is_refused() -> None:
    assert "a value head" in wheres(replace(architecture("qwen3"), tied_embeddings=False, value_head=True))[0]


@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_ranks_hold_the_whole_model(family: str) -> None:
    arch = architecture(family)
    whole = vllm.manifest(arch, EngineLayoutConfig(), 0, "float32", "cuda")
    held = [vllm.manifest(arch, EngineLayoutConfig(tensor=2), rank, "float32", "cuda") for rank in range(2)]
    plan = make_plan([whole], held)
    arrived = {transfer.source_placement.box.tensor for rank in range(2) for transfer in plan.incoming(rank)}
    assert arrived == {placement.box.tensor for placement in whole.placements}


# --- answers ----------------------------------------------------------------------------------------------------------


class Workers:
    """A server of two ranks, which answers `results`."""

    def __init__(self, *results: object) -> None:
        self.results: list[object] = list(results)
        self.asked: list[Any] = []

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        assert path == "/collective_rpc"
        self.asked.append(json.loads(body["kwargs"]["commands"]))
        return {"results": self.results}


def connected(workers: Workers) -> VllmWeights:
    """Makes the ranks' end; `workers` answers the plan first."""
    arch = architecture("qwen3")
    held = [vllm.manifest(arch, EngineLayoutConfig(tensor=2), rank, "float32", "cuda") for rank in range(2)]
    plan = make_plan([vllm.manifest(arch, EngineLayoutConfig(), 0, "float32", "cuda")], held)
    weights = VllmWeights(workers.post, "engine 0", held)
    host = RendezvousHost("127.0.0.1", timeout_seconds=20.0)
    weights.connect(plan, range(2), Channel(TransportName.SHARED_MEMORY, host.rendezvous, 1000))
    return weights


def test_each_rank_gets_its_command_and_all_problems_are_told() -> None:
    workers = Workers(json.dumps({"value": None}), json.dumps({"value": None}))
    weights = connected(workers)
    assert [command["destination"] for command in workers.asked[0]] == [0, 1]
    workers.results = [json.dumps({"value": {"a": 1}}), json.dumps({"value": {"a": 2**64 - 1}})]
    assert weights.digests() == [{"a": 1}, {"a": 2**64 - 1}]
    workers.results = [json.dumps({"problems": [[f"rank {rank}", "ill", "", ""]]}) for rank in range(2)]
    with pytest.raises(WeightSyncError) as caught:
        weights.receive(1)
    assert [problem.where for problem in caught.value.problems] == ["rank 0", "rank 1"]
    weights.close()
    with pytest.raises(EngineError, match="no connection"):
        weights.digests()


@pytest.mark.parametrize(
    ("results", "says"),
    [
        (["no"], "the answers of megagrpo's extension"),
        ([None], "megagrpo's extension"),
        (['{"value": null}'], "1 ranks"),
    ],
)
def test_other_answers_are_refused(results: list[object], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        connected(Workers(*results))


def test_a_worker_answers_what_is_no_command() -> None:
    extension = WeightsExtension()
    extension.rank = 0
    for nonsense in ("[]", "{", '[{"action": "reset"}]'):
        assert "no command of megagrpo" in json.loads(extension.megagrpo_weights(nonsense))["problems"][0][1]


# --- inside workers ---------------------------------------------------------------------------------------------------


def test_what_is_derived_is_made_anew_in_place() -> None:
    router = torch.nn.Module()
    router.gate = torch.nn.Linear(3, 4, bias=False)
    router.shared_expert_gate = torch.nn.Linear(3, 1, bias=False)
    router._combined_gate_weight = fused = torch.zeros(5, 3)
    derive(torch.nn.ModuleList([router]))
    assert torch.equal(fused, torch.cat([router.gate.weight, router.shared_expert_gate.weight]))


def test_experts_in_a_layout_of_their_own_are_refused() -> None:
    backends = Enum("backends", ["TRITON", "FLASHINFER_CUTLASS"])
    model = torch.nn.ModuleList([torch.nn.Module()])
    for backend in backends:
        vars(model[0])["quant_method"] = SimpleNamespace(unquantized_backend=backend)
        if backend is backends.TRITON:
            refuse_packed(model)
            continue
        with pytest.raises(ModelError, match="FLASHINFER_CUTLASS"):
            refuse_packed(model)


def test_a_manifest_has_the_names_of_vllm() -> None:
    arch = architecture("gpt_oss")
    held: Manifest = vllm.manifest(arch, EngineLayoutConfig(), 0, "bfloat16", "cuda")
    names = {name.replace("model.layers.0.", "") for name in held.storages if "layers.0" in name}
    assert {"attn.sinks", "mlp.router.bias", "mlp.experts.routed_experts.w13_bias"} <= names
    assert held.storages["model.layers.0.mlp.experts.routed_experts.w2_bias"].dtype == "bfloat16"
    assert "model.embedding.weight" in held.storages
