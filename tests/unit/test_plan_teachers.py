"""Teachers in a plan: bytes by phase, seconds of their passes, devices of their own, and a line about each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.memory import host_bytes, model_parts
from megagrpo.plan.parameters import rank_parameters, total_parameters
from megagrpo.plan.plan import Plan
from megagrpo.plan.search import offloads
from megagrpo.plan.show.as_json import plan_json
from megagrpo.plan.time import training_phases
from megagrpo.plan.training_time import FORWARD, BatchSize, TrainingRanks, head_flops
from tests import plans
from tests.plans import QWEN_8B, QWEN_32B, known_model

FULL = {"name": "full_vocabulary"}
TOPS = ("logprobs", "update")
SYSTEM = {"system": "Add units first.", "system_tokens_max": 2048}


def planned(teacher: dict[str, Any], objective: Any = "sampled_token", **more: Any) -> Plan:
    """Qwen3-8B on 16 ranks of 2 stages, with a teacher."""
    of = {"objective": objective} | more.pop("distillation", {})
    values = {
        "model.path": QWEN_8B,
        "teachers": {"big": teacher},
        "algorithm.distillation": of,
        "train.layout": {"tensor": 4, "pipeline": 2, "data": 2},
        "train.recompute": "none",
        "rollout.engines": 4,
        "rollout.layout": {"tensor": 4},
    }
    return plans.plan(values, **more)


def ranks(**fields: Any) -> dict[str, Any]:
    return {"kind": "ranks", "path": QWEN_32B} | fields


def held(plan: Plan, stage: int = 0) -> dict[str, dict[str, int]]:
    kind = [one for one in plan.memory if one.name.startswith("training")][stage]
    return {phase.phase: {part.name: part.bytes for part in phase.parts} for phase in kind.phases}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_teacher_on_the_ranks_has_its_weights_in_the_policys_layout_in_all_phases(stage: int) -> None:
    plan, teacher = planned(ranks()), known_model(QWEN_32B)
    size = 2 * rank_parameters(teacher, plan.layout, stage, plan.fused_layers).total
    assert {phase: parts.get("teacher big") for phase, parts in held(plan, stage).items()} == dict.fromkeys(
        ("rollout", "logprobs", "update", "weight_sync"), size
    )
    of_stages = [2 * rank_parameters(teacher, plan.layout, at, plan.fused_layers).total for at in range(2)]
    copies = plan.layout.tensor * sum(of_stages) - 2 * total_parameters(teacher)
    assert 0 <= copies < 0.01 * sum(of_stages), "norms, which every tensor rank has, and padding"
    without = plans.plan({"model.path": QWEN_8B})
    assert not any("teacher" in part for phase in held(without).values() for part in phase)


def test_an_offloaded_teacher_is_on_the_device_in_its_pass_alone_and_takes_time_to_move() -> None:
    stays, moves = planned(ranks()), planned(ranks(offload=True))
    size = held(stays)["logprobs"]["teacher big"]
    assert {phase for phase, parts in held(moves).items() if "teacher big" in parts} == {"logprobs"}
    assert held(moves)["logprobs"]["teacher big"] == size
    of_moves, of_stays = (
        sum(phase.parts.get("to the host and back", 0.0) for phase in one.time.phases)
        for one in (moves, stays)
        if one.time
    )
    moved = of_moves - of_stays
    assert moved == pytest.approx(size / moves.assumptions.host_bytes_per_second)
    largest = max(size, held(moves, 1)["logprobs"]["teacher big"] - held(moves, 1)["update"]["teacher big"])
    assert host_bytes(moves)[0] - host_bytes(stays)[0] == pytest.approx(8 * largest, rel=1e-4)
    assert "its way takes" in moves.summary["teacher big"]
    assert "in all phases" in stays.summary["teacher big"]


def test_a_teacher_in_its_own_layout_is_cut_by_it_and_its_output_matrix_by_the_policys() -> None:
    own = {"tensor": 8, "pipeline": 1, "data": 2}
    plan, same = planned(ranks(layout=own)), planned(ranks())
    teacher = known_model(QWEN_32B)
    whole = rank_parameters(teacher, ParallelLayout(**own), 0, same.fused_layers).total
    head = teacher.padded_vocab(4) // 4 * teacher.hidden
    assert [held(plan, stage)["update"]["teacher big"] for stage in (0, 1)] == [2 * whole, 2 * (whole + head)]
    assert "on the training ranks (tensor 8 x data 2)" in plan.summary["teacher big"]
    rollout = plan.grpo.rollout
    responses = rollout.prompts_per_step * rollout.samples_per_prompt // own["data"]
    passed = responses * rollout.response_tokens_max * teacher.hidden * 2
    assert {held(plan, stage)["logprobs"]["hidden states of teacher big"] for stage in (0, 1)} == {passed}
    of_pass = [training_phases(one)["logprobs"]["teacher big: matrix products"] for one in (plan, same)]
    assert of_pass[0] == pytest.approx(of_pass[1], rel=0.2)


def test_a_divergence_in_the_loss_keeps_hidden_states_of_the_steps_responses_on_the_last_stage() -> None:
    plan, teacher = planned(ranks(offload=True), FULL), known_model(QWEN_32B)
    recipe = plan.grpo
    responses = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt // plan.layout.data
    expected = responses * recipe.rollout.response_tokens_max * teacher.hidden * 2
    last, first = held(plan, 1), held(plan, 0)
    assert [phase for phase in last if "teachers' hidden states" in last[phase]] == [*TOPS]
    assert {last[phase]["teachers' hidden states"] for phase in TOPS} == {expected}
    assert not any("hidden" in part for parts in first.values() for part in parts)
    assert last["update"]["teacher big"] == 2 * teacher.padded_vocab(4) // 4 * teacher.hidden
    assert "teacher big" not in first["update"]
    assert 0 < last["update"]["teachers' logits"] < last["update"]["logits"]
    sampled = held(planned(ranks()), 1)
    assert not any("hidden" in part for parts in sampled.values() for part in parts)


def test_a_teachers_pass_takes_the_time_of_its_own_architecture_and_its_head_once_more_for_the_loss() -> None:
    plan, bare = (planned(ranks(), one, algorithm__kl={"coefficient": 0.1}) for one in (FULL, "sampled_token"))
    before, after = (training_phases(one) for one in (bare, plan))
    of_teacher = {name: spent for name, spent in before["logprobs"].items() if name.startswith("teacher big: ")}
    grown = total_parameters(known_model(QWEN_32B)) / total_parameters(known_model(QWEN_8B))
    products = of_teacher["teacher big: matrix products"] / before["logprobs"]["reference: matrix products"]
    assert products == pytest.approx(grown, rel=0.15)
    assert set(after["update"]) - set(before["update"]) == {"teacher big: output layer"}
    assert set(before["logprobs"]) - set(after["logprobs"]) == {"teacher big: output layer"}, "hidden states alone"
    batch = BatchSize.of(plan.grpo.rollout.prompts_per_step * plan.grpo.rollout.samples_per_prompt, plan.lengths)
    flops = head_flops(known_model(QWEN_32B), FORWARD, batch.head_tokens) * plan.assumptions.imbalance
    speed = plan.speeds.gpu.flops * plan.assumptions.matrix_efficiency * plan.layout.data * plan.layout.tensor
    assert after["update"]["teacher big: output layer"] == pytest.approx(2 * flops / speed)
    once = before["update"]["output layer"] / 4
    mixed = training_phases(planned(ranks(), FULL | {"divergence": "jsd"}))["update"]
    assert mixed == after["update"]
    for more, products in (({}, 4), ({"reward": {}}, 1)):
        narrowed = training_phases(planned(ranks(), FULL, rollout__top_k=20, **more))["update"]
        assert narrowed["divergence: output layer"] == pytest.approx(products * once)
    two = plans.plan(
        {
            "model.path": QWEN_8B,
            "teachers": {"a": ranks(), "b": ranks()},
            "algorithm.distillation": {"by_source": {"a": "a", "b": "b"}},
            "train.layout": {"tensor": 4, "pipeline": 2, "data": 2},
        }
    )
    assert {name.partition(":")[0] for name in training_phases(two)["logprobs"]} >= {"teacher a", "teacher b"}


def test_the_reference_is_a_teacher_without_a_penalty() -> None:
    plan = planned({"kind": "reference"}, FULL)
    assert model_parts(plan, 0)["reference"] == model_parts(plan, 0)["parameters"]
    assert "reference" in offloads(plan.grpo)[0]
    assert "teachers' hidden states" in held(plan, 1)["update"]
    assert plan.summary["teacher big"] == "the reference policy"
    shared = planned({"kind": "reference"}, algorithm__kl={"coefficient": 0.1})
    assert shared.summary["teacher big"] == "the reference policy, which the KL penalty has too"
    assert model_parts(shared, 0) == model_parts(plan, 0)
    assert TrainingRanks(plan).head_seconds(FORWARD, BatchSize(0, 0, 0, 0)) == 0


@pytest.mark.parametrize(
    ("objective", "coefficient", "distillation", "passes"),
    [
        ("sampled_token", 0.0, {}, {"teacher big"}),
        ("sampled_token", 0.1, {}, {"reference"}),
        ("sampled_token", 0.1, SYSTEM, {"reference", "teacher big"}),
        (FULL, 0.0, {}, {"teacher big"}),
        (FULL, 0.1, {}, {"reference", "teacher big"}),
    ],
)
def test_the_reference_passes_once_for_its_logprobs_and_once_for_its_hidden_states(
    objective: Any, coefficient: float, distillation: dict[str, Any], passes: set[str]
) -> None:
    kl = {"coefficient": coefficient}
    plan = planned({"kind": "reference"}, objective, distillation=distillation, algorithm__kl=kl)
    assert {name.partition(":")[0] for name in training_phases(plan)["logprobs"]} - {"sending the batch"} == passes


@pytest.mark.parametrize("given", [(), ("prompt_tokens=300",)])
def test_teachers_of_a_system_message_read_longer_sequences_in_as_many_microbatches(given: tuple[str, ...]) -> None:
    values = {
        "model.path": QWEN_8B,
        "teachers": {"big": ranks(), "own": {"kind": "reference"}},
        "algorithm.kl": {"coefficient": 0.1},
        "train.layout": {"tensor": 4, "pipeline": 2, "data": 2},
    }
    rows = {"by_source": {"a": "big", "b": "own"}}
    bare, more = (plans.plan(values, given=given, algorithm__distillation=rows | of) for of in ({}, SYSTEM))
    before, after = (training_phases(one)["logprobs"] for one in (bare, more))
    longer = 1 + more.assumptions.prompt_share * SYSTEM["system_tokens_max"] / more.lengths.sequence
    half = 1 / 2  # of the rows
    for name in ("teacher big: matrix products", "reference: matrix products"):
        assert after[name] / before[name] == pytest.approx(longer if "teacher" in name else 1)
    assert after["teacher own: matrix products"] / after["reference: matrix products"] == pytest.approx(half * longer)
    assert after["teacher big: between products"] == pytest.approx(before["teacher big: between products"], rel=0.2)
    most = more.grpo.taught_tokens_max / more.grpo.sequence_tokens_max
    parts = [held(one)["logprobs"] for one in (bare, more)]
    assert parts[1]["one layer"] / parts[0]["one layer"] == pytest.approx(most, rel=0.01)
    assert parts[1]["batch of teachers"] / parts[1]["batch"] == pytest.approx(most)
    assert "batch of teachers" not in parts[0]


def test_a_served_teacher_has_devices_of_its_own_and_an_external_one_none() -> None:
    served = planned({"kind": "server", "path": QWEN_32B, "devices": 2})
    (kind,) = [one for one in served.memory if one.name == "teachers.big"]
    assert kind.devices == (16, 17)
    weights = kind.fullest.largest[0]
    assert (weights.name, weights.bytes) == ("weights", total_parameters(known_model(QWEN_32B)))
    assert [one["model"] for one in json.loads(plan_json(served))["devices"][15:]] == [None, *["teachers.big"] * 2]
    assert "Qwen/Qwen3-32B (sglang) on 2 GPUs of its own, 30.5 GiB" in served.summary["teacher big"]
    external = planned({"kind": "external", "url": "http://h:1", "tokenizer": "x"})
    assert len(external.device_map) == 16
    assert external.summary["teacher big"] == "a server that runs already (sglang), http://h:1"
    assert "1 x sampled_token of teachers" in external.summary["objective"]


def test_teachers_alone_are_planned_without_rewards() -> None:
    plan = planned(ranks(), reward={})
    assert plan.time is not None
    assert plan.time.seconds > 0


def test_the_plan_says_that_the_ranks_have_a_teachers_weights_already() -> None:
    own, kl = ranks(path=QWEN_8B), {"algorithm__kl": {"coefficient": 0.1}}
    moving = {"algorithm__reference": {"update_every_steps": 1, "share": 0.1}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [(own, kl), (own, {}), (ranks(), kl), (own, kl | moving)]
    texts = [planned(teacher, **more).summary["teacher big"] for teacher, more in cases]
    assert ["kind: reference" in text for text in texts] == [True, False, False, False]
