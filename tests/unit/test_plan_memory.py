"""A device's memory by phase: its parts at real sizes, what moves them, and an engine's weights and cache."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.checks.disk import checkpoint_bytes
from megagrpo.plan.known_models import known_models
from megagrpo.plan.machines import GPUS, Machines
from megagrpo.plan.memory import engine as engines
from megagrpo.plan.memory.activations import Pass, layer_bytes, passes_in_flight, stage_bytes, working_bytes
from megagrpo.plan.memory.device_memory import memory
from megagrpo.plan.memory.engine import (
    cache_bytes_per_token,
    default_fraction,
    engine_memory,
    weight_elements,
)
from megagrpo.plan.memory.logits import logits_bytes
from megagrpo.plan.memory.parts import DeviceMemory, PhaseMemory
from megagrpo.plan.plan import plan_of
from megagrpo.plan.time.step_time import step_time
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.schema import EngineLayoutConfig, Recipe, SftRecipe
from megagrpo.rollout.sglang import arguments
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides import sglang
from tests import plans
from tests.tiny_models import FAMILIES, make_model

H100 = Machines(GPUS["H100"], 8, 50e9)
SAVER = {"enable_memory_saver": True, "mem_fraction_static": 0.5}
MODELS = ("meta-llama/Llama-3.1-70B-Instruct", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B")


def model(name: str) -> Architecture:
    return read_architecture(known_models()[name])


LLAMA, DEEPSEEK, EXPERTS = map(model, MODELS)


def recipe_of(layout: dict[str, int] | None = None, **sections: Any) -> Recipe:
    """128 prompts x 8 responses of up to 8192 tokens; sections are merged into these."""
    whole: dict[str, Any] = {
        "name": "memory",
        "model": {"path": "unused"},
        "data": {"train": [{"path": "unused"}], "prompt_tokens_max": 1024},
        "rollout": {
            "engine": "sglang",
            "prompts_per_step": 128,
            "samples_per_prompt": 8,
            "response_tokens_max": 7168,
        },
        "reward": {"functions": [{"function": "gsm8k"}]},
        "train": {"total_steps": 1, "layout": layout or {}},
    }
    for name, section in sections.items():
        whole[name] = whole.get(name, {}) | section
    return Recipe.model_validate(whole)


def phases(held: DeviceMemory) -> dict[str, dict[str, int]]:
    """Bytes by part, by phase."""
    found = {phase.phase: {part.name: part.bytes for part in phase.parts} for phase in held.phases}
    for phase in held.phases:
        assert len(found[phase.phase]) == len(phase.parts)  # no name twice
        assert phase.bytes == sum(found[phase.phase].values())
    return found


def engine_parts(phase: dict[str, int]) -> set[str]:
    return {name for name in phase if name.startswith("engine")}


# --- activations -----------------------------------------------------------------------------------------------------


def pass_of(arch: Architecture = LLAMA, **changes: Any) -> Pass:
    start = Pass(arch, ParallelLayout(), 2, 8192, 8192, "cuda", transformer_engine=True)
    return replace(start, **changes)


def test_a_layer_of_llama_70b_keeps_about_34_bytes_for_each_hidden_element() -> None:
    """34 s b h of arXiv:2205.05198 was for LayerNorm, dropout masks and a plain MLP: here they are other tensors."""
    elements = 4 * 8192 + (2 * 64 + 2 * 8) * 128 + 3 * 28672
    assert layer_bytes(pass_of(), experts=False) == 8192 * (2 * elements + 2 * 4 + 4 * 64)
    assert 32 < layer_bytes(pass_of(), experts=False) / (8192 * 8192) < 36


def test_tensor_ranks_share_a_layer_whole() -> None:
    shared = layer_bytes(pass_of(layout=ParallelLayout(tensor=8)), experts=False)
    assert shared == layer_bytes(pass_of(), experts=False) // 8


def test_experts_keep_what_their_tokens_need() -> None:
    assert EXPERTS.experts is not None
    even, uneven = pass_of(EXPERTS), pass_of(EXPERTS, expert_imbalance=1.5)
    more = layer_bytes(uneven, experts=True) - layer_bytes(even, experts=True)
    assert more == 8192 * 8 // 2 * (EXPERTS.hidden + 3 * EXPERTS.experts.ffn) * 2


def test_latent_attention_keeps_scores_without_transformer_engine() -> None:
    fused, local = pass_of(DEEPSEEK), pass_of(DEEPSEEK, transformer_engine=False)
    scores = 4 * 8192 * 8192 * DEEPSEEK.heads
    lost = 4 * 8192 * DEEPSEEK.heads
    assert layer_bytes(local, experts=False) - layer_bytes(fused, experts=False) == scores - lost


@given(
    st.sampled_from([LLAMA, DEEPSEEK, EXPERTS]),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)]),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(["cpu", "cuda"]),
)
def test_more_recomputation_keeps_less_and_more_tokens_more(
    arch: Architecture, sizes: tuple[int, int], microbatches: int, fused: bool, device: str
) -> None:
    pipeline, virtual_pipeline = sizes
    # Interleaved stages are of equal length; 61 layers are not.
    arch = replace(arch, layers=48)
    layout = ParallelLayout(pipeline=pipeline, virtual_pipeline=virtual_pipeline)
    work = pass_of(arch, layout=layout, transformer_engine=fused and device == "cuda", device=device)
    ways = [replace(work, recompute=recompute) for recompute in ("none", "selective", "full")]
    held = [stage_bytes(each, 0, microbatches) for each in ways]
    assert held[0] >= held[1] > held[2]
    again = [working_bytes(each, [3]) for each in ways]
    assert again[2] > again[0]
    assert stage_bytes(replace(work, tokens=9000), 0, microbatches) > held[0]
    assert stage_bytes(work, 0, microbatches + 1) >= held[0]
    assert all(stage_bytes(work, stage, 8) >= stage_bytes(work, stage + 1, 8) for stage in range(pipeline - 1))


def test_a_stage_holds_the_microbatches_that_its_schedule_runs_ahead() -> None:
    plain = ParallelLayout(pipeline=4)
    assert [passes_in_flight(plain, stage, 8) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert passes_in_flight(plain, 0, 2) == (2,)
    interleaved = ParallelLayout(pipeline=2, virtual_pipeline=2)
    assert passes_in_flight(interleaved, 0, 8) == (3, 2)  # five passes: chunks 0 0 1 1 0
    assert passes_in_flight(interleaved, 1, 8) == (2, 1)
    assert passes_in_flight(interleaved, 0, 2) == (2, 2)
    assert passes_in_flight(interleaved, 0, 3) == (3, 2)


def test_logits_never_take_much_more_than_a_few_chunks() -> None:
    work = pass_of(replace(LLAMA, hidden=16), tokens=16384)
    whole = 4 * 16384 * LLAMA.vocab
    held = logits_bytes(work, 16384, gradients=True)
    assert held < whole / 10
    frozen = replace(work, adapters=True)
    assert logits_bytes(frozen, 16384, gradients=True) == held - 2 * LLAMA.vocab * 16
    assert logits_bytes(work, 16384, gradients=False, entropy=False) < held


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_weights_are_those_of_sglangs_manifest(family: str, tiny: dict[str, Path]) -> None:
    arch = read_architecture(tiny[family])
    compared = 0
    for device in ("cpu", "cuda"):
        for tensor, expert in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
            layout = EngineLayoutConfig(tensor=tensor, expert=expert)
            if sglang.split_problems(arch, layout, device):
                continue
            for rank in range(tensor):
                held = sglang.manifest(arch, layout, rank, "float32", device).storages.values()
                assert weight_elements(arch, tensor, expert, device) == sum(prod(one.shape) for one in held)
                compared += 1
    assert compared >= 5


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_cached_bytes_are_those_of_transformers(family: str, tiny: dict[str, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny[family])
    with torch.no_grad():
        cache = loaded(torch.zeros(3, 7, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 21 * cache_bytes_per_token(read_architecture(tiny[family]), 1, 4)


def test_cached_bytes_of_published_models() -> None:
    """In table 1 of arXiv:2505.09343: 70.272 kB of a token in DeepSeek-V3; 80 layers of 8 heads of 128 in Llama 70B."""
    assert cache_bytes_per_token(DEEPSEEK, 1, 2) == cache_bytes_per_token(DEEPSEEK, 16, 2) == 70272
    assert cache_bytes_per_token(LLAMA, 1, 2) == 327680
    assert cache_bytes_per_token(LLAMA, 8, 2) == cache_bytes_per_token(LLAMA, 16, 2) == 40960


def test_an_engine_fills_its_share_of_a_card() -> None:
    layout = {"layout": {"tensor": 8}, "requests_at_once": 1000}
    card = H100.gpu.memory_bytes
    held = engine_memory(recipe_of(rollout=layout | {"sglang": {"mem_fraction_static": 0.5}}), LLAMA, card, "cuda")
    assert 0 <= card // 2 - held.weights - held.cache < 40960
    assert held.weights == pytest.approx(2 * 70.55e9 / 8, rel=0.01)
    assert held.sequences == held.cache_tokens // 8192
    half = recipe_of(rollout=layout | {"sglang": {"mem_fraction_static": 0.5, "kv_cache_dtype": "fp8_e5m2"}})
    assert engine_memory(half, LLAMA, card, "cuda").cache_tokens == pytest.approx(2 * held.cache_tokens, abs=2)
    capped = recipe_of(rollout=layout | {"sglang": {"max_total_tokens": 16384}})
    assert engine_memory(capped, LLAMA, card, "cuda").cache == 16384 * 40960
    tight = recipe_of(rollout=layout | {"sglang": {"mem_fraction_static": 0.1}})
    assert engine_memory(tight, LLAMA, card, "cuda").sequences == 0


def test_an_engine_is_asked_for_no_more_than_its_part_of_a_step() -> None:
    few = recipe_of({"data": 4}, rollout={"engines": 4, "prompts_per_step": 4, "sglang": {"mem_fraction_static": 0.8}})
    assert engine_memory(few, model("Qwen/Qwen3-8B"), H100.gpu.memory_bytes, "cuda").sequences == 8


def test_sglangs_own_fraction_leaves_what_it_says() -> None:
    card = 79 * 2**30
    graphs = [(4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, 8193, 512)]
    reserved = 512 + 128 + 1.5 * 8192 + 2 * 256 + 8 * sum(len(range(*span)) for span in graphs)
    assert default_fraction({}, card, 1) == round(1 - reserved / (79 * 1024), 3)
    assert default_fraction({"chunked_prefill_size": 2048}, card, 1) == round(1 - 10240 / (79 * 1024), 3)


def test_servers_on_cpus_have_the_cache_that_they_are_started_with() -> None:
    for changes in ({}, {"requests_at_once": 2}, {"response_tokens_max": 40000}):
        recipe = recipe_of(rollout=changes)
        held = engine_memory(recipe, LLAMA, None, "cpu")
        given = arguments.server_arguments(
            model_directory="",
            layout=recipe.rollout.layout,
            dtype="float32",
            device="cpu",
            requests_at_once=recipe.rollout.requests_at_once,
            tokens_per_request=held.longest,
            longest_pause_seconds=1.0,
            options={},
        )
        assert held.cache_tokens == given["max_total_tokens"]
    assert engines.CPU_FFN_MULTIPLE == sglang.CPU_FFN_MULTIPLE


# --- a device, phase by phase ----------------------------------------------------------------------------------------


def test_every_device_is_of_one_kind() -> None:
    recipe = recipe_of(
        {"tensor": 2, "pipeline": 2, "data": 2},
        cluster={"placement": "disaggregated", "engine_devices": 4},
        rollout={"engines": 2, "layout": {"tensor": 2}},
    )
    held = memory(recipe, LLAMA, H100, "cuda")
    assert [kind.name for kind in held] == ["training, stage 0 of 2", "training, stage 1 of 2", "engine"]
    devices = [device for kind in held for device in kind.devices]
    assert devices == list(range(plan_devices(recipe, "cuda").bundles))
    assert not engine_parts(phases(held[0])["update"])
    assert set(phases(held[2])["update"]) == engine_parts(phases(held[2])["update"])


def test_offload_takes_what_it_says_from_rollouts_and_all_but_parameters_from_syncs() -> None:
    layout = {"tensor": 8, "pipeline": 2, "data": 2}
    algorithm = {"kl": {"coefficient": 0.001}}
    here = phases(memory(recipe_of(layout, algorithm=algorithm), LLAMA, H100, "cuda")[0])
    offload = ["parameters", "optimizer"]
    moved = recipe_of(layout, train={"total_steps": 1, "layout": layout, "offload": offload}, algorithm=algorithm)
    away = phases(memory(moved, LLAMA, H100, "cuda")[0])
    assert {name: here[name] for name in ("logprobs", "update")} == {
        name: away[name] for name in ("logprobs", "update")
    }
    gone = {"optimizer", "kept by torch's allocator"}
    assert away["weight_sync"] == {name: size for name, size in here["weight_sync"].items() if name not in gone}
    gone |= {"parameters"}
    assert away["rollout"] == {name: size for name, size in here["rollout"].items() if name not in gone}
    assert {"gradients", "reference"} <= set(away["rollout"])


def test_a_memory_saver_takes_the_engine_away_from_training() -> None:
    layout = {"tensor": 8}
    held = {
        saved: phases(memory(recipe_of(layout, rollout={"layout": layout, "sglang": options}), LLAMA, H100, "cuda")[0])
        for saved, options in ((True, SAVER), (False, {"mem_fraction_static": 0.5}))
    }
    assert held[True]["rollout"] == held[False]["rollout"]
    assert held[False]["update"].keys() - held[True]["update"].keys() == {"engine weights", "engine cache"}
    assert held[False]["weight_sync"].keys() - held[True]["weight_sync"].keys() == {"engine cache"}
    buckets = {name: size for name, size in held[True]["weight_sync"].items() if "buckets" in name}
    assert set(buckets.values()) == {2 * recipe_of().weights.bucket_bytes}


def test_weights_that_travel_as_files_need_no_buckets() -> None:
    elsewhere = {"engine": "external", "urls": ["http://somewhere:30000"]}
    for sections in ({"weights": {"transfer": "disk"}}, {"rollout": elsewhere}):
        held = phases(memory(recipe_of({"tensor": 8}, **sections), LLAMA, H100, "cuda")[0])
        assert not [name for name in held["weight_sync"] if "buckets" in name]


def test_torch_keeps_the_memory_of_passes_from_an_engine_on_the_same_card() -> None:
    held = phases(memory(recipe_of({"tensor": 8}), LLAMA, H100, "cuda")[0])
    passing = held["update"]["activations"] + held["update"]["logits"]
    assert held["rollout"]["kept by torch's allocator"] == passing
    assert held["weight_sync"]["kept by torch's allocator"] == passing - held["weight_sync"]["sync buckets"]
    assert "kept by torch's allocator" not in phases(memory(recipe_of({"tensor": 8}), LLAMA, None, "cpu")[0])["rollout"]


def test_passes_before_the_update_are_there_if_the_recipe_has_any() -> None:
    def names(**algorithm: Any) -> list[str]:
        held = memory(recipe_of({"tensor": 8}, algorithm=algorithm), LLAMA, H100, "cuda")[0]
        return [phase.phase for phase in held.phases]

    assert names() == ["rollout", "update", "weight_sync"]
    for algorithm in ({"minibatches": 4}, {"kl": {"coefficient": 0.1}}):
        assert names(**algorithm) == ["rollout", "logprobs", "update", "weight_sync"]
    assert names(minibatches=4, rollout_logprobs_as_old=True) == ["rollout", "update", "weight_sync"]


def test_a_part_is_lowered_by_what_makes_it_large() -> None:
    def lowered(name: str, recipe: Recipe, arch: Architecture) -> tuple[str, ...]:
        phase = memory(recipe, arch, H100, "cuda")[0].phases[0]
        return next(part.lowered_by for part in phase.parts if part.name == name)

    crowded = recipe_of({"tensor": 8}, rollout={"layout": {"tensor": 8}, "engines": 2})
    alone = recipe_of({"tensor": 8}, rollout={"layout": {"tensor": 8}})
    for part in ("engine weights", "engine cache"):
        assert "rollout.engines" in lowered(part, crowded, LLAMA)
        assert "rollout.engines" not in lowered(part, alone, LLAMA)
    whole = recipe_of({"expert": 8, "data": 8}, train={"distributed_optimizer": False})
    fields = lowered("optimizer", whole, EXPERTS)
    assert {"train.distributed_optimizer", "train.layout.expert"} <= set(fields)
    assert "train.layout.data" not in fields


def test_a_bucket_is_no_larger_than_the_weights(tiny: dict[str, Path]) -> None:
    arch = read_architecture(tiny["qwen2"])
    held = phases(memory(recipe_of({}), arch, None, "cpu")[0])["weight_sync"]
    assert held["sync buckets"] == 2 * held["parameters"]
    assert held["engine sync buckets"] == 2 * held["engine weights"]


def test_a_critic_is_as_large_as_its_own_model() -> None:
    recipe = recipe_of({"tensor": 8}, algorithm={"advantage": {"name": "gae"}, "critic": {"path": "unused"}})
    small = replace(LLAMA, layers=LLAMA.layers // 4)
    held = [
        phases(memory(recipe, LLAMA, H100, "cuda", critic)[0])["update"]["critic"] for critic in (None, LLAMA, small)
    ]
    assert held[0] == held[1]
    assert held[0] / 4 < held[2] < held[0] / 3  # the embedding stays
    seconds = [
        {phase.phase: phase.seconds for phase in step_time(recipe, LLAMA, H100, Assumptions(), critic).phases}
        for critic in (LLAMA, small)
    ]
    for phase in ("logprobs", "update"):
        assert seconds[1][phase] < 0.8 * seconds[0][phase]
    assert checkpoint_bytes(recipe, LLAMA, small) < 0.7 * checkpoint_bytes(recipe, LLAMA)


def test_fine_tuning_only_updates() -> None:
    recipe = SftRecipe.model_validate(
        {
            "kind": "sft",
            "name": "memory",
            "model": {"path": "unused"},
            "data": {"train": [{"path": "unused"}], "examples_per_step": 64},
            "train": {"layout": {"tensor": 8, "data": 2}, "total_steps": 1},
        }
    )
    (held,) = memory(recipe, LLAMA, H100, "cuda")
    assert list(phases(held)) == ["update"]
    assert len(held.devices) == 16


def test_adapters_have_no_gradients_of_weights_but_merge_them() -> None:
    small = model("Qwen/Qwen3-8B")
    train = {"total_steps": 1, "lora": {}}
    adapters, whole = (
        phases(memory(recipe_of(train=changes), small, H100, "cuda")[0]) for changes in (train, {"total_steps": 1})
    )
    assert adapters["update"]["gradients"] < whole["update"]["gradients"] / 50
    assert adapters["weight_sync"]["merged weights"] == pytest.approx(
        2 * (small.layers * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)), rel=0.02
    )


@settings(max_examples=40)
@given(
    st.sampled_from(
        [
            ("train", "tokens_per_microbatch", 8192, 16384),
            ("rollout", "response_tokens_max", 2048, 4096),
            ("rollout", "prompts_per_step", 64, 256),
            ("weights", "bucket_bytes", 2**20, 2**28),
        ]
    ),
    st.sampled_from([LLAMA, EXPERTS]),
    st.sampled_from(["none", "selective", "full"]),
)
def test_more_work_never_takes_less(change: tuple[str, str, int, int], arch: Architecture, recompute: str) -> None:
    section, field, *values = change
    layout = {"tensor": 4, "pipeline": 2, "data": 2}

    def fullest(value: int) -> list[PhaseMemory]:
        train = {"total_steps": 1, "layout": layout, "recompute": recompute}
        sections: dict[str, Any] = {"train": train, "rollout": {"layout": {"tensor": 4}, "sglang": SAVER}}
        sections[section] = sections.get(section, {}) | {field: value}
        return [phase for kind in memory(recipe_of(**sections), arch, H100, "cuda") for phase in kind.phases]

    less, more = map(fullest, values)
    assert all(small.bytes <= large.bytes for small, large in zip(less, more, strict=True))
    assert sum(phase.bytes for phase in less) < sum(phase.bytes for phase in more)


def test_fields_that_lower_a_part_are_keys_of_a_recipe() -> None:
    recipe = recipe_of(
        {"tensor": 2, "pipeline": 2},
        algorithm={"kl": {"coefficient": 0.1}, "advantage": {"name": "gae"}, "critic": {}},
        rollout={"engines": 2, "layout": {"tensor": 2}},
    )
    fields = {
        field
        for held in (memory(recipe, LLAMA, H100, "cuda"), memory(recipe, LLAMA, None, "cpu"))
        for kind in held
        for phase in kind.phases
        for part in phase.parts
        for field in part.lowered_by
    }
    assert len(fields) > 10
    for field in fields:
        section: Any = recipe
        for key in field.split("."):
            assert key in type(section).model_fields or field.startswith("rollout.sglang."), field
            section = getattr(section, key, None)


def test_devices_that_hold_the_same_are_counted_once() -> None:
    recipe = recipe_of(
        {"tensor": 8, "pipeline": 16, "data": 16, "expert": 64, "expert_tensor": 1},
        rollout={"engines": 64, "layout": {"tensor": 32, "expert": 32}, "sglang": SAVER},
    )
    held = memory(recipe, DEEPSEEK, H100, "cuda")
    assert len(held) == 16
    assert sum(len(kind.devices) for kind in held) == 2048


def test_uneven_routing_takes_memory_as_it_takes_time() -> None:
    recipe = plans.changed(plans.ON_2048)

    def most(*given: str) -> tuple[int, float]:
        planned = plan_of(recipe, DEEPSEEK, given=given)
        assert planned.estimate is not None
        updates = (phase.bytes for kind in planned.memory for phase in kind.phases if phase.phase == "update")
        return max(updates), planned.estimate.time.seconds

    even, usual, uneven = most("expert_imbalance=1"), most(), most("expert_imbalance=4")
    assert even[0] < usual[0] < uneven[0]
    assert even[1] < usual[1] < uneven[1]
