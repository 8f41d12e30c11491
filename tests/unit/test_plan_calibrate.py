"""Assumptions from a run's metrics: with them the plan says what was measured."""

import json
from dataclasses import replace

import pytest

from megagrpo.errors import ReportError
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.calibrate import calibrated
from megagrpo.plan.machines import A_CPU, GPUS, Machines
from megagrpo.plan.time import step_time
from megagrpo.recipe.load import dump, load
from megagrpo.weights.families import read_architecture
from tests.plans import H100, sft_recipe
from tests.tiny_run import make_run

LENGTHS = Assumptions(prompt_tokens=5.0, response_tokens=7.0, longest_response_tokens=15.0)


@pytest.fixture
def planned(tmp_path):
    recipe = load(make_run(tmp_path / "inputs"), ["algorithm.kl.coefficient=0.1"]).recipe
    return recipe, read_architecture(tmp_path / "inputs" / "model")


def metrics_of(assumed, time):
    """A step's line with the phases of `time`, as a run with these assumptions would have written it."""
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


def on(recipe, device):
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"device": device})})


def write(directory, *steps, before=""):
    lines = [json.dumps({"step": number, "time": 1.0, **step}) for number, step in enumerate(steps)]
    (directory / "metrics.jsonl").write_text(before + "\n".join(lines) + "\n")


@pytest.mark.parametrize("machines", [H100, None])
def test_phases_of_a_known_run_are_recovered(planned, tmp_path, machines):
    """Whatever made them: here other lengths, slower reading, another network."""
    recipe, arch = planned
    true = Assumptions(
        prompt_tokens=5, response_tokens=7, longest_response_tokens=15, signal_share=0.6, packing=0.8, imbalance=1.2,
        decode_efficiency=0.3, matrix_efficiency=0.2, layer_seconds=1e-3, sync_seconds=2.0, driver_seconds=0.7,
        reward_seconds=0.1,
    )  # fmt: skip
    run = step_time(recipe, arch, machines or A_CPU, true)
    step = metrics_of(true, run)
    slow = {name: value * 50 if name.startswith("seconds/") else value for name, value in step.items()}
    write(tmp_path, {"eval/mean@1": 0.5, "seconds/eval": 3.0}, slow, step, {**step, "seconds/checkpoint": 9.0})

    found = calibrated(Assumptions(), recipe, arch, machines, tmp_path)
    assert found.response_tokens == 7
    assert found.imbalance == pytest.approx(1.2)
    predicted = step_time(recipe, arch, machines or A_CPU, found)
    for phase, measured in zip(predicted.phases, run.phases, strict=True):
        assert phase.seconds == pytest.approx(measured.seconds, rel=1e-6), phase.phase
    assert predicted.tokens_per_second_per_gpu == pytest.approx(run.tokens_per_second_per_gpu)
    # Once is enough: what was calibrated before does not matter.
    assert calibrated(found, recipe, arch, machines, tmp_path) == found


def test_fine_tuning_has_examples(tmp_path):
    make_run(tmp_path / "other")
    arch = read_architecture(tmp_path / "other" / "model")
    recipe = sft_recipe(examples=8)
    write(tmp_path, {"example_tokens/mean": 40.0, "seconds/update": 2.0, "seconds/step": 2.5})
    found = calibrated(Assumptions(), recipe, arch, None, tmp_path)
    time = step_time(recipe, arch, A_CPU, found)
    assert [(phase.phase, pytest.approx(phase.seconds)) for phase in time.phases] == [("update", 2.0), ("driver", 0.5)]
    assert time.tokens == 320


def test_factors_are_those_of_the_run_s_own_recipe(planned, tmp_path):
    """A small run says how much longer phases of a large one take than is predicted."""
    recipe, arch = planned
    other = make_run(tmp_path / "small", num_hidden_layers=2)
    small = load(other, ["rollout.prompts_per_step=2", "cluster.gpu=L4"]).recipe
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(dump(small))
    on_l4 = Machines(GPUS["L4"], 8, 50e9)
    time = step_time(small, read_architecture(tmp_path / "small" / "model"), on_l4, LENGTHS)
    write(run, metrics_of(LENGTHS, time) | {"seconds/update": 3 * time.phases[3].seconds, "seconds/step": 1e9})

    found = calibrated(Assumptions(), recipe, arch, H100, run)
    assert found.update_factor == pytest.approx(3)
    assert found.rollout_factor == found.logprobs_factor == pytest.approx(1)
    plain = step_time(recipe, arch, H100, replace(found, update_factor=1.0)).phases[3]
    predicted = step_time(recipe, arch, H100, found).phases[3]
    assert predicted.seconds == pytest.approx(3 * plain.seconds)


def test_a_run_on_cpus_is_compared_with_cpus(planned, tmp_path):
    recipe, arch = planned
    own = on(recipe, "cpu")
    (tmp_path / "recipe.yaml").write_text(dump(own))
    write(tmp_path, metrics_of(LENGTHS, step_time(own, arch, A_CPU, LENGTHS)))
    assert calibrated(Assumptions(), own, arch, H100, tmp_path).update_factor == pytest.approx(1)


def test_a_run_of_a_model_that_is_not_there_is_refused(planned, tmp_path):
    recipe, arch = planned
    own = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": "nowhere/model"})})
    (tmp_path / "recipe.yaml").write_text(dump(own))
    write(tmp_path, {"seconds/update": 1.0, "seconds/step": 1.0})
    with pytest.raises(ReportError, match="nowhere/model"):
        calibrated(Assumptions(), recipe, arch, H100, tmp_path)


def test_a_run_of_fine_tuning_says_nothing_of_grpo(planned, tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump(sft_recipe()))
    write(tmp_path, {"seconds/update": 1.0, "seconds/step": 1.0})
    with pytest.raises(ReportError, match="kind sft"):
        calibrated(Assumptions(), *planned, H100, tmp_path)


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
def test_a_directory_without_steps_is_refused(planned, tmp_path, content, says):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ReportError, match=says) as refused:
        calibrated(Assumptions(), *planned, H100, tmp_path)
    assert "metrics.jsonl" in refused.value.problems[0].where


@pytest.mark.parametrize(("ran_on", "planned_for"), [("cpu", "cuda"), ("cpu", "auto"), ("cuda", "cpu")])
def test_speeds_of_cpus_say_nothing_of_gpus(planned, tmp_path, ran_on, planned_for):
    recipe, arch = planned
    write(tmp_path, metrics_of(Assumptions(response_tokens=7), step_time(recipe, arch, A_CPU, Assumptions())))
    (tmp_path / "recipe.yaml").write_text(dump(on(recipe, ran_on)))
    machines = None if planned_for == "cpu" else H100
    with pytest.raises(ReportError, match="speeds of CPUs"):
        calibrated(Assumptions(), on(recipe, planned_for), arch, machines, tmp_path)
