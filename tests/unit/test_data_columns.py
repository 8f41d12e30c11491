"""Files with columns of their own: which hold what is said by the recipe, or known; nothing else of a row is lost."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megagrpo.data.rows import data_sources, prompt_schema, quick_look, read, truth_text
from megagrpo.errors import DataError, RecipeError
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.recipe.schema.data import ColumnsConfig
from megagrpo.section import broken_rules
from megagrpo.typed_json import dumps, loads
from tests.data_files import write_jsonl, write_parquet
from tests.tiny_run import make_run

QUESTION = {"role": "user", "content": "2+3?"}
MATH = {"question": "2+3?", "answer": {"value": 5, "unit": "m"}, "dataset": "gsm", "level": 1, "seen": None}


@pytest.fixture(params=["a.parquet", "a.jsonl"])
def write(request, tmp_path):
    kind = write_parquet if request.param.endswith("parquet") else write_jsonl
    return lambda *rows: kind(tmp_path / request.param, *rows)


def rows_of(path, **columns: Any):
    return read(path, prompt_schema(DataFileConfig(path=str(path), columns=columns).columns))


def test_columns_are_what_the_recipe_says_and_all_others_are_kept(write):
    (row,) = rows_of(write(MATH), prompt="question", ground_truth="answer.value", ability={"value": "math"})
    assert row.messages == (QUESTION,)
    assert (row.ground_truth, row.data_source, row.ability) == ("5", "gsm", "math")
    assert row.extra_info == {"level": 1, "seen": None, "answer": {"unit": "m"}}


def test_other_columns_are_kept_as_far_as_the_recipe_wants_them(write):
    columns = {"prompt": "question", "ground_truth": "answer.value"}
    (row,) = rows_of(path := write(MATH), **columns, extra_info=["level", "answer.unit", "question"])
    assert row.extra_info == {"level": 1, "unit": "m", "question": "2+3?"}
    with pytest.raises(DataError, match=r"no column 'levle'(.|\n)*extra_info: \[level, seen\]"):
        rows_of(path, **columns, extra_info=["levle", "seen"])
    with pytest.raises(DataError, match=r"no 'answer.units'"):
        rows_of(path, **columns, extra_info=["answer.units"])


def test_a_text_called_reward_model_is_another_column_beside_a_ground_truth(write):
    row = {"prompt": "2+3?", "reward_model": "armo", "ground_truth": 5, "data_source": "s"}
    (found,) = rows_of(write(row))
    assert (found.ground_truth, found.extra_info) == ("5", {"reward_model": "armo"})


def test_rows_of_open_instruct_without_a_ground_truth_hear_of_their_own_column(write):
    with pytest.raises(DataError, match="no column 'ground_truth'"):
        rows_of(write({"messages": [QUESTION], "dataset": "math"}))


def test_a_ground_truth_may_be_several_columns_or_an_object(write):
    path = write(MATH)
    (row,) = rows_of(path, prompt="question", ground_truth=["level", "answer.unit"], data_source={"value": "mine"})
    assert (row.ground_truth, row.data_source) == ('{"level": 1, "unit": "m"}', "mine")
    assert row.extra_info == {"dataset": "gsm", "seen": None, "answer": {"value": 5}}
    (row,) = rows_of(path, prompt="question", ground_truth="answer")
    assert row.ground_truth == '{"value": 5, "unit": "m"}'


def test_rows_of_open_instruct_are_known(write):
    older = {"messages": [QUESTION], "ground_truth": "5", "dataset": "math", "constraint": None}
    (row,) = rows_of(write(older))
    assert (row.messages, row.ground_truth, row.data_source) == ((QUESTION,), "5", "math")
    assert row.extra_info == {"constraint": None}
    (row,) = rows_of(write(older | {"ground_truth": ["5"], "dataset": ["math"]}))
    assert (row.ground_truth, row.data_source) == ("5", "math")
    with pytest.raises(DataError, match="dataset"):
        rows_of(write(older | {"ground_truth": ["5", "6"], "dataset": ["math", "code"]}))


def test_the_other_columns_of_verls_rows_are_kept_beside_extra_info(write):
    row = {"data_source": "s", "prompt": [QUESTION], "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 1}}
    (row,) = rows_of(write(row | {"level": 2}))
    assert row.extra_info == {"level": 2, "index": 1}


def test_a_column_that_is_not_there_is_named_with_how_to_say_which_it_is(write):
    path = write(MATH)
    with pytest.raises(DataError, match=r"no column 'prompt'(.|\n)*columns: \{prompt: NAME\}"):
        rows_of(path)
    with pytest.raises(DataError, match=r"no 'answer.worth'"):
        rows_of(path, prompt="question", ground_truth="answer.worth")
    schema = prompt_schema(DataFileConfig(path="a", columns={"prompt": "qestion", "ground_truth": "answer"}).columns)
    assert "{prompt: question}" in quick_look(path, schema)[0].fix


def test_the_sources_of_a_file_are_found_with_their_first_rows(write):
    path = write(MATH, MATH | {"dataset": "math"}, MATH)
    first = int(path.suffix == ".jsonl")
    assert list(data_sources(str(path))) == [(first, "gsm"), (first + 1, "math")]
    constant = DataFileConfig(path="a", columns={"data_source": {"value": "mine"}}).columns
    assert list(data_sources(str(path), constant)) == [(first, "mine")]


WRONG = ["ground_truth=7", "ground_truth={valu: a}", "ground_truth=[]", "prompt={value: a}", "data_source={value: 3}"]


@pytest.mark.parametrize("override", WRONG)
def test_columns_that_cannot_be_are_named_in_the_recipe(override, tmp_path):
    with pytest.raises(RecipeError, match=f"columns.{override.partition('=')[0]}"):
        load(make_run(tmp_path), [f"data.train.0.columns.{override}"])


def test_columns_of_one_object_have_different_last_names():
    columns = ColumnsConfig(ground_truth=["a.x", "b.x"], extra_info=["x", "b.x", "y"])
    assert [problem.where for problem in broken_rules(columns)] == ["ground_truth", "extra_info"]


def test_a_part_of_a_row_that_there_is_not_is_refused():
    with pytest.raises(ValidationError, match="solution"):
        DataFileConfig(path="a", columns={"solution": "answer"})


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", "a"), (5, "5"), (0.5, "0.5"), (True, "true"), (["a", 1], '["a", 1]'), ({"é": None}, '{"é": null}')]
    + [(2**2000, str(2**2000)), (1e16, "1e+16"), (Decimal("1.50"), "1.50")]
    + [(value, None) for value in (None, float("inf"), [float("nan")], {"a": b""}, Decimal("nan"))],
)
def test_a_ground_truth_becomes_text(value, text):
    assert truth_text(value) == text


KEYS = st.sampled_from(["a", "\0type", 1, None])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.datetimes()
    | st.dates() | st.times() | st.timedeltas() | st.decimals(allow_nan=False) | st.tuples(st.integers(), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
@settings(max_examples=50)
def test_values_of_other_columns_come_back_as_the_same(value):
    back = loads(dumps(value))
    assert back == value
    assert type(back) is type(value)


def test_a_value_of_an_unknown_kind_becomes_its_text():
    assert loads(dumps({"a": 1j, "b": Decimal("1.50")})) == {"a": "1j", "b": Decimal("1.50")}
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="deep"):
        dumps(nested)


def test_a_number_longer_than_python_writes_is_no_ground_truth():
    assert truth_text(10**5000) is None
