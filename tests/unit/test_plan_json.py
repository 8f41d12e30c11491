"""The JSON of a plan: everything, and nothing else on stdout; its keys are those of docs/plan.md."""

import json
import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megagrpo.cli import main, parse
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.case import GPUS
from megagrpo.plan.plan import plan_of, unit_of
from megagrpo.plan.show.as_json import plan_json
from tests.plans import ON_2048, architecture, plan, recipe, searched
from tests.tiny_run import make_run

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    of = plan()
    return dict(json.loads(plan_json(of, searched(of.recipe, 128))))


def printed(capsys: Capture, *arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
    """Returns the JSON of `megagrpo plan --json`, and its errors."""
    assert main(["plan", *map(str, arguments), "--json"]) == code
    captured = capsys.readouterr()
    return dict(json.loads(captured.out)), captured.err


def documented(section: str) -> dict[str, list[str]]:
    """Cells of the section's table by the code in its first column."""
    lines = DOCS.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `"))
    return {first.strip("`"): rest for first, *rest in cells}


def test_keys_flags_gpus_and_assumptions_are_those_of_the_documentation(told: dict[str, Any]) -> None:
    assert list(documented("JSON")) == list(told)
    flags = set(vars(parse(["plan", "recipe.yaml"]))) - {"command", "recipe", "overrides", "debug"}
    assert set(re.findall(r"^--(\w+)", "\n".join(documented("Flags")), re.MULTILINE)) == flags
    assert list(documented("GPUs")) == list(GPUS)
    assert {name: (cells[0], cells[1]) for name, cells in documented("Assumptions").items()} == {
        field.name: ("-" if field.default is None else f"{field.default:g}", unit_of(field.name))
        for field in fields(Assumptions)
    }


def test_every_device_says_where_it_is_and_what_it_holds(told: dict[str, Any]) -> None:
    assert [device["device"] for device in told["devices"]] == list(range(128))
    last = told["devices"][-1]
    assert (last["node"], last["gpu"], last["rank"]) == (15, 7, 127)
    assert last["coordinates"] == {
        "tensor": 7, "pipeline": 1, "context": 0, "data": 7, "expert": 0, "expert_tensor": 7, "expert_data": 7,
    }  # fmt: skip
    assert (last["engines"], last["engine_rank"]) == ([15], 7)
    assert told["stages"][1] == {"layers": [[40, 80]], "embedding": False, "head": True}


def test_properties_are_told_beside_fields(told: dict[str, Any]) -> None:
    phase = told["memory"][0]["phases"][0]
    assert phase["bytes"] == sum(part["bytes"] for part in phase["parts"])
    assert told["time"]["seconds"] == pytest.approx(sum(phase["seconds"] for phase in told["time"]["phases"]))
    assert told["fits"] is (told["lacking_bytes"] == 0)
    assert [use["link"] for use in told["time"]["sync"]] == ["network", "node", "device"]
    assert all(use["ratio"] == use["seconds"] / use["least_seconds"] for use in told["time"]["sync"])


def test_choices_of_a_search_have_overrides_and_figures(told: dict[str, Any]) -> None:
    choice = told["search"]["choices"][0]
    assert all("=" in override for override in choice["overrides"])
    assert choice["time"]["seconds"] <= told["time"]["seconds"]
    assert choice["reason"]


def test_without_a_kind_of_gpu_what_needs_it_is_null() -> None:
    told = json.loads(plan_json(plan(cluster__gpu=None)))
    assert (told["machines"], told["time"], told["fits"], told["schedules"]) == (None, None, None, [])
    assert told["memory"]


def test_every_assumption_is_told_with_its_unit_and_origin(told: dict[str, Any]) -> None:
    assert {assumed["name"] for assumed in told["assumptions"]} == set(vars(Assumptions()))
    assert all(assumed["unit"] for assumed in told["assumptions"])
    given = plan(given=["response_tokens=2000"])
    assert {a.name: a.value for a in given.assumed if a.origin == "given"} == {"response_tokens": 2000}


def test_a_run_on_cpus_calibrates_its_own_recipe(tmp_path: Path, capsys: Capture) -> None:
    recipe, run = make_run(tmp_path), tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    seconds = {"rollout": 3.0, "reward": 0.5, "update": 2.0, "weight_sync": 0.25}
    step = {f"seconds/{phase}": value for phase, value in seconds.items()} | {"seconds/step": 6.0}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps({'step': number, **step})}\n" for number in (1, 2, 3)))
    told, _ = printed(capsys, recipe, "cluster.device=cpu", "--calibrate", run)
    phases = {phase["phase"]: phase["seconds"] for phase in told["time"]["phases"]}
    assert {phase: phases[phase] for phase in seconds} == pytest.approx(seconds)
    assert "calibrated" in {assumed["origin"] for assumed in told["assumptions"]}
    assert told["fits"] is None


def test_the_command_prints_json_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    recipe, page = make_run(tmp_path), tmp_path / "plan.html"
    told, errors = printed(capsys, recipe, "train.layout.tensor=2", "--html", page)
    assert (told["name"], told["recipe"]["train"]["layout"]["tensor"], errors) == ("tiny", 2, "")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    printed(capsys, recipe, "--html", page)  # an earlier page is replaced
    before = recipe.read_bytes()
    assert main(["plan", str(recipe), "--html", str(recipe)]) == 2
    assert recipe.read_bytes() == before
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(recipe), "--gpus", "8"])
    assert caught.value.code == 2
    assert "--search" in capsys.readouterr().err


def test_what_does_not_fit_is_exit_code_2_and_a_search_that_finds_something_is_0(
    tmp_path: Path, capsys: Capture
) -> None:
    big = [make_run(tmp_path), "model.path=meta-llama/Llama-3.1-8B-Instruct", "cluster.device=cuda"]
    told, errors = printed(capsys, *big, "cluster.gpu=RTX-4090", code=2)
    assert told["problems"][0]["fix"]
    assert "fix: change" in errors
    told, errors = printed(capsys, *big, "cluster.gpu=A100-40GB", "--search", code=2)
    assert told["search"]["choices"] == []
    assert told["search"]["nearest"]["lacking_bytes"] > 0
    assert "too much" in told["search"]["nearest"]["reason"]
    assert "--search on 1 GPUs" in errors
    assert main(["plan", *map(str, big), "cluster.gpu=A100-40GB", "--search", "--gpus", "16"]) == 0
    lines = capsys.readouterr().out
    assert "fastest on 16 GPUs" in lines
    assert "OK" not in lines.splitlines()  # the recipe itself does not fit


def test_days_are_known_where_the_rows_of_an_epoch_are(tmp_path: Path, capsys: Capture) -> None:
    recipe = ROOT / "yaml_recipes" / "gsm8k_qwen2.5_0.5b_1gpu.yaml"
    prompt = [{"role": "user", "content": "1+1"}]
    row = {"data_source": "gsm8k", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 100)
    data = f"data.train=[{{path: {tmp_path}/train.jsonl}}]"

    told, _ = printed(capsys, recipe, data, "train.total_epochs=3")
    assert told["time"]["steps"] == 19  # 300 prompts, 16 in a step
    assert told["time"]["days"] == pytest.approx(19 * told["time"]["seconds"] / 86400)
    rows = next(assumed for assumed in told["assumptions"] if assumed["name"] == "epoch_rows")
    assert rows == {"name": "epoch_rows", "value": 100, "unit": "rows", "origin": "counted"}
    told, _ = printed(capsys, recipe, data, "--assume", "epoch_rows=7473")  # what is given counts more
    assert told["time"]["steps"] == 468
    assert "7473 rows: 468 steps at most" in told["summary"]["length"]

    assert printed(capsys, recipe)[0]["time"]["days"] is None
    assert main(["plan", str(recipe)]) == 0
    assert "--assume epoch_rows=N" in capsys.readouterr().out


def test_a_plan_of_2048_gpus_is_soon_made() -> None:
    of = recipe(ON_2048)
    model = architecture(of)
    before = time.thread_time()
    plan_json(plan_of(of, model))
    assert time.thread_time() - before < 6  # 0.2 on an idle core
