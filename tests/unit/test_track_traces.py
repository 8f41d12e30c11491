"""Agents' rollouts in rollouts/, and as conversations in `megagrpo report`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.model import make_tokenizer
from megagrpo.agents.turns import BranchReason, reported
from megagrpo.cli import main
from megagrpo.report.text import BRANCHES, conversation
from megagrpo.track.rollout_files import EVENTS_MAX, LEFT_OUT, TRACE_CHARACTERS, TRAIN, rollout_file, trace
from megagrpo.track.rollout_writer import StepRollouts, tables
from megagrpo.track.tracker import Tracker
from megagrpo.types import AgentRun, Group
from tests.agent_runs import CALL, calculator_run, group_of, tool_event, turn_event
from tests.tiny_run import tracked_recipe

TEXTS = st.text(max_size=200) | st.integers(0, 300_000).map(lambda size: "x" * size)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=200), inner, max_size=6),
    max_leaves=20,
)


def size_of(run: AgentRun) -> int:
    return len(json.dumps(trace(run), ensure_ascii=False))


def row_of(group: Group) -> dict[str, Any]:
    """Its first row."""
    (table,) = tables(StepRollouts(1, {TRAIN: [group]}, 0, 0), None)
    return table.to_pylist()[0]


def test_a_trace_has_turns_tools_tokens_and_rewards() -> None:
    found = json.loads(json.dumps(trace(calculator_run(counts={"turns": 2, "retries": 1}))))
    first, tool, last = found["events"]
    assert first["said"]["tool_calls"] == [CALL]
    assert (first["reward"], last["reward"], last["sequence"]) == (None, 1.0, 0)
    assert (tool["name"], tool["seconds"], tool["result"]) == ("calculator", 0.5, "391")
    assert last["given"] == [{"role": "tool", "tool_call_id": "call_0", "content": "391"}]
    assert found["sequences"] == [{"tokens": 22, "trained": 8}]
    assert found["counts"] == {"turns": 2, "retries": 1}
    assert found["reward"] == {"score": 1.0}


NAMES = st.sampled_from(["name", "seconds", "said", "given", "error"]) | st.text(max_size=200)
KINDS = st.sampled_from(["note", "tool", "turn", LEFT_OUT])


@given(st.lists(st.tuples(KINDS, st.dictionaries(NAMES, JSON, max_size=4)), max_size=4), st.sampled_from([1, 60]))
def test_a_trace_is_bounded_and_readable_whatever_agents_tell(given: list[tuple[str, Any]], times: int) -> None:
    events = [reported(values | {"kind": kind}, 1.0) for kind, values in given] * times
    run = calculator_run(events=(*calculator_run().events, *events))
    assert size_of(run) < 3 * TRACE_CHARACTERS
    assert "It is 391." in conversation(row_of(group_of(run))) or len(run.events) > EVENTS_MAX


def test_long_rollouts_keep_their_first_and_last_events_and_the_ends_of_long_texts() -> None:
    said = {"role": "assistant", "content": f"begin {'y' * 100_000} end"}
    turns = tuple(turn_event(number, float(number), 0.5, said, given=[said] * 3) for number in range(1000))
    run = calculator_run(events=turns)
    assert size_of(run) < 2 * TRACE_CHARACTERS
    events = trace(run)["events"]
    assert [events[0]["number"], events[-1]["number"]] == [0, 999]
    assert sum(event.get("events", 1) for event in events) == 1000
    assert all(event["said"]["content"].startswith("begin") for event in events if event["kind"] == "turn")
    assert all(event["said"]["content"].endswith("end") for event in events if event["kind"] == "turn")
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert size_of(calculator_run(events=({"kind": "note", "at": 0.0, "of": deep},))) < 2000


def test_what_other_rollouts_write_has_not_changed() -> None:
    group = group_of(calculator_run())
    row = row_of(replace(group, samples=(replace(group.samples[0], agent=None),)))
    assert row["agent"] is None
    assert "It is 391." in conversation(row)


# --- megagrpo report --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    failed = calculator_run(error="ZeroDivisionError: division by zero", reward=None)
    odd = {"role": "assistant", "content": "\x1b[2Jagain", "reasoning_content": "hm", "tool_calls": [CALL]}
    begun = turn_event(
        2, 2.0, 0.5, odd, branch="history", parent=None, given=[{"role": "user", "content": "Once more"}]
    )
    events = (*calculator_run().events, tool_event(1.7, 0.25, error="took longer than 60 s"), begun)
    with Tracker(tracked_recipe(tmp_path, console="off"), 10, tokenizer=make_tokenizer()) as tracker:
        tracker.rollouts(1, [group_of(calculator_run())], 0)
        tracker.rollouts(2, [group_of(calculator_run(), failed), group_of(calculator_run(events=events))], 1)
    return tmp_path / "runs" / "adder"


def test_a_rollout_reads_as_a_conversation(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_directory), "--rollout", "1"]) == 0
    shown = capsys.readouterr().out
    order = ["score 1", "ground truth: 391", "── user", "What is 17 * 23?", "turn 0", "calls calculator", "── tool"]
    places = [shown.index(text) for text in [*order, "turn 1", "It is 391."]]
    assert places == sorted(places)
    for text in ("22 tokens, 8 of them trained", "0.50 s", "reward 1", "18 tokens read, 4 of them new"):
        assert text in shown


def test_failures_and_new_sequences_are_told(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_directory), "--rollout", "2:1"]) == 0
    assert "the agent failed: ZeroDivisionError" in capsys.readouterr().out
    assert main(["report", str(run_directory), "--rollout", "2:2"]) == 0
    shown = capsys.readouterr().out
    assert "took longer than 60 s" in shown
    assert BRANCHES["history"] in shown
    assert "not trained on" in shown
    assert "(thinks) hm" in shown
    assert "\x1b" not in shown


def test_a_rollout_that_is_not_there_is_told_with_those_that_are(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (
        (run_directory, "7", "1 to 2"),
        (run_directory, "2:3", "0 to 2"),
        (tmp_path, "1", "track.rollouts"),
    )
    for directory, asked, why in wrong:
        assert main(["report", str(directory), "--rollout", asked]) != 0
        assert why in capsys.readouterr().err
    rollout_file(run_directory, 3).write_bytes(rollout_file(run_directory, 2).read_bytes()[:-9])
    assert main(["report", str(run_directory), "--rollout", "3"]) != 0


def test_every_reason_for_a_new_sequence_has_words() -> None:
    assert set(BRANCHES) == set(get_args(BranchReason))
