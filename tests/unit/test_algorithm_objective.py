"""The objective and KL estimates against their formulas and finite differences; the coefficient, the learning rate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algorithm.kl import K3_LIMIT, KLConfig, kl_estimate
from megagrpo.algorithm.optimizer import OptimizerConfig, learning_rate
from megagrpo.algorithm.policy_losses import ObjectiveInputs, PpoClipConfig, grpo_objective
from tests.methods import sequences_of

LOSS, KL = PpoClipConfig(clip_low=0.2, clip_high=0.3), KLConfig()
COEFFICIENTS = {"kl_coefficient": 0.05, "entropy_coefficient": 0.01}


def random_inputs(tokens=40, seed=0):
    """Ratios far outside both bounds, and advantages of both signs."""
    random = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(tokens, generator=random, dtype=torch.float64)

    logprobs = -normal().abs()
    return ObjectiveInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=logprobs.detach() + 0.4 * normal(),
        advantages=normal(),
        weights=torch.rand(tokens, generator=random, dtype=torch.float64) / tokens,
        entropy=normal().abs().requires_grad_(),
        reference_logprobs=logprobs.detach() + 0.5 * normal(),
        sequences=sequences_of([5] * (tokens // 5)),
        importance=torch.rand(tokens, generator=random, dtype=torch.float64) * 2,
    )


@pytest.mark.parametrize("weighed", [True, False])
def test_objective_is_the_weighted_sum_of_its_terms(weighed):
    inputs = random_inputs() if weighed else replace(random_inputs(), importance=None)
    policy = LOSS.of_tokens(inputs).loss * (inputs.importance if weighed else 1)
    kl = kl_estimate(inputs.logprobs, inputs.reference_logprobs, "k3")
    terms = policy + 0.05 * kl - 0.01 * inputs.entropy
    found = grpo_objective(inputs, LOSS, KL, **COEFFICIENTS)
    torch.testing.assert_close(found.loss, inputs.weights @ terms, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.policy_term, inputs.weights * policy.detach(), rtol=0, atol=1e-12)


def test_given_tokens_have_the_divergence_and_no_other_term():
    inputs = random_inputs()
    given = torch.arange(40) % 3 == 0
    divergence = torch.rand(40, dtype=torch.float64).requires_grad_()
    old = inputs.old_logprobs.masked_fill(given, torch.nan)
    mixed = replace(inputs, given=given, old_logprobs=old, divergence=divergence)
    found = grpo_objective(mixed, LOSS, KL, **COEFFICIENTS, divergence_coefficient=0.7)
    alone = grpo_objective(replace(inputs, weights=inputs.weights.where(~given, 0.0)), LOSS, KL, **COEFFICIENTS)
    torch.testing.assert_close(found.loss, alone.loss + 0.7 * inputs.weights @ divergence, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.policy_term, alone.policy_term)
    gradients = torch.autograd.grad(found.loss, (inputs.logprobs, inputs.entropy, divergence))
    wanted = (*torch.autograd.grad(alone.loss, (inputs.logprobs, inputs.entropy)), 0.7 * inputs.weights)
    for gradient, of_alone in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, of_alone, rtol=0, atol=1e-12)


def test_objective_gradients_match_finite_differences():
    inputs = random_inputs()

    def loss(logprobs, entropy):
        return grpo_objective(replace(inputs, logprobs=logprobs, entropy=entropy), LOSS, KL, **COEFFICIENTS).loss

    assert torch.autograd.gradcheck(loss, (inputs.logprobs, inputs.entropy), eps=1e-7, atol=1e-8)


def test_kl_is_estimated_without_a_coefficient_and_refused_without_a_reference():
    inputs = random_inputs()
    free = COEFFICIENTS | {"kl_coefficient": 0.0}
    assert grpo_objective(inputs, LOSS, KL, **free).kl is not None
    assert grpo_objective(replace(inputs, reference_logprobs=None), LOSS, KL, **free).kl is None
    with pytest.raises(ValueError, match="reference"):
        grpo_objective(replace(inputs, reference_logprobs=None), LOSS, KL, **COEFFICIENTS)


def test_a_straight_through_kl_changes_the_gradient_and_not_the_value():
    inputs = random_inputs()
    settings = [KLConfig(straight_through=on) for on in (False, True)]
    plain, straight = (grpo_objective(inputs, LOSS, kl, **COEFFICIENTS).loss for kl in settings)
    torch.testing.assert_close(plain, straight)
    gradients = [torch.autograd.grad(loss, inputs.logprobs)[0] for loss in (plain, straight)]
    ratio = inputs.reference_logprobs - inputs.logprobs.detach()
    torch.testing.assert_close(gradients[1] - gradients[0], inputs.weights * 0.05 * (-ratio + torch.expm1(ratio)))


def test_learning_rate_warms_up_then_follows_its_schedule():
    optimizer = OptimizerConfig(lr=1.0, min_lr=0.1, schedule="linear", warmup_steps=4)
    rates = [learning_rate(step, 14, optimizer) for step in range(1, 16)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    np.testing.assert_allclose(np.diff(rates[4:]), -0.09)
    assert abs(rates[14] - 0.1) < 1e-12
    cosine = optimizer.model_copy(update={"schedule": "cosine"})
    assert abs(learning_rate(10, 14, cosine) - 0.55) < 1e-12
    constant = optimizer.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    assert {learning_rate(step, 14, constant) for step in range(1, 15)} == {1.0}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_estimates_are_those_of_the_formulas_with_their_gradients_or_straight_through_with_that_of_k2(estimator):
    inputs = random_inputs()
    logprobs, reference = inputs.logprobs, inputs.reference_logprobs
    log_ratio = logprobs.detach() - reference
    expected = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": torch.exp(-log_ratio) - 1 + log_ratio,
        "abs": log_ratio.abs(),
    }[estimator]
    for straight_through in (False, True):
        found = kl_estimate(logprobs, reference, estimator, straight_through)
        torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-14)
        assert not kl_estimate(logprobs, logprobs, estimator, straight_through).any()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), logprobs, eps=1e-7, atol=1e-7)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    torch.testing.assert_close(gradient, log_ratio)


def test_k3_of_a_token_that_is_far_off_is_limited_and_pulls_as_at_the_limit():
    logprobs = torch.tensor([-1e4, 0.0, -2.6, -2.62, -2.0, 0.0], requires_grad=True)
    found = kl_estimate(logprobs, torch.tensor([0.0, -1e4, 0.0, 0.0, 0.0, -math.inf]), "k3")
    found.sum().backward()
    assert found.tolist() == pytest.approx(
        [K3_LIMIT, K3_LIMIT, math.exp(2.6) - 3.6, K3_LIMIT, math.exp(2) - 3, K3_LIMIT]
    )
    assert logprobs.grad.tolist() == pytest.approx(
        [-12.61, 1, 1 - math.exp(2.6), -12.61, 1 - math.exp(2), 1], rel=1e-3
    ), "the slope is -expm1(d), and that of the limit beyond it"


@pytest.mark.parametrize("rollout", [math.nan, math.inf])
def test_a_token_that_is_left_out_reaches_neither_loss_nor_gradient_whatever_its_old_logprob(rollout):
    inputs = random_inputs()
    weights = inputs.weights.clone()
    weights[3] = 0
    without = replace(inputs, weights=weights)
    old = inputs.old_logprobs.clone()
    old[3] = rollout
    losses = [
        grpo_objective(given, LOSS, KL, **COEFFICIENTS).loss for given in (without, replace(without, old_logprobs=old))
    ]
    assert torch.equal(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss, inputs.logprobs)[0] for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1])


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
