"""KL estimates against their formulas, the divergence itself, finite differences and verl's."""

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


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy and logprobs of a reference, over the same four tokens."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    return logits, torch.log_softmax(torch.tensor([0.0, 0.4, 1.0, -0.7], dtype=torch.float64), 0)


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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    logits, reference = distributions()
    policy = torch.log_softmax(logits, 0)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, estimator)).sum(), exact)


def test_only_with_straight_through_or_k2_is_the_expected_gradient_that_of_the_divergence():
    logits, reference = distributions()
    policy = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    for estimator, straight_through in (("k1", False), ("k3", False), ("k2", False), ("k1", True), ("k3", True)):
        policy = torch.log_softmax(logits, 0)
        estimate = kl_estimate(policy, reference, estimator, straight_through)
        (gradient,) = torch.autograd.grad((policy.exp().detach() * estimate).sum(), logits)
        assert torch.allclose(gradient, exact) == (straight_through or estimator == "k2")
        if estimator == "k1" and not straight_through:
            torch.testing.assert_close(gradient, torch.zeros(4, dtype=torch.float64))


def test_k3_of_a_token_that_is_far_off_is_limited_and_pulls_no_more():
    logprobs = torch.tensor([-1e4, 0.0, -2.0], requires_grad=True)
    found = kl_estimate(logprobs, torch.tensor([0.0, -1e4, 0.0]), "k3")
    assert found[0] == K3_LIMIT
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert logprobs.grad[0] == 0
    assert logprobs.grad[2] != 0


def verl_kl(logprob: torch.Tensor, ref_logprob: torch.Tensor, name: str) -> torch.Tensor:
    """verl/trainer/ppo/core_algos.py, kl_penalty and kl_penalty_forward, with 0.9.1's treatment of the suffix."""
    if name.endswith("+"):
        backward = 0.5 * (logprob - ref_logprob).square()
        return backward - backward.detach() + verl_kl(logprob, ref_logprob, name[:-1]).detach()
    if name == "kl":
        return logprob - ref_logprob
    if name == "abs":
        return (logprob - ref_logprob).abs()
    if name == "mse":
        return 0.5 * (logprob - ref_logprob).square()
    kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
    return torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)


@pytest.mark.parametrize(("estimator", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")])
@pytest.mark.parametrize("straight_through", [False, True])
def test_values_and_gradients_are_verls(estimator, name, straight_through):
    logprobs, reference = pairs(200)
    reference = logprobs.detach() + 8 * (reference - logprobs.detach())  # some beyond k3's limit
    both = (
        kl_estimate(logprobs, reference, estimator, straight_through),
        verl_kl(logprobs, reference, name + "+" * straight_through),
    )
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logprobs)[0] for x in both))


# The adaptive coefficient, by figures worked out by hand.


def test_it_moves_towards_the_target_by_a_fifth_of_the_horizon_at_most():
    assert KLConfig(target=0.6, horizon=1000).next_coefficient(0.1, 0.66, 100) == pytest.approx(0.1 * 1.01)
    assert KLConfig(target=0.6, horizon=1000).next_coefficient(0.1, 0.54, 100) == pytest.approx(0.1 * 0.99)
    assert KLConfig(target=0.6, horizon=1000).next_coefficient(0.1, 60.0, 100) == pytest.approx(0.1 * 1.02)
    assert KLConfig(target=0.6, horizon=1000).next_coefficient(0.1, -9.0, 100) == pytest.approx(0.1 * 0.98)
    assert KLConfig(target=0.6, horizon=1000).next_coefficient(0.1, 0.6, 100) == 0.1


def test_without_a_target_it_is_fixed():
    assert KLConfig(target=None, horizon=1).next_coefficient(0.1, 7.0, 100) == 0.1


@given(st.floats(-100, 100), st.integers(1, 10), st.integers(1, 10_000))
def test_a_step_of_many_horizons_changes_it_by_a_fifth_and_never_its_sign(kl, horizon, samples):
    # The formula alone gives 1 - 0.2 x samples / horizon, which is below 0 from 5 horizons on.
    assert (
        0.8 * 0.1 - 1e-12
        <= KLConfig(target=0.5, horizon=horizon).next_coefficient(0.1, kl, samples)
        <= 1.2 * 0.1 + 1e-12
    )
