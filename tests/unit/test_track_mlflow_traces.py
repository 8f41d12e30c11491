"""A run as MLflow shows it: a trace for each rollout, and names, params and values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import _validate_metric_name, _validate_param_name

from megagrpo.preflight.machine import directory_problems
from megagrpo.track.jsonl import leaves
from megagrpo.track.mlflow import PARAM_CHARACTERS, mlflow_name, shortened
from megagrpo.track.tracked_run import without_password
from megagrpo.track.tracker import Tracker
from tests.agent_runs import calculator_run, group_of, tool_event
from tests.tiny_run import tracked_recipe
from tests.tracker_thread import trackers_in_thread
from tests.unit.test_track_mlflow import recipe_of, the_run, tracking_uri
from tests.unit.test_track_rollouts import TOKENIZER, group


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Samples of a group of plain responses and one of agents, in order."""
    directory = tmp_path_factory.mktemp("traces")
    failed = calculator_run(error="ValueError: no", events=(tool_event(2.0, 0.5, error="took too long"),), reward=None)
    recipe = recipe_of(directory)
    with pytest.MonkeyPatch.context() as patched:
        trackers_in_thread(patched)
        with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
            tracker.rollouts(3, {"train": [group("82", "1+1"), group_of(calculator_run(), failed)]}, 3)
            tracker.log(3, {"reward/mean": 1.0})
    client = MlflowClient(tracking_uri(recipe))
    run = the_run(client, directory.name)
    found = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    return sorted(found, key=lambda trace: (trace.info.tags["prompt_id"], trace.info.tags["rollout"]))


def test_a_rollout_is_a_trace_with_its_response_and_what_each_reward_function_said(traces: list[Any]) -> None:
    good, bad, *_ = traces
    assert (good.info.state, bad.info.state) == ("OK", "ERROR")
    assert (good.info.tags["step"], good.info.tags["prompt_id"]) == ("3", "p")
    root, response, digits = good.data.spans
    assert (root.outputs["score"], root.inputs["ground_truth"]) == (1.0, "82")
    assert response.inputs["messages"] == [{"role": "user", "content": "é"}]
    assert response.outputs == {"role": "assistant", "content": "82"}
    assert (digits.name, digits.span_type, digits.outputs) == ("digits", "EVALUATOR", {"score": 0.5, "read": "8?2"})
    assert good.info.execution_duration is None  # nobody has measured it
    (score,) = good.info.assessments
    assert (score.name, score.feedback.value) == ("score", 1.0)


def test_an_agents_rollout_is_a_trace_with_a_span_for_each_turn_and_tool(traces: list[Any]) -> None:
    *_, good, bad = traces
    assert (good.info.state, bad.info.state) == ("OK", "ERROR")
    root, *spans = good.data.spans
    assert (root.span_type, root.inputs["ground_truth"], root.outputs["score"]) == ("AGENT", "391", 1.0)
    assert [(span.name, span.span_type) for span in spans] == [
        ("turn 0", "CHAT_MODEL"), ("calculator", "TOOL"), ("turn 1", "CHAT_MODEL"),
    ]  # fmt: skip
    turn, tool, answer = spans
    assert turn.inputs["messages"] == [{"role": "user", "content": "What is 17 * 23?"}]
    assert answer.outputs["content"] == "It is 391."
    assert answer.get_attribute("mlflow.turn")["reward"] == 1.0
    assert tool.end_time_ns - tool.start_time_ns == 500_000_000
    assert root.start_time_ns <= turn.start_time_ns <= tool.start_time_ns < answer.end_time_ns <= root.end_time_ns
    assert bad.data.spans[1].status.status_code == "ERROR"
    assert good.info.execution_duration == (root.end_time_ns - root.start_time_ns) // 10**6 > 0


@given(st.text(max_size=300))
def test_any_name_becomes_one_that_mlflow_allows(name: str) -> None:
    _validate_metric_name(mlflow_name(name))
    _validate_param_name(mlflow_name(name))


def test_a_long_param_ends_with_a_hash_of_the_whole() -> None:
    one, other = "x" * 9000, "x" * 9001
    assert shortened("x") == "x"
    assert len(shortened(one)) == len(shortened(other)) == PARAM_CHARACTERS
    assert shortened(one) != shortened(other)


def test_nested_values_become_dotted_names() -> None:
    tree: Mapping[str, Any] = {"a": {"b": 1, "c": {}}, "d": [{"e": None}, {"e": 2}], "f": [1, 2]}
    assert dict(leaves(tree)) == {"a.b": 1, "a.c": {}, "d.0.e": None, "d.1.e": 2, "f": [1, 2]}


def test_the_server_is_the_recipes_or_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tracked_recipe(tmp_path, mlflow={"uri": None})
    assert tracking_uri(recipe).startswith("sqlite:///")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking_uri(recipe) == "http://tracking:5000"
    assert tracking_uri(tracked_recipe(tmp_path, mlflow={"uri": "http://ours:1"})) == "http://ours:1"


def test_a_password_in_a_servers_address_is_not_written(tmp_path: Path) -> None:
    assert without_password("http://me:secret@host:5000/a") == "http://host:5000/a"
    assert without_password("sqlite:////x/mlflow.db") == "sqlite:////x/mlflow.db"
    (problem,) = directory_problems(recipe_of(tmp_path, "http://me:s3cret@host:5000"))
    assert "MLFLOW_TRACKING_PASSWORD" in problem.fix
    assert "s3cret" not in str(problem)
