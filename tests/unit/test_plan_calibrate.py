"""Assumptions from a run's metrics: with them the plan says what was measured."""

import json
from dataclasses import replace

import pytest

from megagrpo.errors import ReportError
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.case import A_CPU, GPUS, Case, Machines
from megagrpo.plan.plan import calibrated
from megagrpo.plan.time import step_time
from megagrpo.recipe.load import dump, load
from megagrpo.recipe.schema.schedule import AsyncConfig
from megagrpo.weights.families import read_architecture
from tests import plans
from tests.plans import H100, sft_recipe
from tests.tiny_run import make_run

LENGTHS = Assumptions(prompt_tokens=5.0, response_tokens=7.0, longest_response_tokens=15.0)


@pytest.fixture
def case(tmp_path):
    """On H100, as its recipe does not say."""
    recipe = load(make_run(tmp_path / "inputs"), ["algorithm.kl.coefficient=0.1"]).recipe
    return Case(recipe, read_architecture(tmp_path / "inputs" / "model"), H100)


def metrics_of(case):
    """A step's line with the predicted phases, as a run of the case would have written it."""
    assumed, time = case.assumptions, step_time(case)
    seconds = {f"seconds/{phase.phase}": phase.seconds for phase in time.phases if phase.phase != "driver"}
    return {
        "prompt_tokens/mean": assumed.prompt_tokens,
        "response_tokens/mean": assumed.response_tokens,
        "response_tokens/max": assumed.longest_response_tokens,
        "groups/with_signal_share": assumed.signal_share,
        "packing/efficiency": assumed.packing,
        "packing/imbalance": assumed.imbalance - 1,
        "loss/total": None,  # not finite
        "seconds/step": time.seconds,
        **seconds,
    }


def with_section(recipe, section, **values):
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def write(directory, *steps, before=""):
    lines = [json.dumps({"step": number, "time": 1.0, **step}) for number, step in enumerate(steps)]
    (directory / "metrics.jsonl").write_text(before + "\n".join(lines) + "\n")


def test_what_a_trainer_waited_under_another_schedule_is_not_the_speed_of_engines(case, tmp_path):
    asynchronous = AsyncConfig(kind="async")
    (tmp_path / "recipe.yaml").write_text(dump(case.recipe.model_copy(update={"schedule": asynchronous})))
    step = metrics_of(case)
    write(tmp_path, {**step, "seconds/rollout": 1e-6, "seconds/update": 3 * step["seconds/update"]})
    found = calibrated(case, tmp_path)
    assert found.rollout_factor == 1
    assert found.update_factor == pytest.approx(3)


@pytest.mark.parametrize("machines", [H100, A_CPU])
def test_phases_of_a_known_run_are_recovered(case, tmp_path, machines):
    """Whatever made them: here other lengths, slower reading, another network."""
    true = Assumptions(
        prompt_tokens=5, response_tokens=7, longest_response_tokens=15, signal_share=0.6, packing=0.8, imbalance=1.2,
        decode_efficiency=0.3, matrix_efficiency=0.2, layer_seconds=1e-3, sync_seconds=2.0, driver_seconds=0.7,
        reward_seconds=0.1,
    )  # fmt: skip
    case = replace(case, machines=machines)
    run = replace(case, assumptions=true)
    step = metrics_of(run)
    slow = {name: value * 50 if name.startswith("seconds/") else value for name, value in step.items()}
    write(tmp_path, {"eval/mean@1": 0.5, "seconds/eval": 3.0}, slow, step, {**step, "seconds/checkpoint": 9.0})

    found = replace(case, assumptions=calibrated(case, tmp_path))
    assert found.assumptions.response_tokens == 7
    assert found.assumptions.imbalance == pytest.approx(1.2)
    predicted, measured = step_time(found), step_time(run)
    for phase, took in zip(predicted.phases, measured.phases, strict=True):
        assert phase.seconds == pytest.approx(took.seconds, rel=1e-6), phase.phase
    assert predicted.tokens_per_second_per_gpu == pytest.approx(measured.tokens_per_second_per_gpu)
    # Once is enough: what was calibrated before does not matter.
    assert calibrated(found, tmp_path) == found.assumptions


def test_fine_tuning_has_examples(case, tmp_path):
    case = Case(sft_recipe(examples=8), case.architecture, A_CPU)
    write(tmp_path, {"example_tokens/mean": 40.0, "seconds/update": 2.0, "seconds/step": 2.5})
    time = step_time(replace(case, assumptions=calibrated(case, tmp_path)))
    assert [(phase.phase, pytest.approx(phase.seconds)) for phase in time.phases] == [("update", 2.0), ("driver", 0.5)]
    assert time.tokens == 320


def test_factors_are_those_of_the_run_s_own_recipe(case, tmp_path):
    """A small run says how much longer phases of a large one take than is predicted."""
    other = make_run(tmp_path / "small", num_hidden_layers=2)
    recipe = load(other, ["rollout.prompts_per_step=2", "cluster.gpu=L4"]).recipe
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    small = Case(recipe, read_architecture(other.parent / "model"), Machines(GPUS["L4"], 8, 50e9), LENGTHS)
    update = step_time(small).phases[3].seconds
    write(tmp_path, metrics_of(small) | {"seconds/update": 3 * update, "seconds/step": 1e9})

    found = calibrated(case, tmp_path)
    assert found.update_factor == pytest.approx(3)
    assert found.rollout_factor == found.logprobs_factor == pytest.approx(1)
    plain, predicted = (
        step_time(replace(case, assumptions=of)).phases[3] for of in (replace(found, update_factor=1.0), found)
    )
    assert predicted.seconds == pytest.approx(3 * plain.seconds)


def test_a_run_on_cpus_is_compared_with_cpus(case, tmp_path):
    own = Case(with_section(case.recipe, "cluster", device="cpu"), case.architecture, A_CPU, LENGTHS)
    (tmp_path / "recipe.yaml").write_text(dump(own.recipe))
    write(tmp_path, metrics_of(own))
    assert calibrated(replace(own, assumptions=Assumptions()), tmp_path).update_factor == pytest.approx(1)


@pytest.mark.parametrize(
    ("ran", "planned_for", "says"),
    [
        ({"model": {"path": "nowhere/model"}}, "auto", "nowhere/model"),
        ({"cluster": {"device": "cpu"}}, "cuda", "speeds of CPUs"),
        ({"cluster": {"device": "cpu"}}, "auto", "speeds of CPUs"),
        ({"cluster": {"device": "cuda"}}, "cpu", "speeds of CPUs"),
        (None, "auto", "kind sft"),
    ],
)
def test_a_run_that_says_nothing_of_the_recipe_is_refused(case, tmp_path, ran, planned_for, says):
    """A model that is not here, another kind of device, or fine-tuning."""
    own = case.recipe if ran else sft_recipe()
    for section, values in (ran or {}).items():
        own = with_section(own, section, **values)
    (tmp_path / "recipe.yaml").write_text(dump(own))
    write(tmp_path, {"seconds/update": 1.0, "seconds/step": 1.0})
    with pytest.raises(ReportError, match=says):
        calibrated(replace(case, recipe=with_section(case.recipe, "cluster", device=planned_for)), tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("", "no step that trained"),
        ('{"step": 0, "seconds/eval": 1.0}\n', "no step that trained"),
        ('{"step": 1, "seconds/update": 1.0, "seconds/step": 1.0}', "no step that trained"),  # being written
        ("what is this\n", "lines of JSON"),
    ],
)
def test_a_directory_without_steps_is_refused(case, tmp_path, content, says):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ReportError, match=says) as refused:
        calibrated(case, tmp_path)
    assert "metrics.jsonl" in refused.value.problems[0].where


def test_an_agents_run_tells_its_turns_and_what_is_between_them(tmp_path):
    """Each sequence begins with the prompt, which the policy did not sample."""
    agent = {"tools": ["python"], "tokens_max": 16384}
    of = plans.plan(agent=agent, train__tokens_per_microbatch=16384)
    planned = Case(of.recipe, of.architecture, of.machines)
    metrics = {"prompt_tokens/mean": 200, "response_tokens/mean": 1500, "response_tokens/max": 4000}
    metrics |= {"agent/turns/mean": 6, "agent/branches/mean": 2, "agent/given_tokens/mean": 2 * (200 + 5 * 120)}
    metrics |= {"agent/seconds/outside_mean": 15}
    seconds = {"seconds/step": 100, "seconds/update": 40, "seconds/rollout": 50}
    write(tmp_path, *[metrics | seconds] * 3)
    found = calibrated(planned, tmp_path)
    assert (found.turns, found.sequences, found.response_tokens) == (6, 2, 1500)
    assert found.given_tokens == pytest.approx(120)
    assert found.tool_seconds == pytest.approx(3)
    write(tmp_path, *[metrics | seconds | {"agent/turns/mean": 1}] * 3)
    assert calibrated(planned, tmp_path).tool_seconds == Assumptions().tool_seconds, "one turn has nothing between"
