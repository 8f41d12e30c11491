"""`megagrpo eval` before it starts anything: what a model is, what is refused, and what responses depend on."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megagrpo.cli import main
from megagrpo.cluster import reward_nodes
from megagrpo.cluster.stopping import Stopping
from megagrpo.errors import DataError, EngineError, PreflightError
from megagrpo.evaluation import evaluate
from megagrpo.evaluation.evaluate import comparison_table, metrics_table
from megagrpo.evaluation.evaluated_model import HuggingFaceModel, ServedModel, evaluated_model
from megagrpo.evaluation.metrics import compare, evaluation_metrics, prompts_of_both
from megagrpo.evaluation.responses import Response, ResponseLog
from megagrpo.preflight.preflight import check_model, check_sets
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import SHARED
from megagrpo.rollout.pool import Order
from megagrpo.section import broken_rules
from megagrpo.types import Prompt
from tests.tiny_run import ROW, make_run

SETS = "eval.sets={sums: {files: [{path: held_out.jsonl}]}}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held_out.jsonl").write_text(f"{json.dumps(ROW)}\n")
    return make_run(tmp_path)


def response(prompt: str, score: float, index: int = 0) -> Response:
    return Response("sums", prompt, index, "s", "1+1=", "2", "2", "stop", 1, score, score >= 1, None, {}, {}, "", "")


def test_only_what_an_evaluation_reads_is_checked(run: Path) -> None:
    (run.parent / "train.jsonl").unlink()
    check_sets(load(run, [SETS]))
    check_sets(load(run, [SETS, "eval.sets.sums.functions=[{function: gsm8k}]", "reward.functions.0.function=none"]))
    for overrides, said in (
        ([], "eval.sets"),
        (["eval.sets={sums: {files: [{path: none.jsonl}]}}"], "eval.sets.sums.files.0.path"),
        ([SETS, "reward.functions.0.function=none"], "reward.functions.0"),
        ([SETS, "eval.samples_per_prompt=2"], "eval.samples_per_prompt"),
    ):
        with pytest.raises(PreflightError, match=said):
            check_sets(load(run, overrides))


def test_weight_files_are_checked_unless_others_run_the_servers(run: Path) -> None:
    for weights in (run.parent / "model").glob("*.safetensors"):
        weights.unlink()
    served = ["rollout.engine=external", "rollout.urls=[http://127.0.0.1:9]"]
    check_model(load(run, served).recipe)
    with pytest.raises(PreflightError, match="safetensors"):
        check_model(load(run).recipe)


def test_the_sets_of_the_page_are_a_recipes(run: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    recipe = Recipe.model_validate(yaml.safe_load(run.read_text()) | yaml.safe_load(shown))
    assert not broken_rules(recipe)
    assert [recipe.eval.due(step) for step in (0, 20, 50, 100)] == [["gsm8k"], ["gsm8k"], [], ["gsm8k", "aime"]]
    assert set(SHARED) <= set(re.findall(r"`(\w+)`", page))


def test_a_model_is_what_lies_at_its_path(run: Path) -> None:
    recipe = load(run, [SETS]).recipe
    (run.parent / "other").mkdir()
    first = evaluated_model("model", recipe)
    assert isinstance(first, HuggingFaceModel)
    assert first.recipe(recipe, Path("here")).model.path == "model"
    assert first.label == evaluated_model(str(Path("model").absolute()), recipe).label
    assert isinstance(evaluated_model("Qwen/Qwen3-8B", recipe), HuggingFaceModel)
    before = first.identity(recipe)
    assert evaluated_model("model/", recipe).identity(recipe) == before
    Path("model/config.json").write_text(Path("model/config.json").read_text() + " ")
    assert first.identity(recipe) != before
    with pytest.raises(PreflightError, match=r"rollout\.engine"):
        evaluated_model("model", load(run, ["rollout.engine=external", "rollout.urls=[http://a:1]"]).recipe)
    for url in ("http://127.0.0.1:9", "http://[::1"):
        with pytest.raises(EngineError):
            evaluated_model(url, recipe)


def test_a_model_of_the_hub_is_the_commit_that_was_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = run.parent / "newest"
    asked: list[str | None] = []

    def download(path: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(revision)
        return str(newest.with_name(revision) if revision else newest)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    recipe = load(run, [SETS, "model.path=some/model", "model.revision=abc"]).recipe
    own, other = evaluated_model("some/model", recipe), evaluated_model("other/model", recipe)
    assert own.identity(recipe) == {"path": "some/model", "revision": "abc"}
    assert other.identity(recipe) == {"path": "other/model", "revision": "newest"}
    assert own.recipe(recipe, Path("here")).model.path == str(run.parent / "abc")
    assert other.recipe(recipe, Path("here")).model.path == str(newest)
    assert set(asked) == {"abc", None}


def test_a_recipe_for_a_running_server_fits_whatever_engines_it_names(run: Path) -> None:
    sglang = ["rollout.engine=sglang", "rollout.sglang.mem_fraction_static=0.5", "rollout.layout.tensor=2"]
    recipe = load(run, [SETS, *sglang, "deterministic=true", "cluster.device=cuda", "train.layout.tensor=2"]).recipe
    served = ServedModel("http://node-1:30000/", "external", {"model_path": "m", "weight_version": "default"})
    changed = served.recipe(recipe, Path("here"))
    assert (changed.rollout.urls, changed.cluster.device) == ([served.given], "cpu")
    assert not broken_rules(Recipe.model_validate(changed.model_dump()))
    other = ServedModel("http://node-2:30000", "external", {})
    assert served.label.startswith("node-1_30000-")
    assert served.label != other.label


def test_responses_that_were_made_with_other_settings_are_not_gone_on_with(run: Path) -> None:
    prompts = {"sums": [Prompt("a:1", (1,), "s", "2")]}

    def settings(*overrides: str, of: dict[str, list[Prompt]] = prompts) -> dict[str, Any]:
        recipe = load(run, [SETS, *overrides]).recipe
        return evaluate._settings(recipe, HuggingFaceModel("model"), of)

    evaluate._require_same(run.parent, settings())
    evaluate._require_same(run.parent, settings("eval.every_steps=3", "reward.workers=7", "train.optimizer.lr=1e-3"))
    for other in (
        settings("eval.temperature=1.0"),
        settings("seed=1"),
        settings("reward.functions.0.weight=2.0"),
        settings(of={"sums": [Prompt("a:1", (1,), "s", "3")]}),
        settings(of={"sums": [Prompt("a:1", (1,), "s", "2", extra_info={"tests": ["f(1) == 2"]})]}),
    ):
        with pytest.raises(PreflightError, match="--output"):
            evaluate._require_same(run.parent, other)


@pytest.mark.parametrize(
    ("overrides", "files"),
    [
        (["agent.function=own.py:rollout"], ["own.py"]),
        (["agent.tools=[{name: own.py:Search, arguments: {corpus: corpus.jsonl}}]"], ["own.py", "corpus.jsonl"]),
        (["agent.verifiers={environment: own.py:load}"], ["own.py"]),
        (["agent.openenv={url: http://a:1, action: own.py:act, observation: told.py:told}"], ["own.py", "told.py"]),
        (["agent.tools=[python]", "agent.processes=2"], ["data.prompt_tokens_max=9"]),
    ],
)
def test_settings_change_with_what_an_agent_reads(overrides: list[str], files: list[str], run: Path) -> None:
    def settings(*more: str) -> dict[str, Any]:
        return evaluate._settings(load(run, [SETS, *overrides, *more]).recipe, HuggingFaceModel("model"), {"sums": []})

    for name in ("own.py", "told.py", "corpus.jsonl"):
        (run.parent / name).write_text("a")
    before = settings()
    assert settings("agent.processes=3") == before
    for name in files:
        if "=" in name:
            assert settings(name) != before, "the longest conversation follows from it"
            continue
        (run.parent / name).write_text("ab")
        assert settings() != before
        (run.parent / name).write_text("a")


def test_settings_change_with_a_reward_model_and_with_a_rubrics_text(run: Path) -> None:
    directory, rubric = run.parent / "scores", run.parent / "rubric.md"
    shutil.copytree(run.parent / "model", directory)
    rubric.write_text("{{response}}")
    judge = {"function": "judge", "arguments": {"model": "m", "url": "http://h/v1", "rubric": str(rubric)}}
    scored = {"function": "reward_model", "arguments": {"model": "digits"}}
    models = {"digits": {"kind": "classifier", "path": "scores"}}
    base = yaml.safe_load(run.read_text()) | {"reward": {"models": models, "functions": [judge, scored]}}
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [], "id2label": {"0": "x"}}))
    run.write_text(yaml.safe_dump(base))
    recipe = load(run, [SETS]).recipe

    def settings() -> dict[str, Any]:
        return evaluate._settings(recipe, HuggingFaceModel("model"), {"sums": []})

    before = settings()
    rubric.write_text("{{answer}}")
    assert (changed := settings()) != before
    (directory / "model.safetensors").touch()
    assert settings() != changed


def test_what_failed_is_asked_for_again_and_over_long_prompts_are_told(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ROW | {"prompt": [{"role": "user", "content": "1+" * 500}]}
    (run.parent / "held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (ROW, ROW, long)))
    recipe, asked, said = load(run, [SETS]).recipe, [], []

    def sample(recipe: Recipe, directory: Path, left: list[Any], log: ResponseLog, *_: Any):
        asked.append([one.prompt.id for one in left])
        found = [response(one.prompt.id, 1.0) for one in left]
        if len(asked) == 1:
            found[0] = replace(found[0], score=None, solved=False, error="the engine gave up")
        log.append(found)

    monkeypatch.setattr(evaluate, "_sample", sample)
    for _ in range(3):
        subject = HuggingFaceModel("model")
        found = evaluate._evaluated(recipe, subject, run.parent / "out", Stopping(), said.append)
    assert [len(of_time) for of_time in asked] == [2, 1], "the third time nothing was left"
    assert asked[1] == asked[0][:1]
    assert found.metrics["sums"]["reward/errors"] == 0
    (file,) = json.loads((run.parent / "out" / subject.label / "results.json").read_text())["files"]["sums"]
    assert (file["rows"], file["overlong"], file["taken"]) == (3, 1, 2)
    assert any("held_out.jsonl" in line and "1 over-long" in line for line in said)


def test_functions_that_fail_are_judged_by_the_responses_of_their_own_sets(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = "eval.sets={a: {files: [{path: held_out.jsonl}]}, b: {files: [{path: held_out.jsonl}]}}"
    recipe = load(run, [sets, "eval.sets.b.functions=[{function: gsm8k}]"]).recipe
    made: list[int] = []

    class Recorded:
        def __init__(self, *_: Any, judged_responses: int, **__: Any) -> None:
            made.append(judged_responses)

        def close(self) -> None: ...

    monkeypatch.setattr(reward_nodes, "Scorer", Recorded)
    asked = {Order([None] * 2): "a" for _ in range(400)} | {Order([None]): "b" for _ in range(30)}
    judging = SimpleNamespace(served=dict)
    with ExitStack() as closing:
        evaluate._scorers(None, recipe, judging, asked, closing, Stopping(), print)  # type: ignore[arg-type]
    assert sorted(made) == [30, evaluate.JUDGED_RESPONSES]


def test_a_log_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    log = ResponseLog(path)
    log.append([response("a", 1.0), response("b", 0.0)])
    log.close()
    path.write_bytes(path.read_bytes()[:-9])
    log = ResponseLog(path)
    assert log.responses == [response("a", 1.0)]
    log.append([response("b", 0.0)])
    log.close()
    assert ResponseLog(path).responses == [response("a", 1.0), response("b", 0.0)]
    path.write_text("{}\n")
    with pytest.raises(DataError, match="line 1"):
        ResponseLog(path)


def test_two_models_are_compared_on_the_prompts_of_both() -> None:
    first = [response(f"p{i}", float(i < 3)) for i in range(12)]
    second = [response(f"p{i}", float(i < 9)) for i in range(1, 13)]
    by_name = {one.metric: one for one in compare(first, second, 1)}
    found = by_name["pass@1"]
    assert (found.prompts, found.first, found.second) == (11, pytest.approx(2 / 11), pytest.approx(8 / 11))
    assert found.difference == pytest.approx(6 / 11)
    assert found.low <= found.difference <= found.high
    assert found.p_value == pytest.approx(2 / 2**6), "six prompts changed, all for the better"
    assert prompts_of_both(first[:9], second) == {"first": 9, "second": 12, "both": 8}
    same = compare(first, first, 1)
    assert {(one.difference, one.p_value) for one in same} == {(0.0, 1.0)}
    assert comparison_table("sums", same).row_count == len(same)


def test_a_table_has_a_row_for_every_metric_and_a_column_for_every_source(run: Path) -> None:
    held_out = load(run, [SETS]).recipe.eval.of_sets()["sums"]
    first, second = response("a", 1.0), response("b", 0.0)
    metrics = evaluation_metrics([first, second], 1)
    table = metrics_table(held_out, [first, second], metrics)
    assert (len(table.columns), table.row_count) == (3, 7)
    assert len(metrics_table(held_out, [first, replace(second, data_source="t")], metrics).columns) == 5


@pytest.mark.parametrize("models", [[], ["a", "b", "c"]])
def test_one_model_is_evaluated_or_two(models: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "seed=1", *models, "--recipe", str(run), SETS]) == 2
    assert "MODEL" in capsys.readouterr().err


def test_overrides_may_stand_among_the_models_and_behind_the_recipe(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(evaluate, "evaluate", lambda *given: asked.append(given) or 0)
    assert main(["eval", "./a=b", "http://c/?d=e", "seed=1", "--recipe", str(run), "data.shuffle=false"]) == 0
    assert asked == [(["./a=b", "http://c/?d=e"], run, ["seed=1", "data.shuffle=false"], None, None, None)]
