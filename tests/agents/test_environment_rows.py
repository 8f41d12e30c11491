"""Rows of environments, what a row asks of them, and what is an action."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo import cli
from megagrpo.agents.environments.openenv import last_object, observation_text, say, seed_of, text_action
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.section import broken_rules

values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))
objects = st.dictionaries(st.text(), values | st.dictionaries(st.text(), values))


@settings(max_examples=30)
@given(st.lists(objects, min_size=1, max_size=3), st.text("{}[]ab \n\"'`"))
def test_the_last_object_of_an_answer_is_the_action(said: list[dict[str, object]], between: str) -> None:
    between = between.replace("{", "")
    assert last_object(between.join(["", *map(json.dumps, said), ""])) == said[-1]


@pytest.mark.parametrize("said", ["", "no object", "{", "{'a': 1}", "[1, 2]", '{"a": ' * 2000])
def test_an_answer_without_an_object_is_an_empty_action(said: str) -> None:
    assert last_object(said) == {}


def test_an_observation_is_told_by_its_only_text_or_as_json_and_an_answer_is_a_field() -> None:
    text = observation_text(None)
    assert text({"text": "hello", "done": False, "note": ""}) == "hello"
    assert json.loads(text({"text": "hello", "other": "there"})) == {"text": "hello", "other": "there"}
    assert observation_text("board")({"board": [1, 2], "text": "x"}) == "[1, 2]"
    assert text_action("message")("hi") == {"message": "hi"}


def test_rollouts_of_a_prompt_are_of_one_episode() -> None:
    seeds = [
        seed_of(SimpleNamespace(id="a", extra_info=extra)) for extra in ({"seed": 3, "index": 4}, {"index": 4}, {})
    ]
    assert seeds[:2] == [3, 4]
    assert (
        seeds[2] == seed_of(SimpleNamespace(id="a", extra_info={})) != seed_of(SimpleNamespace(id="b", extra_info={}))
    )


def test_an_observation_goes_on_in_the_prompts_own_message() -> None:
    messages = [{"role": "system", "content": "s"}]
    say(messages, "one")
    say(messages, "two")
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "one\n\ntwo"}]


def test_rows_of_openenv_differ_in_their_seeds(tmp_path: Path) -> None:
    asked = ["prepare", "openenv", "--prompt", "Play.", "--size", "3", "--test-size", "2", "--output", str(tmp_path)]
    assert cli.main(asked) == 0
    seeds = [
        [row["extra_info"]["seed"] for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()]
        for split in ("train", "test")
    ]
    assert seeds == [[0, 1, 2], [3, 4]]


def test_preparing_says_what_is_wrong_with_an_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path)]
    assert cli.main(["prepare", "verifiers", "none", "--python", "/no/python", *output]) == 2
    assert "/no/python" in capfd.readouterr().err
    assert cli.main(["prepare", "verifiers", "none", "--python", sys.executable, *output]) == 2
    assert "verifiers" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["prepare", "verifiers", "none", "--arguments", "[1]", *output])


def test_reasoning_gym_has_no_interpreter_of_its_own() -> None:
    agent = AgentConfig.model_validate({"reasoning_gym": {}, "python": "python3"})
    assert [problem.where for problem in broken_rules(agent)] == ["python"]


def test_a_function_that_turns_answers_into_actions_may_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "words_of_test.py").write_text("FIELD = 'word'\n")
    own = tmp_path / "actions.py"
    own.write_text("from words_of_test import FIELD\ndef action(said): return {FIELD: said}\n")
    assert text_action(f"{own}:action")("hello") == {"word": "hello"}
