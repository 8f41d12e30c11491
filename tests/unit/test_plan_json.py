"""The JSON of a plan: everything, and nothing else on stdout; its keys are those of the documentation."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megagrpo.cli import main
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.plan import plan_of, unit_of
from megagrpo.plan.show.as_json import plan_json
from tests.plans import ON_2048, architecture, changed, plan, searched
from tests.tiny_run import make_run

DOCS = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    of = plan()
    return dict(json.loads(plan_json(of, searched(of.recipe, 128))))


def test_keys_are_those_of_the_documentation(told: dict[str, Any]) -> None:
    table = DOCS.partition("## JSON")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(told)


def test_every_device_says_where_it_is_and_what_it_holds(told: dict[str, Any]) -> None:
    assert [device["device"] for device in told["devices"]] == list(range(128))
    last = told["devices"][-1]
    assert (last["node"], last["gpu"], last["rank"]) == (15, 7, 127)
    assert last["coordinates"] == {
        "tensor": 7, "pipeline": 1, "context": 0, "data": 7, "expert": 0, "expert_tensor": 7, "expert_data": 7,
    }  # fmt: skip
    assert (last["engines"], last["engine_rank"]) == ([15], 7)
    assert told["stages"][1] == {"layers": [[40, 80]], "embedding": False, "head": True}


def test_sums_add_up(told: dict[str, Any]) -> None:
    for kind in told["memory"]:
        for phase in kind["phases"]:
            assert phase["bytes"] == sum(part["bytes"] for part in phase["parts"])
    phases = told["time"]["phases"]
    assert told["time"]["seconds"] == pytest.approx(sum(phase["seconds"] for phase in phases))
    assert all(phase["seconds"] == pytest.approx(sum(phase["parts"].values())) for phase in phases)
    assert sorted(device for kind in told["memory"] for device in kind["devices"]) == list(range(128))
    assert told["fits"] is (told["lacking_bytes"] == 0)


def test_choices_of_a_search_have_overrides_and_figures(told: dict[str, Any]) -> None:
    choice = told["search"]["choices"][0]
    assert all("=" in override for override in choice["overrides"])
    assert choice["time"]["seconds"] <= told["time"]["seconds"]
    assert choice["reason"]


def test_without_a_kind_of_gpu_what_needs_it_is_null() -> None:
    told = json.loads(plan_json(plan(cluster__gpu=None)))
    assert (told["machines"], told["time"], told["fits"]) == (None, None, None)
    assert told["memory"]


def test_every_assumption_is_told_with_its_unit_and_origin(told: dict[str, Any]) -> None:
    assert {assumed["name"] for assumed in told["assumptions"]} == set(vars(Assumptions()))
    assert all(assumed["unit"] for assumed in told["assumptions"])
    assert unit_of("prompt_tokens") == "tokens"
    assert unit_of("network_bytes_per_second") == "bytes/s"
    of = changed({})
    given = plan_of(of, architecture(of), given=["response_tokens=2000"])
    assert {a.name: a.value for a in given.assumed if a.origin == "given"} == {"response_tokens": 2000}


def test_a_run_on_cpus_calibrates_its_own_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = make_run(tmp_path), tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    seconds = {"rollout": 3.0, "reward": 0.5, "update": 2.0, "weight_sync": 0.25}
    step = {f"seconds/{phase}": value for phase, value in seconds.items()} | {"seconds/step": 6.0}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps({'step': number, **step})}\n" for number in (1, 2, 3)))
    assert main(["plan", str(recipe), "cluster.device=cpu", "--calibrate", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    phases = {phase["phase"]: phase["seconds"] for phase in told["time"]["phases"]}
    assert {phase: phases[phase] for phase in seconds} == pytest.approx(seconds)
    assert "calibrated" in {assumed["origin"] for assumed in told["assumptions"]}
    assert told["fits"] is None


def test_the_command_prints_json_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_run(tmp_path)
    page = tmp_path / "plan.html"
    assert main(["plan", str(recipe), "train.layout.tensor=2", "--json", "--html", str(page)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["name"] == "tiny"
    assert printed.err == ""
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_does_not_fit_is_told_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_run(tmp_path)
    big = ["model.path=meta-llama/Llama-3.1-8B-Instruct", "cluster.gpu=RTX-4090", "cluster.device=cuda"]
    assert main(["plan", str(recipe), *big, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["problems"][0]["fix"]
    assert "too much" in printed.err
    assert "fix: change" in printed.err


def test_a_search_that_finds_nothing_is_exit_code_2_and_one_that_does_is_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_run(tmp_path)
    big = ["model.path=meta-llama/Llama-3.1-8B-Instruct", "cluster.gpu=A100-40GB", "cluster.device=cuda", "--search"]
    assert main(["plan", str(recipe), *big, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["search"]["choices"] == []
    assert "--search on 1 GPUs" in printed.err
    assert main(["plan", str(recipe), *big, "--gpus", "16"]) == 0
    printed = capsys.readouterr()
    assert "fastest on 16 GPUs" in printed.out
    assert "OK" not in printed.out.splitlines()  # the recipe itself does not fit


def test_flags_may_stand_before_overrides_and_gpus_are_for_searches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_run(tmp_path)
    assert main(["plan", str(recipe), "--json", "train.layout.tensor=2"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["train"]["layout"]["tensor"] == 2
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(recipe), "--gpus", "8"])
    assert caught.value.code == 2
    assert "--search" in capsys.readouterr().err


def test_a_plan_of_2048_gpus_is_soon_made() -> None:
    of = changed(ON_2048)
    model = architecture(of)
    before = time.thread_time()
    plan_json(plan_of(of, model))
    assert time.thread_time() - before < 6  # 0.2 on an idle core
