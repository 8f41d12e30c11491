"""The adaptive KL coefficient against figures worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algorithm.kl_coefficient import next_coefficient


def test_it_moves_towards_the_target_by_a_fifth_of_the_horizon_at_most():
    assert next_coefficient(0.1, kl=0.66, target=0.6, horizon=1000, samples=100) == pytest.approx(0.1 * 1.01)
    assert next_coefficient(0.1, kl=0.54, target=0.6, horizon=1000, samples=100) == pytest.approx(0.1 * 0.99)
    assert next_coefficient(0.1, kl=60.0, target=0.6, horizon=1000, samples=100) == pytest.approx(0.1 * 1.02)
    assert next_coefficient(0.1, kl=-9.0, target=0.6, horizon=1000, samples=100) == pytest.approx(0.1 * 0.98)
    assert next_coefficient(0.1, kl=0.6, target=0.6, horizon=1000, samples=100) == 0.1


def test_without_a_target_it_is_fixed():
    assert next_coefficient(0.1, kl=7.0, target=None, horizon=1, samples=100) == 0.1


@given(st.floats(-100, 100), st.integers(1, 10), st.integers(1, 10_000))
def test_a_step_of_many_horizons_changes_it_by_a_fifth_and_never_its_sign(kl, horizon, samples):
    # The formula alone gives 1 - 0.2 x samples / horizon, which is below 0 from 5 horizons on.
    assert 0.8 * 0.1 - 1e-12 <= next_coefficient(0.1, kl, 0.5, horizon, samples) <= 1.2 * 0.1 + 1e-12
