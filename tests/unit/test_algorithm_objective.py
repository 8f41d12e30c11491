"""The objective against float64 numpy formulas, finite differences, and what its value must not depend on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.aggregation import sequence_weights
from megagrpo.algorithm.kl import kl_estimate
from megagrpo.algorithm.learning_rate import learning_rate
from megagrpo.algorithm.objective import ObjectiveInputs, ObjectiveSettings, grpo_objective
from megagrpo.algorithm.policy_loss import clipped_policy_loss
from megagrpo.recipe.schema import Optimizer

SETTINGS = ObjectiveSettings(
    clip_low=0.2, clip_high=0.3, kl_coefficient=0.05, kl_estimator="k3", entropy_coefficient=0.01
)


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
    )


def written_out(inputs, settings):
    """The same objective in numpy, with cases instead of min and clip."""
    value = 0.0
    rows = zip(
        *(
            getattr(inputs, name).detach().numpy()
            for name in ("logprobs", "old_logprobs", "advantages", "weights", "entropy", "reference_logprobs")
        ),
        strict=True,
    )
    for logprob, old, advantage, weight, entropy, reference in rows:
        ratio = np.exp(logprob - old)
        if advantage > 0:
            surrogate = min(ratio, 1 + settings.clip_high) * advantage
        else:
            surrogate = max(ratio, 1 - settings.clip_low) * advantage
        kl = np.exp(reference - logprob) - (reference - logprob) - 1
        value += weight * (-surrogate + settings.kl_coefficient * kl - settings.entropy_coefficient * entropy)
    return value


def test_objective_matches_the_formula_in_float64():
    inputs = random_inputs()
    objective = grpo_objective(inputs, SETTINGS)
    assert objective.policy.clipped_low.any()
    assert objective.policy.clipped_high.any()
    assert abs(objective.loss.item() - written_out(inputs, SETTINGS)) < 1e-12


def test_objective_gradients_match_finite_differences():
    inputs = random_inputs()

    def loss(logprobs, entropy):
        changed = ObjectiveInputs(
            logprobs, inputs.old_logprobs, inputs.advantages, inputs.weights, entropy, inputs.reference_logprobs
        )
        return grpo_objective(changed, SETTINGS).loss

    assert torch.autograd.gradcheck(loss, (inputs.logprobs, inputs.entropy), eps=1e-7, atol=1e-8)


def test_clipped_tokens_have_no_gradient_and_only_they_are_marked():
    inputs = random_inputs(200, seed=3)
    policy = clipped_policy_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, 0.2, 0.3)
    (gradient,) = torch.autograd.grad(policy.loss.sum(), inputs.logprobs)
    assert torch.equal(gradient == 0, policy.clipped_low | policy.clipped_high)
    assert not (policy.clipped_low & policy.clipped_high).any()


def test_a_broken_ratio_stays_finite():
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    policy = clipped_policy_loss(logprobs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2)
    kl = kl_estimate(logprobs, torch.tensor([1e4, -1e4]), "k3")
    (policy.loss.sum() + kl.sum()).backward()
    assert torch.isfinite(policy.loss).all()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_estimates_match_their_formulas_and_vanish_for_equal_policies(estimator):
    inputs = random_inputs()
    logprobs, reference = inputs.logprobs.detach(), inputs.reference_logprobs
    log_ratio = (logprobs - reference).numpy()
    expected = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": np.exp(-log_ratio) - 1 + log_ratio,
        "abs": np.abs(log_ratio),
    }[estimator]
    np.testing.assert_allclose(kl_estimate(logprobs, reference, estimator).numpy(), expected, atol=1e-14)
    assert not kl_estimate(logprobs, logprobs, estimator).any()


def test_k1_and_k3_are_unbiased():
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([0.0, 0.4, 1.0, -0.7], dtype=torch.float64), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, estimator)).sum(), exact)


def test_weights_of_both_aggregations_match_nested_means():
    lengths = [3, 1, 5, 0]  # the last sequence has no response token and counts as none
    losses = [np.arange(n) + 1.0 for n in lengths]
    for kind, expected in (
        ("token_mean", np.concatenate(losses).mean()),
        ("sequence_mean", np.mean([x.mean() for x in losses if len(x)])),
    ):
        weights = sequence_weights(np.array(lengths), kind, tokens=9, sequences=3)
        assert abs(sum(w * x.sum() for w, x in zip(weights, losses, strict=True)) - expected) < 1e-12


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_loss_does_not_depend_on_how_sequences_are_packed(lengths, kind, parts, random):
    losses = [np.array([random.uniform(-1, 1) for _ in range(n)]) for n in lengths]
    order = list(range(len(lengths)))
    random.shuffle(order)
    total = 0.0
    for part in range(parts):
        rows = order[part::parts]
        weights = sequence_weights(np.array([lengths[r] for r in rows], int), kind, sum(lengths), len(lengths))
        total += sum(w * losses[r].sum() for w, r in zip(weights, rows, strict=True))
    expected = np.concatenate(losses).mean() if kind == "token_mean" else np.mean([x.mean() for x in losses])
    assert abs(total - expected) < 1e-12


def test_learning_rate_warms_up_then_follows_its_schedule():
    optimizer = Optimizer(lr=1.0, min_lr=0.1, schedule="linear", warmup_steps=4)
    rates = [learning_rate(step, 14, optimizer) for step in range(1, 16)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    np.testing.assert_allclose(np.diff(rates[4:]), -0.09)
    assert abs(rates[14] - 0.1) < 1e-12
    cosine = optimizer.model_copy(update={"schedule": "cosine"})
    assert abs(learning_rate(10, 14, cosine) - 0.55) < 1e-12
    constant = optimizer.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    assert {learning_rate(step, 14, constant) for step in range(1, 15)} == {1.0}
