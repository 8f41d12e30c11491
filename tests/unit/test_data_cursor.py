"""The cursor: every epoch is a permutation, and a restored cursor continues as if nothing had happened."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.data.cursor import Cursor
from megagrpo.data.mixture import permutation
from megagrpo.errors import DataError
from megagrpo.types import Prompt


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"a:{i}", (i, i + 1), "sums", str(i)) for i in range(count)]


def base_ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id.partition("+")[0] for prompt in prompts]


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32), steps=st.lists(st.integers(1, 100), max_size=12))
def test_each_epoch_is_a_permutation_however_it_is_cut_into_steps(size, seed, steps):
    prompts = make_prompts(size)
    cursor = Cursor(prompts, seed=seed)
    drawn = [name for count in steps for name in base_ids(cursor.next(count))]
    assert len(drawn) == sum(steps)
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start : start + size]) == sorted(p.id for p in prompts)
    whole = Cursor(prompts, seed=seed)
    assert drawn == base_ids(whole.next(sum(steps)))
    assert (cursor.epoch, cursor.position) == divmod(sum(steps), size)


def test_epochs_and_seeds_have_orders_of_their_own():
    prompts = make_prompts(50)
    cursor = Cursor(prompts, seed=1)
    first, second = cursor.next(50), cursor.next(50)
    assert first != second
    assert Cursor(prompts, seed=2).next(50) != first
    assert Cursor(prompts, seed=1, shuffle=False).next(50) == prompts


def test_the_order_is_the_same_for_ever():
    assert permutation(8, 7, 0).tolist() == [6, 3, 4, 0, 2, 7, 5, 1]
    assert permutation(8, 7, 1).tolist() == [1, 3, 2, 7, 4, 5, 0, 6]


@pytest.mark.parametrize(
    ("other", "needle"),
    [
        (Cursor(make_prompts(6), seed=3), "prompts"),
        (Cursor(make_prompts(5), seed=4), "seed: 4"),
        (Cursor(make_prompts(5), seed=3, shuffle=False), "shuffle"),
        (Cursor([*make_prompts(4), Prompt("a:4", (9, 9), "sums", "4")], seed=3), "fingerprint"),
        (Cursor([*make_prompts(4), Prompt("a:4", (4, 5), "sums", "wrong")], seed=3), "fingerprint"),
    ],
)
def test_a_state_of_other_data_is_refused(other, needle):
    state = Cursor(make_prompts(5), seed=3).state()
    before = other.state()
    with pytest.raises(DataError, match=needle):
        other.restore(state)
    assert other.state() == before


@pytest.mark.parametrize(
    ("field", "values"),
    [("position", [5, -1]), ("epoch", ["1", True, None]), ("set_aside", ["?", "AAAA", None, 3])],
)
def test_a_damaged_state_is_refused(field, values):
    cursor = Cursor(make_prompts(5), seed=3)
    for value in values:
        with pytest.raises(DataError, match="not valid"):
            cursor.restore({**cursor.state(), field: value})


@given(
    size=st.integers(2, 30),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
    cuts=st.lists(st.integers(1, 50), max_size=6),
    data=st.data(),
)
def test_what_is_set_aside_never_comes_again_also_where_a_run_continues_and_all_else_does(
    size, seed, shuffle, cuts, data
):
    cursor = Cursor(make_prompts(size), seed=seed, shuffle=shuffle)
    aside = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    drawn = [prompt.id for count in cuts for prompt in cursor.next(count)]
    cursor.set_aside(name for name in drawn if int(base_ids([Prompt(name, (), "", "")])[0][2:]) in aside)
    gone = {name.partition("+")[0] for name in drawn} & {f"a:{i}" for i in aside}
    assert cursor.set_aside_count == len(gone)
    later = base_ids(cursor.next(3 * size))
    assert set(later) == {f"a:{i}" for i in range(size)} - gone
    resumed = Cursor(make_prompts(size), seed=seed, shuffle=shuffle)
    resumed.restore(json.loads(json.dumps(cursor.state())))
    assert [resumed.next(count) for count in (1, 2 * size)] == [cursor.next(count) for count in (1, 2 * size)]
    assert resumed.state() == cursor.state()


def test_a_prompt_that_the_data_hold_twice_is_set_aside_altogether():
    cursor = Cursor([*make_prompts(2), *make_prompts(1)], seed=0, shuffle=False)
    assert [prompt.id for prompt in cursor.next(3)] == ["a:0", "a:1", "a:0+1"]
    cursor.set_aside(["a:0+1"])
    assert (cursor.set_aside_count, cursor.exhausted) == (2, False)
    assert base_ids(cursor.next(3)) == ["a:1"] * 3


def test_there_must_be_a_prompt_to_draw():
    with pytest.raises(DataError, match="no prompts"):
        Cursor([], seed=0)
    cursor = Cursor(make_prompts(3), seed=0)
    cursor.set_aside(f"a:{i}" for i in range(3))
    assert cursor.exhausted
    with pytest.raises(DataError, match="every prompt is set aside"):
        cursor.next(1)


def test_ids_are_unique_over_all_draws_of_a_step_and_across_epochs():
    ids = [prompt.id for prompt in Cursor(make_prompts(3), seed=0, shuffle=False).next(8)]
    assert ids == ["a:0", "a:1", "a:2", "a:0+1", "a:1+1", "a:2+1", "a:0+2", "a:1+2"]
    cursor, drawn = Cursor(make_prompts(3), seed=0, shuffle=False), Counter()
    ids = [prompt.id for count in (2, 2, 3) for prompt in cursor.next(count, drawn)]
    assert ids == ["a:0", "a:1", "a:2", "a:0+1", "a:1+1", "a:2+1", "a:0+2"]


def test_what_is_set_aside_takes_a_bit_for_each_prompt_at_most():
    cursor = Cursor(make_prompts(80_000), seed=0)
    cursor.set_aside(f"a:{i}" for i in range(0, 80_000, 3))
    assert len(cursor.state()["set_aside"]) < 80_000 / 8 * 4 / 3 + 100
