"""The critic's loss against its formula in float64, its gradient against finite differences; explained variance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megagrpo.algorithm.critic import explained_variance, value_loss

NUMBERS = st.floats(-4, 4).map(lambda x: round(x, 3))
TOKENS = arrays(np.float64, (3, 12), elements=NUMBERS)
CLIPS = st.sampled_from([None, 0.1, 0.5, 2.0])


def one_token(value: float, old: float, wanted: float, clip: float | None) -> float:
    """The formula, a token at a time."""
    losses = [(value - wanted) ** 2 / 2]
    if clip is not None:
        near = old + float(np.clip(value - old, -clip, clip))
        losses.append((near - wanted) ** 2 / 2)
    return max(losses)


@given(TOKENS, CLIPS)
def test_the_loss_is_the_worse_of_the_value_and_the_clipped_value(numbers, clip):
    found = value_loss(*torch.from_numpy(numbers), clip)
    wanted = [one_token(*token, clip) for token in numbers.T]
    np.testing.assert_allclose(found.loss.numpy(), wanted, atol=1e-12)


@given(TOKENS, CLIPS)
@settings(max_examples=50)
def test_the_gradient_is_that_of_finite_differences(numbers, clip):
    values, old, returns = numbers
    if clip is not None:  # where the two losses meet there is no gradient
        near = old + np.clip(values - old, -clip, clip)
        assume((np.abs(np.abs(values - old) - clip) > 1e-3).all())
        assume((np.abs(values + near - 2 * returns)[near != values] > 1e-3).all())
    inputs = torch.from_numpy(values).requires_grad_()
    value_loss(inputs, torch.from_numpy(old), torch.from_numpy(returns), clip).loss.sum().backward()
    step = 1e-6
    differences = [
        (one_token(v + step, o, r, clip) - one_token(v - step, o, r, clip)) / (2 * step)
        for v, o, r in zip(values, old, returns, strict=True)
    ]
    np.testing.assert_allclose(inputs.grad.numpy(), differences, atol=1e-7)


def test_a_value_that_has_moved_far_enough_to_its_return_moves_no_further():
    values = torch.tensor([0.6, 0.6, 0.4, -0.6], requires_grad=True)
    found = value_loss(values, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 1.0]), 0.5)
    found.loss.sum().backward()
    assert found.clipped.tolist() == [True, False, False, False]
    assert values.grad.tolist() == pytest.approx([0.0, 1.6, -0.6, -1.6])


def sums(values: np.ndarray) -> tuple[float, float]:
    return float(values.sum()), float(np.square(values).sum())


@given(arrays(np.float64, (2, 20), elements=NUMBERS))
def test_explained_variance_is_that_of_all_tokens(numbers):
    values, returns = numbers
    assume(returns.std() > 0.1)
    wanted = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(20, sums(returns), sums(returns - values)) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_explained_variance_of_nothing_and_of_equal_returns_is_0():
    assert explained_variance(0, (0.0, 0.0), (0.0, 0.0)) == 0.0
    for equal in (1.0, 0.1, -0.7, 3e-5):  # most of these leave a rounding error in their sums
        returns = np.full(997, np.float32(equal), np.float64)
        assert explained_variance(997, sums(returns), sums(returns - np.linspace(0, 1, 997))) == 0.0
