"""Instruction following: rows of three formats, and constraints against the expressions of the original."""

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.errors import RewardError
from megagrpo.reward.functions import FunctionSpec, load
from megagrpo.reward.verifiers.ifeval import BY_ID, BY_NAME, CONSTRAINTS_MAX, constraints, make, of_mapping, text

TABLE = Path(__file__).parents[1] / "golden" / "verifiers" / "ifeval.jsonl"
PIECES = [
    "[", "]", "*", "**", "***", "<<", ">", ">>", "<", "\n", "\n\n", " ", "\t", "-", "a", "B", "1", "S 1", ".", "\u2028"
]  # fmt: skip
NASTY = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
MADE = (make("strict"), make("loose"))
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def golden() -> list[dict]:
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", [*BY_ID, *BY_NAME])
def test_the_golden_table_has_a_kept_and_a_broken_case_of_every_constraint(name):
    assert {0.0, 1.0} <= {row["score"] for row in golden() if f'"{name}"' in row["ground_truth"]}


@given(NASTY, st.integers(0, 4))
def test_constraints_find_what_the_expressions_of_the_original_find(response, n):
    bullets = re.findall(r"^\s*\*[^\*].*$", response, re.M) + re.findall(r"^\s*-.*$", response, re.M)
    assert BY_ID["detectable_format:number_bullet_lists"](response, n) == (len(bullets) == n)
    assert constraints.placeholder_count(response) == len(re.findall(r"\[.*?\]", response))
    titles = [title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", response)]
    assert BY_ID["detectable_format:title"](response) == any(titles)
    assert BY_NAME["validate_title"](response) == bool(re.findall(r"<<(.*?)>>", response))
    sections = re.split(r"\s?S\s?\d+\s?", response)
    assert BY_ID["detectable_format:multiple_sections"](response, " S ", n) == (len(sections) - 1 >= n)
    assert BY_NAME["validate_highlighted_sections"](response, n) == (len(re.findall(r"\*(.*?)\*", response)) >= n)
    changed = [piece.split() for piece in re.findall(r"a .*? B", response)]
    kept = len(changed) == n and all(len(words) == 3 and words[1] != "1" for words in changed)
    assert BY_ID["copy:repeat_phrase"](response, "a 1 B", n) == kept


@given(NASTY)
def test_what_is_kept_strictly_is_kept_loosely(response):
    ids = ["punctuation:no_comma", "detectable_format:title", "detectable_content:number_placeholders"]
    truth = json.dumps({"instruction_id_list": ids, "kwargs": [{}, {}, {"num_placeholders": 2}]})
    strict, loose = (function(response, truth, {}) for function in MADE)
    assert all(strict[name] <= loose[name] for name in strict)
    assert strict["all"] <= strict["share"] == strict["score"]


def test_each_constraint_is_a_metric_and_their_number_is_bounded():
    many = CONSTRAINTS_MAX
    row = {"instruction_id_list": ["punctuation:no_comma"] * many, "kwargs": [{}] * many}
    assert make()("a", json.dumps(row), {}) == {"score": 1.0, "share": 1.0, "all": 1.0, "punctuation_no_comma": 1.0}
    with pytest.raises(ValueError):
        of_mapping({key: value * 2 for key, value in row.items()})


@pytest.mark.parametrize("empty", ["", "none", "42"])
def test_constraints_in_extra_info_count_where_the_ground_truth_has_none(empty):
    assert make()("a, b", empty, NO_COMMA)["score"] == 0.0
    with pytest.raises(ValueError):
        make()("a, b", empty, {})


def test_a_ground_truth_comes_before_extra_info():
    other = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    assert "startend_quotation" in make()("a", json.dumps(other), NO_COMMA)


@pytest.mark.parametrize(
    "truth", ["[" * 100_000, "[" * 50_000 + "]" * 50_000, "(" * 100_000 + "[", '{"func_name": ["a"]}']
)
def test_a_ground_truth_that_breaks_parsers_is_refused(truth):
    with pytest.raises(ValueError):
        make()("a", truth, {})


def test_a_language_is_the_same_however_often_it_is_asked_for():
    unsure = "Hotel Taxi Restaurant Bar"
    assert len({text.language_of(unsure) for _ in range(20)}) == 1


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    text._languages.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'megagrpo\[ifeval\]'"):
        make()


@pytest.mark.parametrize("arguments", [{"mode": "both"}, {"score": "half"}])
def test_an_unknown_argument_is_refused(arguments):
    with pytest.raises(RewardError):
        load(FunctionSpec("ifeval", "ifeval", 1.0, arguments, "reward.functions[0]"))
