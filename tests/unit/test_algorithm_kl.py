"""KL estimates against their formulas and finite differences, and the adaptive coefficient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algorithm.kl import K3_LIMIT, KLConfig, kl_estimate

every_estimator = pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])


def pairs(tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    logprobs = -torch.randn(tokens, generator=random, dtype=torch.float64).abs()
    reference = logprobs + 0.5 * torch.randn(tokens, generator=random, dtype=torch.float64)
    return logprobs.requires_grad_(), reference


@every_estimator
@pytest.mark.parametrize("straight_through", [False, True])
def test_estimates_are_those_of_the_formulas_and_vanish_for_equal_policies(estimator, straight_through):
    logprobs, reference = pairs()
    log_ratio = (logprobs.detach() - reference).numpy()
    expected = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": np.exp(-log_ratio) - 1 + log_ratio,
        "abs": np.abs(log_ratio),
    }[estimator]
    found = kl_estimate(logprobs, reference, estimator, straight_through).detach()
    np.testing.assert_allclose(found, expected, atol=1e-14)
    assert not kl_estimate(logprobs, logprobs, estimator, straight_through).any()


@every_estimator
def test_gradients_are_finite_differences(estimator):
    logprobs, reference = pairs()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), logprobs, eps=1e-7, atol=1e-7)


@every_estimator
def test_a_straight_through_estimate_has_the_gradient_of_k2(estimator):
    logprobs, reference = pairs()
    (gradient,) = torch.autograd.grad(kl_estimate(logprobs, reference, estimator, True).sum(), logprobs)
    torch.testing.assert_close(gradient, (logprobs - reference).detach())


def test_k3_of_a_token_that_is_far_off_is_limited_and_pulls_no_more():
    logprobs = torch.tensor([-1e4, 0.0, -2.0], requires_grad=True)
    found = kl_estimate(logprobs, torch.tensor([0.0, -1e4, 0.0]), "k3")
    assert found[0] == K3_LIMIT
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert logprobs.grad[0] == 0
    assert logprobs.grad[2] != 0


# The adaptive coefficient, by figures worked out by hand.


@pytest.mark.parametrize(
    ("target", "kl", "factor"), [(0.6, 0.66, 1.01), (0.6, 0.54, 0.99), (0.6, 60, 1.02), (0.6, -9, 0.98), (None, 7, 1)]
)
def test_it_moves_towards_the_target_by_a_fifth_of_the_horizon_at_most(target, kl, factor):
    found = KLConfig(target=target, horizon=1000).next_coefficient(0.1, kl, 100)
    assert found == pytest.approx(0.1 * factor)


@given(st.floats(-100, 100), st.integers(1, 10), st.integers(1, 10_000))
def test_a_step_of_many_horizons_changes_it_by_a_fifth_and_never_its_sign(kl, horizon, samples):
    # The formula alone gives 1 - 0.2 x samples / horizon, which is below 0 from 5 horizons on.
    found = KLConfig(target=0.5, horizon=horizon).next_coefficient(0.1, kl, samples)
    assert 0.08 - 1e-12 <= found <= 0.12 + 1e-12
