"""Joining microbatches for passes without gradients: none lost, none too large, stages of a pipeline kept busy."""

from hypothesis import given
from hypothesis import strategies as st

from megagrpo.batching.join import joined
from megagrpo.layout.parallel import ParallelLayout


@given(st.integers(0, 40), st.integers(1, 12))
def test_every_microbatch_is_in_one_part_that_is_not_too_large(count, at_once):
    parts = joined(count, at_once, ParallelLayout(data=2))
    assert [i for part in parts for i in part] == list(range(count))
    assert all(1 <= len(part) <= at_once for part in parts)
    assert len(parts) == -(-count // at_once)


@given(st.integers(1, 12), st.integers(1, 12))
def test_a_pipeline_is_kept_busy_and_gets_rounds_of_its_stages(rounds, at_once):
    layout = ParallelLayout(pipeline=3, virtual_pipeline=2)
    parts = joined(3 * rounds, at_once, layout)
    assert [i for part in parts for i in part] == list(range(3 * rounds))
    assert len(parts) % 3 == 0
    assert len(parts) >= min(3 * rounds, 6)
    assert max(map(len, parts)) <= at_once
