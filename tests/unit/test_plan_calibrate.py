"""Assumptions from a run's metrics: with them the plan says what was measured."""

import json
from dataclasses import replace

import pytest

from megagrpo.errors import ReportError
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.calibrate import calibrated
from megagrpo.plan.machines import A_CPU, GPUS, Machines
from megagrpo.plan.time import step_time
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import SftRecipe
from megagrpo.weights.families import read_architecture
from tests.tiny_run import make_run

H100 = Machines(GPUS["H100"], 8, 50e9)


@pytest.fixture
def planned(tmp_path):
    recipe = load(make_run(tmp_path), ["algorithm.kl.coefficient=0.1"]).recipe
    return recipe, read_architecture(tmp_path / "model")


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


def test_medians_count_and_the_first_step_does_not(planned, tmp_path):
    recipe, arch = planned
    step = metrics_of(Assumptions(response_tokens=7), step_time(recipe, arch, A_CPU, Assumptions()))
    usual = {name: value for name, value in step.items() if value is not None}
    updates = (100.0, 3.0, 1.0, 2.0)
    write(tmp_path, *({**usual, "seconds/update": seconds, "seconds/step": 200.0} for seconds in updates))
    found = calibrated(Assumptions(), recipe, arch, None, tmp_path)
    phases = {phase.phase: phase.seconds for phase in step_time(recipe, arch, A_CPU, found).phases}
    assert phases["update"] == pytest.approx(2.0)


def test_fine_tuning_has_examples(tmp_path):
    recipe = SftRecipe.model_validate(
        {
            "kind": "sft",
            "name": "tuned",
            "model": {"path": "model"},
            "data": {"train": [{"path": "train.jsonl"}], "examples_per_step": 8, "tokens_max": 100},
            "train": {"total_epochs": 1},
        }
    )
    make_run(tmp_path / "other")
    arch = read_architecture(tmp_path / "other" / "model")
    write(tmp_path, {"example_tokens/mean": 40.0, "seconds/update": 2.0, "seconds/step": 2.5})
    found = calibrated(Assumptions(), recipe, arch, None, tmp_path)
    time = step_time(recipe, arch, A_CPU, found)
    assert [(phase.phase, pytest.approx(phase.seconds)) for phase in time.phases] == [("update", 2.0), ("driver", 0.5)]
    assert time.tokens == 320


def test_a_calibration_carries_over_to_other_recipes(planned, tmp_path):
    """Phases of a larger run take as many times what is predicted as those of the one that was measured."""
    recipe, arch = planned
    write(tmp_path, metrics_of(Assumptions(response_tokens=7), step_time(recipe, arch, A_CPU, Assumptions())))
    found = calibrated(Assumptions(), recipe, arch, None, tmp_path)
    larger = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"prompts_per_step": 32})})
    plain = step_time(larger, arch, A_CPU, replace(found, update_factor=1.0)).phases[3].seconds
    assert step_time(larger, arch, A_CPU, found).phases[3].seconds == pytest.approx(plain * found.update_factor)


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
