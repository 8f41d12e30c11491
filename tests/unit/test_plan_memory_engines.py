"""Memory of engines: weights and cache, what a sync takes beside them, and what they leave of a card."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from megagrpo.plan.case import A_CPU, Case
from megagrpo.plan.engine import EngineMemory, SequenceCache, cache_of
from megagrpo.plan.memory import memory
from megagrpo.plan.parameters import total_parameters
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.sglang.memory import GraphSizes, default_fraction, engine_memory, engine_rank_parameters
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides import sglang
from tests.plans import H100, QWEN_8B, QWEN_HALF_B, known_model, merged
from tests.tiny_models import USUAL_FAMILIES, make_model
from tests.unit.test_plan_memory import DEEPSEEK, LLAMA, held_by, phases


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in USUAL_FAMILIES}


@pytest.mark.parametrize("family", USUAL_FAMILIES)
def test_engine_weights_are_those_of_sglangs_manifest(family: str, tiny: dict[str, Path]) -> None:
    arch = read_architecture(tiny[family])
    compared = 0
    for device in ("cpu", "cuda"):
        some = [(1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1, 2), (4, 1, 1, 1), (4, 2, 1, 1), (4, 2, 2, 1), (2, 1, 2, 3)]
        for tensor, expert, apart, deep in some:
            layout = EngineLayoutConfig(tensor=tensor, expert=expert, attention_data=apart, pipeline=deep)
            if sglang.split_problems(arch, layout, device):
                continue
            for rank in range(layout.ranks):
                held = sglang.manifest(arch, layout, rank, "float32", device).storages.values()
                elements = engine_rank_parameters(arch, layout, device)[rank // tensor]
                assert elements == sum(prod(one.shape) for one in held), (layout, rank)
                compared += 1
    assert compared >= 5


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_cached_bytes_are_those_of_transformers(family: str, tiny: dict[str, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny[family])
    with torch.no_grad():
        cache = loaded(torch.zeros(3, 7, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 21 * cache_of(read_architecture(tiny[family]).kinds, 1, 4).token
    # table 1 of arXiv:2505.09343: 70.272 kB of a token in DeepSeek-V3, on every tensor rank
    assert cache_of(DEEPSEEK.kinds, 1, 2) == cache_of(DEEPSEEK.kinds, 16, 2) == SequenceCache(70272)
    assert cache_of(LLAMA.kinds, 8, 2) == cache_of(LLAMA.kinds, 16, 2) == SequenceCache(2 * 80 * 128 * 2)


def test_an_engine_fills_its_share_of_a_card() -> None:
    layout = {"layout": {"tensor": 8}, "requests_at_once": 1000}
    card = H100.gpu.memory_bytes
    held = engine_memory(Case(merged(rollout=layout | {"sglang": {"mem_fraction_static": 0.5}}), LLAMA, H100))
    assert 0 <= card // 2 - held.weights - held.cache < 40960
    assert held.weights == pytest.approx(2 * 70.55e9 / 8, rel=0.01)
    assert held.sequences == held.cache_tokens // 8192
    half = merged(rollout=layout | {"sglang": {"mem_fraction_static": 0.5, "kv_cache_dtype": "fp8_e5m2"}})
    assert engine_memory(Case(half, LLAMA, H100)).cache_tokens == pytest.approx(2 * held.cache_tokens, abs=2)
    capped = merged(rollout=layout | {"sglang": {"max_total_tokens": 16384}})
    assert engine_memory(Case(capped, LLAMA, H100)).cache == 16384 * 40960
    tight = merged(rollout=layout | {"sglang": {"mem_fraction_static": 0.1}})
    assert engine_memory(Case(tight, LLAMA, H100)).sequences == 0
    few = merged({"data": 4}, rollout={"engines": 4, "prompts_per_step": 4, "sglang": {"mem_fraction_static": 0.8}})
    assert engine_memory(Case(few, known_model(QWEN_8B), H100)).sequences == 8  # its part of a step


def test_states_take_a_share_of_sglangs_cache_and_limit_the_responses_at_once() -> None:
    def held(**options: Any) -> EngineMemory:
        rollout = {"layout": {"tensor": 8}, "requests_at_once": 1024, "sglang": {"mem_fraction_static": 0.4} | options}
        return engine_memory(Case(merged(rollout=rollout), known_model("Qwen/Qwen3-Next-80B-A3B-Instruct"), H100))

    of_sequence, of_token = 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192) // 8, 12 * 2 * 256 * 2
    room = int(0.4 * H100.gpu.memory_bytes) - held().weights
    slots = int(room * 0.9 / 1.9) // of_sequence
    assert held().asked == (slots - 1) // 5
    assert held().cache_tokens == (room - slots * of_sequence) // of_token
    assert 0 <= room - held().cache < of_token
    assert held(disable_overlap_schedule=True).asked == (slots - 1) // 3
    alone = held(disable_radix_cache=True)
    assert (alone.asked, alone.cache_tokens) == (1024, (room - 1025 * of_sequence) // of_token)


def test_sglang_caches_four_fifths_of_the_tokens_in_windows_of_gpt_oss() -> None:
    recipe = merged(rollout={"sglang": {"mem_fraction_static": 0.9}})
    held = engine_memory(Case(recipe, known_model("openai/gpt-oss-20b"), H100))
    room = int(0.9 * H100.gpu.memory_bytes) - held.weights
    assert room / held.cache_tokens == pytest.approx(12 * 2048 * 1.8, rel=1e-3)


def test_a_quantised_engine_holds_what_its_manifest_says_and_ranks_make_it_in_a_sync() -> None:
    latent = len(DEEPSEEK.layers) * 128 // 8 * 256 * 512 * 2  # w_kc and w_vc, in bfloat16
    for arch, layout, more in ((DEEPSEEK, {"tensor": 8, "expert": 8}, latent), (LLAMA, {"tensor": 8}, 0)):
        recipe = merged({"tensor": 8}, rollout={"layout": layout, "quantization": "fp8"})
        held = engine_memory(Case(recipe, arch, H100)).weights
        own = sglang.manifest(arch, EngineLayoutConfig(**layout), 0, "bfloat16", "cuda", quantization="fp8")
        assert held == pytest.approx(sum(its.bytes for its in own.storages.values()) + more, rel=1e-5)
    (device,) = memory(Case(recipe, LLAMA, H100))
    (made,) = (part for phase in device.phases for part in phase.parts if part.name == "quantised weights")
    assert made.bytes == pytest.approx((70.55e9 - 2 * 128256 * 8192) / 8, rel=1e-3)


def test_ranks_that_train_what_is_served_hold_a_copy_of_it_in_passes() -> None:
    linear = 70.55e9 - 2 * 128256 * 8192
    changes: dict[str, Any] = {"rollout": {"layout": {"tensor": 8}, "quantization": "fp8"}}
    (recipe, plain) = (
        merged({"tensor": 8}, train={"quantization": how}, algorithm={"minibatches": 2}, **changes)
        for how in ("same_as_rollout", None)
    )
    found, without = phases(held_by(recipe)), phases(held_by(plain))
    for phase in ("logprobs", "update"):
        copied = found[phase].pop("weights as served")
        assert copied == pytest.approx(2 * linear / 8, rel=1e-3)
        assert found[phase].keys() == without[phase].keys()
    assert not any("weights as served" in parts for parts in found.values())
    left = (parts["rollout"].get("kept by torch's allocator", 0) for parts in (found, without))
    assert next(left) - next(left) == copied


def test_an_embedded_engine_that_is_quantised_holds_the_blocks_beside_the_model() -> None:
    arch = known_model(QWEN_HALF_B)
    plain, quantized = (
        next(
            part.bytes
            for part in held_by(merged(rollout={"engine": "transformers", "quantization": how}), arch).phases[0].parts
            if part.name == "engine weights"
        )
        for how in (None, "fp8")
    )
    assert plain == 2 * total_parameters(arch)
    assert quantized - plain == pytest.approx(total_parameters(arch) - arch.vocab * arch.hidden, rel=1e-3)


def test_sglangs_own_fraction_leaves_what_it_says() -> None:
    card = 79 * 2**30
    graphs = [(4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, 8193, 512)]
    reserved = 512 + 128 + 1.5 * 8192 + 2 * 256 + 8 * sum(len(range(*span)) for span in graphs)

    def fraction(requests: int = 256, *, layout: dict[str, int] | None = None, **options: int) -> float:
        sizes = GraphSizes.of(options, card, EngineLayoutConfig(**layout or {}), requests)
        return default_fraction(sizes, card)

    assert fraction() == round(1 - reserved / (79 * 1024), 3)
    assert fraction(chunked_prefill_size=2048) == round(1 - 10240 / (79 * 1024), 3)
    # Four groups of 256 requests on 32 GPUs, none of whose ranks has graphs for prefills: three MiB more for each.
    many = 512 + 32 * 128 + 1.5 * 8192 + (2 + 3 * 4) * 256
    assert fraction(1024, layout={"tensor": 16, "attention_data": 4, "pipeline": 2}) == round(1 - many / (79 * 1024), 3)


def test_buckets_are_no_larger_than_the_weights_and_files_need_none(tiny: dict[str, Path]) -> None:
    arch = read_architecture(tiny["qwen2"])
    held = phases(next(memory(Case(merged({}), arch, A_CPU))))["weight_sync"]
    assert held["sync buckets"] == 2 * held["parameters"]
    assert held["engine sync buckets"] == 2 * held["engine weights"]
    elsewhere = {"engine": "external", "urls": ["http://somewhere:30000"]}
    for sections in ({"weights": {"transfer": "disk"}}, {"rollout": elsewhere}):
        held = phases(held_by(merged({"tensor": 8}, **sections)))["weight_sync"]
        assert not [name for name in held if "buckets" in name]
