"""`megagrpo data check`: rows whose own ground truth is not right, or whose verifier takes anything, are named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megagrpo.cli import main
from megagrpo.data.cursor import Cursor
from megagrpo.preflight.data_check import check_rows, namer, sample_warnings, solution_of
from megagrpo.recipe.reward_functions import BUILT_IN
from megagrpo.recipe.schema import DataFileConfig, RewardConfig
from megagrpo.reward.functions import FunctionSpec
from megagrpo.types import Prompt
from tests.data_files import write_jsonl
from tests.tiny_run import ROW, make_run, recipe

GSM8K = {"functions": [{"function": "gsm8k"}]}


def prompts(*truths: str, source: str = "s", **extra) -> list[Prompt]:
    return [Prompt(f"a.jsonl:{i}", (1, 2), source, truth, extra_info=extra) for i, truth in enumerate(truths)]


def told(rows: list[Prompt], reward: dict) -> list[str]:
    checked = check_rows(rows, RewardConfig.model_validate(reward), lambda name: f"row {name}")
    assert checked.rows == len(rows)
    return [problem.where for problem in checked.problems]


def test_good_rows_pass_and_a_row_that_its_function_cannot_use_is_named():
    assert told(prompts("5", "1,234", "-2.5", "5"), GSM8K) == []
    (where,) = told(prompts("5", "five", "7"), GSM8K)
    assert "row a.jsonl:1: gsm8k cannot use the ground truth 'five'" in where


def test_a_ground_truth_that_is_not_taken_for_right_is_named():
    reward = {"functions": [{"function": "string_match", "arguments": {"after": "Answer:"}}]}
    assert told(prompts("Paris", "Rome"), reward) == []
    (where,) = told(
        prompts("A", "B", "E"), {"functions": [{"function": "multiple_choice", "arguments": {"letters": "ABCD"}}]}
    )
    assert "row a.jsonl:2: multiple_choice" in where


def test_a_function_that_takes_other_answers_for_right_is_named(monkeypatch):
    monkeypatch.setattr("megagrpo.reward.verifiers.words.solution", lambda truth: "<answer>Paris or Rome</answer>")
    anything = {"functions": [{"function": "string_match", "arguments": {"method": "contains"}}]}
    assert told(prompts("Paris", "Rome"), anything) == [], "the same response is no other answer"
    monkeypatch.setattr(
        "megagrpo.reward.verifiers.words.solution", lambda truth: f"<answer>Paris or Rome, {truth}</answer>"
    )
    found = told(prompts("Paris", "Rome"), anything)
    assert [where.split(": ")[1] for where in found] == ["string_match takes another row's answer for right"] * 2


def test_rows_are_checked_by_the_functions_of_their_source_and_what_is_not_checked_is_said(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def score(response):\n    raise RuntimeError('called')\n")
    reward = {
        "by_source": {"sums": GSM8K["functions"], "asked": [{"function": f"{own}:score"}, {"function": "gsm8k"}]},
        "functions": [{"function": "format", "arguments": {"pattern": "x"}}],
    }
    rows = [*prompts("5", "no", source="sums"), *prompts("6", source="asked"), *prompts("x", source="other")]
    checked = check_rows(rows, RewardConfig.model_validate(reward), str)
    assert [problem.where.partition(":")[0] for problem in checked.problems] == ["a.jsonl"]
    assert (checked.unchecked, checked.only_empty) == ({"score": 1}, {"format": 1})
    assert any("score" in line for line in checked.lines())


def test_rows_of_a_run_that_learns_from_teachers_alone_are_called_with_nothing():
    assert told(prompts("5", "no"), {}) == []


def test_a_reward_that_an_agent_gives_is_not_asked_of_a_row():
    checked = check_rows(prompts("5"), RewardConfig.model_validate({"functions": [{"function": "agent"}]}), str)
    assert not checked.problems
    assert checked.unchecked == {"agent": 1}


def test_functions_that_make_no_right_response_are_tried_on_an_empty_one():
    budget = {"function": "length", "arguments": {"kind": "budget"}}
    reward = {"by_source": {"code": [{"function": "code"}], "length": [budget]}}
    tests = '{"inputs": ["1"], "outputs": ["2"]}'
    rows = [
        Prompt(f"{n}:{t}", (1,), n, t) for n, t in (("code", tests), ("code", "?"), ("length", "7"), ("length", "?"))
    ]
    assert [where.split(" the ground")[0] for where in told(rows, reward)] == [
        "row code:?: code cannot use",
        "row length:?: length cannot use",
    ]


def test_rows_of_files_with_a_plus_in_their_names_are_named(tmp_path):
    path = str(write_jsonl(tmp_path / "a+b.jsonl", ROW))
    assert namer([DataFileConfig(path=path)])("a+b.jsonl:1") == f"{path} line 1"


def test_full_marks_for_an_empty_response_are_named():
    reward = {"functions": [{"function": "code", "arguments": {"program": "response"}}]}
    (where,) = told(prompts('{"inputs": [""], "outputs": [""]}', '{"inputs": [""], "outputs": ["1"]}'), reward)
    assert "a.jsonl:0: code takes an empty response for right" in where


def test_a_prompt_that_opens_the_reasoning_has_right_responses():
    (prompt,) = prompts("5")
    assert told([replace(prompt, text="2+3? <think>\n")], GSM8K) == []


RIGHT = {
    "gsm8k": "1,234",
    "math": r"\frac{1}{2}",
    "strict_math": r"$\frac{1}{2}$",
    "multiple_choice": "B",
    "string_match": '["NYC", "New York"]',
    "f1": "the old bridge",
    "search_answer": '{"target": ["Paris"]}',
    "json_schema": '{"age": 3}',
    "think_answer": "anything",
}
OTHER = {"multiple_choice": "C", "gsm8k": "7", "math": "7", "json_schema": "[7]"}
ARGUMENTS = {"json_schema": {"equal": True}, "think_answer": {"opened": True}}


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_verifier_says_is_right_gets_full_marks_from_it(name):
    reward = {"functions": [{"function": name, "arguments": ARGUMENTS.get(name, {})}]}
    checked = check_rows(prompts(RIGHT[name], OTHER.get(name, "seven")), RewardConfig.model_validate(reward), str)
    assert (checked.problems, checked.only_empty) == ([], {})


def test_functions_that_ask_models_or_servers_make_no_responses():
    with_solution = {name for name in BUILT_IN if solution_of(FunctionSpec(name, name, 1.0, {}, "reward[0]"))}
    assert {*RIGHT, "reasoning_gym"} <= with_solution
    assert not with_solution & {"judge", "judge_pairs", "judge_ranking", "remote", "reward_model"}


def test_a_run_warns_of_a_sample_and_is_silent_if_all_is_well():
    cursor = Cursor(prompts(*map(str, range(50)), "none"), seed=0)
    some = cursor.some(32)
    assert len({prompt.id for prompt in some}) == 32
    first, *_ = sample_warnings(some, RewardConfig.model_validate(GSM8K))
    assert "1 of 32" in first
    assert list(sample_warnings(some[:-1], RewardConfig.model_validate(GSM8K))) == []
    assert len(cursor.some(1000)) == 51


def test_the_command_names_files_and_rows_and_says_what_it_did(tmp_path: Path, capsys):
    path = make_run(tmp_path)
    assert main(["data", "check", str(path)]) == 0
    assert "8 rows checked" in capsys.readouterr().out
    bad = {**ROW, "reward_model": {"ground_truth": "two"}}
    write_jsonl(tmp_path / "train.jsonl", ROW, bad)
    tree = recipe(tmp_path) | {"eval": {"sets": {"t": {"files": [{"path": str(tmp_path / "none.jsonl")}]}}}}
    path.write_text(yaml.safe_dump(tree))
    assert main(["data", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path / 'train.jsonl'} line 2: gsm8k cannot use the ground truth 'two'" in out
    assert "none.jsonl" in out
    assert "2 problems" in out
    assert main(["data", "check", str(path), "reward.functions.0.arguments={metod: strict}"]) == 1
    assert "metod" in capsys.readouterr().out
    assert main(["data", "check", str(path), "--rows", "1", "eval.sets={}", f"name={json.dumps('x')}"]) in (0, 1)
