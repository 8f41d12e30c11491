"""Memory by kind of device and phase: its parts at real sizes, and what moves them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.activations import RankPass
from megagrpo.plan.advice import checkpoint_bytes
from megagrpo.plan.case import A_CPU, GPUS, Case
from megagrpo.plan.memory import DeviceMemory, PhaseMemory, host_bytes, memory, model_parts
from megagrpo.plan.parameters import largest_share, stages, total_parameters
from megagrpo.plan.plan import plan_of
from megagrpo.plan.time import step_time
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families.architecture import Architecture
from tests import plans
from tests.plans import H100, QWEN_8B, QWEN_HALF_B, known_model, merged, sft_recipe
from tests.weights_oracle import architecture

SAVER = {"enable_memory_saver": True, "mem_fraction_static": 0.5}
LLAMA, DEEPSEEK, EXPERTS = map(known_model, (plans.LLAMA_70B, plans.DEEPSEEK, plans.QWEN_30B))


def held_by(recipe: Recipe, arch: Architecture = LLAMA, critic: Architecture | None = None) -> DeviceMemory:
    """The first kind of device, on H100."""
    return next(memory(Case(recipe, arch, H100, critic=critic)))


def phases(held: DeviceMemory) -> dict[str, dict[str, int]]:
    """Bytes by part, by phase."""
    found = {phase.phase: {part.name: part.bytes for part in phase.parts} for phase in held.phases}
    for phase in held.phases:
        assert len(found[phase.phase]) == len(phase.parts)  # no name twice
        assert phase.bytes == sum(found[phase.phase].values())
    return found


def engine_parts(phase: dict[str, int]) -> set[str]:
    return {name for name in phase if name.startswith("engine")}


def test_sft_and_recipes_without_a_penalty_have_no_reference() -> None:
    arch = known_model(QWEN_HALF_B)
    sft = model_parts(Case(sft_recipe(), arch, H100), 0)
    assert list(sft) == ["parameters", "gradients", "optimizer"]
    (held,) = memory(Case(sft_recipe(layout={"tensor": 8, "data": 2}), LLAMA, H100))
    assert list(phases(held)) == ["update"]
    assert len(held.devices) == 16
    penalty = model_parts(Case(merged(algorithm={"kl": {"coefficient": 0.001}}), arch, H100), 0)
    assert penalty == sft | {"reference": 2 * total_parameters(arch)}


def test_plans_for_gpus_expect_transformer_engine() -> None:
    for recipe, machines, fused in (
        (merged(), H100, True),
        (merged(), None, True),
        (merged(), replace(H100, gpu=GPUS["A100-80GB"]), False),  # without flash-attn
        (merged(train={"layer_spec": "transformer_engine"}), replace(H100, gpu=GPUS["A100-80GB"]), True),
        (merged(train={"lora": {}}), H100, False),
        (merged(), A_CPU, False),
    ):
        assert Case(recipe, LLAMA, machines).fused_layers is fused


# --- activations -----------------------------------------------------------------------------------------------------


def pass_of(arch: Architecture = LLAMA, **changes: Any) -> RankPass:
    start = RankPass(ParallelLayout(), arch.hidden, 2, 8192, 8192, "cuda", transformer_engine=True, architecture=arch)
    return replace(start, **changes)


def test_a_layer_of_llama_70b_keeps_about_34_bytes_for_each_hidden_element() -> None:
    """34 s b h of arXiv:2205.05198 was for LayerNorm, dropout masks and a plain MLP: here they are other tensors."""
    elements = 4 * 8192 + (2 * 64 + 2 * 8) * 128 + 3 * 28672
    assert pass_of().layer_bytes(LLAMA.layers[0]) == 8192 * (2 * elements + 2 * 4 + 4 * 64)
    assert 32 < pass_of().layer_bytes(LLAMA.layers[0]) / (8192 * 8192) < 36
    shared = pass_of(layout=ParallelLayout(tensor=8)).layer_bytes(LLAMA.layers[0])
    assert shared == pass_of().layer_bytes(LLAMA.layers[0]) // 8


def test_latent_attention_keeps_scores_without_transformer_engine() -> None:
    fused, local = pass_of(DEEPSEEK), pass_of(DEEPSEEK, transformer_engine=False)
    scores = 4 * 8192 * 8192 * 128
    lost = 4 * 8192 * 128
    assert local.layer_bytes(DEEPSEEK.layers[0]) - fused.layer_bytes(DEEPSEEK.layers[0]) == scores - lost


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
    arch = replace(arch, layers=arch.layers[:48])
    layout = ParallelLayout(pipeline=pipeline, virtual_pipeline=virtual_pipeline)
    work = pass_of(arch, layout=layout, transformer_engine=fused and device == "cuda", device=device)
    every_norm_and_mlp = frozenset({"core_attn", "layernorm", "mlp", "moe"})
    ways = [work, replace(work, modules=every_norm_and_mlp), replace(work, layers_again=48)]
    of_stage = stages(len(arch.layers), layout)
    held = [each.stage_bytes(of_stage[0], 0, microbatches) for each in ways]
    assert held[0] > held[1] > held[2]
    some = [replace(work, layers_again=n).stage_bytes(of_stage[0], 0, microbatches) for n in range(13)]
    assert some == sorted(some, reverse=True)
    assert some[0] == held[0]
    again = [each.working_bytes(of_stage[0]) for each in ways]
    assert again[2] > again[0]
    assert replace(work, tokens=9000).stage_bytes(of_stage[0], 0, microbatches) > held[0]
    assert work.stage_bytes(of_stage[0], 0, microbatches + 1) >= held[0]
    freed = replace(work, outputs_freed=True).stage_bytes(of_stage[0], 0, microbatches)
    assert (freed < held[0]) == (pipeline > 1)
    every = [work.stage_bytes(stage, index, 8) for index, stage in enumerate(of_stage[:-1])]
    assert every == sorted(every, reverse=True)


def test_logits_never_take_much_more_than_a_few_chunks() -> None:
    work = pass_of(replace(LLAMA, hidden=16), tokens=16384)
    whole = 4 * 16384 * LLAMA.vocab
    held = work.logits_bytes(16384, gradients=True)
    assert held < whole / 10
    frozen = replace(work, adapters=True)
    assert frozen.logits_bytes(16384, gradients=True) == held - 2 * LLAMA.vocab * 16
    assert work.logits_bytes(16384, gradients=False, entropy=False) < held


def test_entropy_is_planned_where_it_is_computed() -> None:
    def update(**algorithm: Any) -> int:
        recipe = merged(algorithm=algorithm, train={"tokens_per_microbatch": 16384}, cluster={"device": "cpu"})
        kinds = memory(Case(recipe, architecture(vocab=LLAMA.vocab), A_CPU))
        return max(phase.bytes for kind in kinds for phase in kind.phases if phase.phase == "update")

    assert update(entropy_metric=False) < update()
    assert update(entropy_metric=False, entropy_coefficient=0.01) == update()


# --- a device, phase by phase ----------------------------------------------------------------------------------------


def test_every_device_is_of_one_kind() -> None:
    recipe = merged(
        {"tensor": 2, "pipeline": 2, "data": 2},
        cluster={"placement": "disaggregated", "engine_devices": 4},
        rollout={"engines": 2, "layout": {"tensor": 2}},
    )
    held = list(memory(Case(recipe, LLAMA, H100)))
    assert [kind.name for kind in held] == ["training, stage 0 of 2", "training, stage 1 of 2", "engine"]
    devices = [device for kind in held for device in kind.devices]
    assert devices == list(range(plan_devices(recipe, "cuda").bundles))
    assert not engine_parts(phases(held[0])["update"])
    assert set(phases(held[2])["update"]) == engine_parts(phases(held[2])["update"])


def test_offload_takes_what_it_says_from_rollouts_and_all_but_parameters_from_syncs() -> None:
    layout = {"tensor": 8, "pipeline": 2, "data": 2}
    algorithm = {"kl": {"coefficient": 0.001}}
    here = phases(held_by(merged(layout, algorithm=algorithm)))
    offload = ["parameters", "optimizer"]
    moved = merged(layout, train={"total_steps": 1, "layout": layout, "offload": offload}, algorithm=algorithm)
    away = phases(held_by(moved))
    assert (here["logprobs"], here["update"]) == (away["logprobs"], away["update"])
    gone = {"optimizer", "kept by torch's allocator"}
    assert away["weight_sync"] == {name: size for name, size in here["weight_sync"].items() if name not in gone}
    gone |= {"parameters"}
    assert away["rollout"] == {name: size for name, size in here["rollout"].items() if name not in gone}
    assert {"gradients", "reference"} <= set(away["rollout"])


def test_narrow_gradients_and_moments_take_half() -> None:
    train = {"gradient_dtype": "bfloat16", "optimizer": {"moment_dtype": "bfloat16"}}
    wide, narrow = (model_parts(Case(merged(train={"total_steps": 1} | of), LLAMA, H100), 0) for of in ({}, train))
    assert narrow["gradients"] * 2 == wide["gradients"]
    assert narrow["optimizer"] * 3 == wide["optimizer"] * 2  # the main weights stay float32
    assert narrow["parameters"] == wide["parameters"]


def test_muon_keeps_one_moment_of_matrices_and_whole_ones_on_each_data_rank() -> None:
    train = {"total_steps": 1, "layout": {"tensor": 8}, "distributed_optimizer": False}
    muon = train | {"optimizer": {"kind": "muon"}}
    adam, one = (model_parts(Case(merged(train=of), LLAMA, H100), 0)["optimizer"] for of in (train, muon))
    matrices = len(LLAMA.layers) * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 8
    assert adam - one == 4 * matrices
    assert largest_share([5, 4, 3, 3, 3], 2) == 10  # the largest first, to the emptiest: 5 and 3, 4 and 3 and 3
    sizes = {"total_steps": 1, "layout": {"tensor": 8, "data": 256}}
    kinds: tuple[dict[str, Any], ...] = {}, {"optimizer": {"kind": "muon"}}
    few, many = (model_parts(Case(merged(train=sizes | of), LLAMA, H100), 0) for of in kinds)
    largest = 2 * 8192 * 28672 // 8
    assert many["optimizer"] > 8 * largest, "a rank owns a gate and up projection whole"
    assert many["gradients"] > few["gradients"], "and every rank has room for as much from each"


def test_outputs_of_stages_are_free_in_updates_if_megatron_frees_them() -> None:
    layout = {"tensor": 8, "pipeline": 2, "data": 2}
    train = {"total_steps": 1, "layout": layout, "megatron": {"deallocate_pipeline_outputs": True}}
    both = train | {"megatron": {}}, train
    here, freed = (phases(held_by(merged(layout, train=changes)))["update"] for changes in both)
    assert sum(freed.values()) < sum(here.values())


def test_the_reference_is_away_in_updates_if_it_is_offloaded() -> None:
    layout, algorithm = {"tensor": 8, "pipeline": 2, "data": 2}, {"kl": {"coefficient": 0.001}}
    train = {"total_steps": 1, "layout": layout, "offload": ["reference", "gradients"]}
    moved = merged(layout, train=train, algorithm=algorithm)
    here, away = phases(held_by(merged(layout, algorithm=algorithm))), phases(held_by(moved))
    assert away["update"] == {name: size for name, size in here["update"].items() if name != "reference"}
    assert away["logprobs"] == here["logprobs"]
    of_stages = [model_parts(Case(moved, LLAMA, H100), stage)["reference"] for stage in (0, 1)]
    assert host_bytes(Case(moved, LLAMA, H100))[0] == 8 * max(of_stages)


def test_copies_for_checkpoints_are_what_a_checkpoint_holds_and_each_node_has_its_share() -> None:
    whole = checkpoint_bytes(Case(merged(), LLAMA, H100))
    for layout in ({"tensor": 8}, {"tensor": 8, "data": 4}, {"tensor": 2, "pipeline": 2, "data": 2}):
        for distributed in (True, False):
            train = {"total_steps": 1, "layout": layout, "distributed_optimizer": distributed}
            nodes = prod(layout.values()) / 8
            exports = Case(merged(layout, train=train, checkpoint={"export_every_steps": 1}), LLAMA, H100)
            _, saved, exported = host_bytes(exports)
            assert saved * nodes == pytest.approx(whole, rel=0.06)
            assert exported * nodes == pytest.approx(whole / 6, rel=0.06)
    assert host_bytes(Case(merged(), LLAMA, H100))[2] == 0


def test_a_memory_saver_takes_the_engine_away_from_training() -> None:
    layout = {"tensor": 8}
    held = {
        saved: phases(held_by(merged(layout, rollout={"layout": layout, "sglang": options})))
        for saved, options in ((True, SAVER), (False, {"mem_fraction_static": 0.5}))
    }
    assert held[True]["rollout"] == held[False]["rollout"]
    assert held[False]["update"].keys() - held[True]["update"].keys() == {"engine weights", "engine cache"}
    assert held[False]["weight_sync"].keys() - held[True]["weight_sync"].keys() == {"engine cache"}
    buckets = {name: size for name, size in held[True]["weight_sync"].items() if "buckets" in name}
    assert set(buckets.values()) == {2 * merged().weights.bucket_bytes}


def test_contexts_on_other_gpus_are_planned_where_memory_is_mapped() -> None:
    def contexts(**values: Any) -> int:
        recipe = plans.recipe({key.replace("__", "."): value for key, value in values.items()})
        found = phases(next(memory(Case(recipe, LLAMA, H100))))
        of_phases = {parts.get("contexts of engines on other GPUs", 0) for parts in found.values()}
        assert len(of_phases) == 1, "they stay until the engine ends"
        return of_phases.pop()

    assert contexts() == 7 * 2**29, "two nodes hold each a half of the model, and pass it on"
    assert contexts(train__layout={"tensor": 8, "data": 16}) == 0, "an engine rank needs what lies on its GPU"
    assert contexts(cluster__placement="disaggregated") == contexts(weights__transfer="disk") == 0


def test_torch_keeps_the_memory_of_passes_from_an_engine_on_the_same_card() -> None:
    held = phases(held_by(merged({"tensor": 8})))
    passing = held["update"]["activations"] + held["update"]["logits"]
    assert held["rollout"]["kept by torch's allocator"] == passing
    assert held["weight_sync"]["kept by torch's allocator"] == passing - held["weight_sync"]["sync buckets"]
    assert "kept by torch's allocator" not in phases(next(memory(Case(merged({"tensor": 8}), LLAMA, A_CPU))))["rollout"]


def test_passes_before_the_update_are_there_if_the_recipe_has_any() -> None:
    def names(**algorithm: Any) -> list[str]:
        held = held_by(merged({"tensor": 8}, algorithm=algorithm))
        return [phase.phase for phase in held.phases]

    assert names() == ["rollout", "update", "weight_sync"]
    for algorithm in ({"minibatches": 4}, {"kl": {"coefficient": 0.1}}):
        assert names(**algorithm) == ["rollout", "logprobs", "update", "weight_sync"]
    assert names(minibatches=4, rollout_logprobs_as_old=True) == ["rollout", "update", "weight_sync"]


def test_a_part_is_lowered_by_what_makes_it_large() -> None:
    def lowered(name: str, recipe: Recipe, arch: Architecture) -> tuple[str, ...]:
        phase = held_by(recipe, arch).phases[0]
        return next(part.lowered_by for part in phase.parts if part.name == name)

    crowded = merged({"tensor": 8}, rollout={"layout": {"tensor": 8}, "engines": 2})
    alone = merged({"tensor": 8}, rollout={"layout": {"tensor": 8}})
    for part in ("engine weights", "engine cache"):
        assert "rollout.engines" in lowered(part, crowded, LLAMA)
        assert "rollout.engines" not in lowered(part, alone, LLAMA)
    whole = merged({"expert": 8, "data": 8}, train={"distributed_optimizer": False})
    fields = lowered("optimizer", whole, EXPERTS)
    assert {"train.distributed_optimizer", "train.layout.expert"} <= set(fields)
    assert "train.layout.data" not in fields


def test_training_ranks_that_forward_buckets_between_nodes_hold_as_many_again() -> None:
    bucket = merged().weights.bucket_bytes
    one_node, two_nodes, apart = (
        phases(held_by(merged({"tensor": 8, "data": data}, cluster={"placement": placement})))["weight_sync"]
        for data, placement in ((1, "colocated"), (2, "colocated"), (2, "disaggregated"))
    )
    assert one_node["sync buckets"] == apart["sync buckets"] == 2 * bucket
    assert two_nodes["sync buckets"] == 4 * bucket


def test_a_critic_is_as_large_as_its_own_model() -> None:
    recipe = merged({"tensor": 8}, algorithm={"advantage": {"name": "gae"}, "critic": {"path": "unused"}})
    small = replace(LLAMA, layers=LLAMA.layers[:20])
    held = [phases(held_by(recipe, LLAMA, critic))["update"]["critic"] for critic in (None, LLAMA, small)]
    assert held[0] == held[1]
    assert held[0] / 4 < held[2] < held[0] / 3  # the embedding stays
    seconds = [
        {phase.phase: phase.seconds for phase in step_time(Case(recipe, LLAMA, H100, critic=critic)).phases}
        for critic in (LLAMA, small)
    ]
    for phase in ("logprobs", "update"):
        assert seconds[1][phase] < 0.8 * seconds[0][phase]
    assert checkpoint_bytes(Case(recipe, LLAMA, H100, critic=small)) < 0.7 * checkpoint_bytes(Case(recipe, LLAMA, H100))


def test_adapters_have_no_gradients_of_weights_but_merge_them() -> None:
    small = known_model(QWEN_8B)
    train = {"total_steps": 1, "lora": {}}
    adapters, whole = (phases(held_by(merged(train=changes), small)) for changes in (train, {"total_steps": 1}))
    assert adapters["update"]["gradients"] < whole["update"]["gradients"] / 50
    assert adapters["weight_sync"]["merged weights"] == pytest.approx(
        2 * (len(small.layers) * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)), rel=0.02
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
        return [phase for kind in memory(Case(merged(**sections), arch, H100)) for phase in kind.phases]

    less, more = map(fullest, values)
    assert all(small.bytes <= large.bytes for small, large in zip(less, more, strict=True))
    assert sum(phase.bytes for phase in less) < sum(phase.bytes for phase in more)


def test_fields_that_lower_a_part_are_keys_of_a_recipe() -> None:
    recipe = merged(
        {"tensor": 2, "pipeline": 2},
        algorithm={"kl": {"coefficient": 0.1}, "advantage": {"name": "gae"}, "critic": {}},
        rollout={"engines": 2, "layout": {"tensor": 2}},
    )
    fields = {
        field
        for held in (memory(Case(recipe, LLAMA, H100)), memory(Case(recipe, LLAMA, A_CPU)))
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


def test_uneven_routing_takes_memory_and_time_and_kinds_of_devices_are_counted_once() -> None:
    recipe = plans.recipe(plans.ON_2048)
    held = list(memory(Case(recipe, DEEPSEEK, H100)))
    assert len(held) == 16
    assert sum(len(kind.devices) for kind in held) == 2048

    def most(*given: str) -> tuple[int, float]:
        planned = plan_of(recipe, DEEPSEEK, given=given)
        assert planned.time is not None
        updates = (phase.bytes for kind in planned.memory for phase in kind.phases if phase.phase == "update")
        return max(updates), planned.time.seconds

    even, usual, uneven = most("expert_imbalance=1"), most(), most("expert_imbalance=4")
    assert even[0] < usual[0] < uneven[0]
    assert even[1] < usual[1] < uneven[1]
