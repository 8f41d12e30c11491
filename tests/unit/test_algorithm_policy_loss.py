"""Losses of the policy and of the critic against formulas written out in float64 numpy, and finite differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megagrpo.algorithm.critic import explained_variance, value_loss
from megagrpo.algorithm.policy_losses import PolicyInputs, PolicyLossConfig, PolicyLossMethod
from tests.methods import loss, names, part_of, sequences_of
from tests.rank_threads import SumOverRanks, on_threads

LENGTHS = [1, 7, 3, 12, 5, 2]
SETTINGS = {
    "ppo_clip": loss(name="ppo_clip", clip_low=0.2, clip_high=0.3, dual_clip=1.5),
    "gspo": loss(name="gspo", clip_low=0.1, clip_high=0.15),
    "cispo": loss(name="cispo", clip_low=0.2, clip_high=0.3),
    "gmpo": loss(name="gmpo", clip_low=0.3, clip_high=0.4),
    "sapo": loss(name="sapo", temperature_positive=0.8, temperature_negative=1.3),
    "dppo_tv": loss(name="dppo_tv", clip_low=0.1, clip_high=0.05),
    "dppo_kl": loss(name="dppo_kl", clip_low=0.05, clip_high=0.02),
    "clip_cov": loss(name="clip_cov", clip_low=0.2, clip_high=0.3),
    "kl_cov": loss(name="kl_cov", covariance_kl=0.7),
    "reinforce": loss(name="reinforce"),
}
every_loss = pytest.mark.parametrize("name", SETTINGS)


def random_inputs(lengths: list[int] = LENGTHS, seed: int = 0) -> PolicyInputs:
    """Ratios outside of all bounds on both sides; one advantage for each response, of both signs."""
    random = torch.Generator().manual_seed(seed)
    sequences, tokens = sequences_of(lengths), sum(lengths)
    logprobs = -torch.randn(tokens, generator=random, dtype=torch.float64).abs()
    shift = sequences.of_tokens(0.25 * torch.randn(len(lengths), generator=random, dtype=torch.float64))
    noise = 0.4 * torch.randn(tokens, generator=random, dtype=torch.float64)
    return PolicyInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=(logprobs.detach() + shift + noise).clamp(max=-1e-4),
        advantages=sequences.of_tokens(torch.randn(len(lengths), generator=random, dtype=torch.float64)),
        sequences=sequences,
        chosen=torch.rand(tokens, generator=random) < 0.3,
    )


def weights_of(inputs: PolicyInputs) -> torch.Tensor:
    """Every response counts the same."""
    return inputs.sequences.of_tokens(1 / inputs.sequences.tokens.double()) / len(inputs.sequences.tokens)


def written_out(
    name: str, inputs: PolicyInputs, logprobs: np.ndarray, s: PolicyLossMethod, base: np.ndarray | None = None
) -> np.ndarray:
    """Each token's loss, response by response and with cases. `base`: logprobs in what has no gradient."""
    base = logprobs if base is None else base
    old, advantages, index = (x.numpy() for x in (inputs.old_logprobs, inputs.advantages, inputs.sequences.index))
    losses = np.empty(len(logprobs))
    for response in sorted(set(index.tolist())):
        rows = np.flatnonzero(index == response)
        mean = (logprobs[rows] - old[rows]).mean()
        if name == "gmpo":
            kept = [
                min(logprobs[t] - old[t], s.clip_high) if advantages[t] > 0 else max(logprobs[t] - old[t], -s.clip_low)
                for t in rows
            ]
            mean = float(np.mean(kept))
        for t in rows:
            a, ratio = advantages[t], np.exp(logprobs[t] - old[t])
            if name == "gspo":
                ratio = np.exp(mean)
            if name in ("ppo_clip", "gspo", "clip_cov"):
                loss = -a * (min(ratio, 1 + s.clip_high) if a > 0 else max(ratio, 1 - s.clip_low))
                if name == "ppo_clip" and a < 0:
                    loss = min(loss, -s.dual_clip * a)
                if name == "clip_cov" and inputs.chosen[t]:
                    loss = 0.0
            elif name == "cispo":
                loss = -min(max(np.exp(base[t] - old[t]), 1 - s.clip_low), 1 + s.clip_high) * a * logprobs[t]
            elif name == "gmpo":
                loss = -np.exp(mean) * a
            elif name == "sapo":
                tau = s.temperature_positive if a > 0 else s.temperature_negative
                loss = -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
            elif name.startswith("dppo"):
                loss = -a * ratio * stays(name, np.exp(base[t]), np.exp(old[t]), a, s)
            elif name == "kl_cov":
                loss = -a * ratio + (s.covariance_kl * abs(logprobs[t] - old[t]) if inputs.chosen[t] else 0)
            else:
                loss = -a * logprobs[t]
            losses[t] = loss
    return losses


def stays(name: str, p: float, q: float, advantage: float, s: PolicyLossMethod) -> bool:
    """The masks of DPPO, as its authors' code writes them."""
    if name == "dppo_tv":
        return p - q <= s.clip_high if advantage > 0 else p - q >= -s.clip_low
    binary_kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    if advantage > 0:
        return binary_kl <= s.clip_high or p <= q
    return binary_kl <= s.clip_low or p >= q


@every_loss
@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 99))
def test_losses_are_those_of_the_formulas_response_by_response(name, lengths, seed):
    inputs = random_inputs(lengths, seed)
    found = SETTINGS[name].of_tokens(inputs)
    logprobs = inputs.logprobs.detach().numpy()
    np.testing.assert_allclose(
        found.loss.detach(), written_out(name, inputs, logprobs, SETTINGS[name]), rtol=1e-12, atol=1e-14
    )
    np.testing.assert_allclose(found.ratio, np.exp(logprobs - inputs.old_logprobs.numpy()), rtol=1e-12)
    assert not found.ratio.requires_grad


@every_loss
def test_gradients_are_finite_differences_of_the_formulas(name):
    inputs = random_inputs(seed=1)
    weights = weights_of(inputs)
    (gradient,) = torch.autograd.grad((weights * SETTINGS[name].of_tokens(inputs).loss).sum(), inputs.logprobs)
    base, step = inputs.logprobs.detach().numpy(), 1e-6
    for t in range(len(base)):
        moved = [base.copy(), base.copy()]
        moved[0][t] -= step
        moved[1][t] += step
        low, high = (weights.numpy() @ written_out(name, inputs, x, SETTINGS[name], base) for x in moved)
        assert gradient[t].item() == pytest.approx((high - low) / (2 * step), rel=1e-5, abs=1e-9), t


@every_loss
def test_responses_that_lie_on_two_ranks_have_the_same_loss_and_gradient(name):
    inputs = random_inputs(seed=4)
    whole = SETTINGS[name].of_tokens(inputs)
    (gradient,) = torch.autograd.grad((weights_of(inputs) * whole.loss).sum(), inputs.logprobs)

    def run(rank: int, sum_over_ranks: SumOverRanks) -> None:
        here = slice(rank, None, 2)
        logprobs = inputs.logprobs.detach()[here].requires_grad_()
        part = part_of(inputs.sequences, rank, 2, sum_over_ranks)
        found = SETTINGS[name].of_tokens(
            PolicyInputs(logprobs, inputs.old_logprobs[here], inputs.advantages[here], part, inputs.chosen[here])
        )
        torch.testing.assert_close(found.loss, whole.loss[here], rtol=1e-12, atol=1e-14)
        (own,) = torch.autograd.grad((weights_of(inputs)[here] * found.loss).sum(), logprobs)
        torch.testing.assert_close(own, gradient[here], rtol=1e-12, atol=1e-14)

    on_threads(2, run)


@every_loss
def test_before_the_policy_has_moved_every_gradient_is_that_of_the_policy(name):
    inputs = random_inputs()
    inputs = replace(inputs, old_logprobs=inputs.logprobs.detach(), chosen=torch.zeros_like(inputs.chosen))
    (gradient,) = torch.autograd.grad(SETTINGS[name].of_tokens(inputs).loss.sum(), inputs.logprobs)
    torch.testing.assert_close(gradient, -inputs.advantages)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "dppo_tv", "dppo_kl"])
def test_tokens_without_a_gradient_are_those_that_a_bound_cut(name):
    inputs = random_inputs([6] * 60, seed=3)
    found = SETTINGS[name].of_tokens(inputs)
    (gradient,) = torch.autograd.grad(found.loss.sum(), inputs.logprobs)
    assert found.clipped_low.any()
    assert found.clipped_high.any()
    assert torch.equal(gradient == 0, found.clipped_low | found.clipped_high)
    assert not (found.clipped_low & found.clipped_high).any()


@pytest.mark.parametrize(("name", "reached"), [("dppo_tv", 0.4), ("dppo_kl", 0.5 * np.log(0.5**2 / (0.9 * 0.1)))])
def test_a_trust_region_ends_at_its_divergence_and_only_on_the_side_of_the_advantage(name, reached):
    """A probability of 0.5 rises to 0.9 or falls to 0.1: both have this total variation, or KL, of two events."""
    probabilities, advantages = torch.tensor([0.9, 0.1] * 2), torch.tensor([1.0, 1.0, -1.0, -1.0])
    inputs = PolicyInputs(probabilities.log(), torch.full((4,), 0.5).log(), advantages, sequences_of([4]))
    for bound, left in ((reached * 1.001, False), (reached * 0.999, True)):
        found = loss(name=name, clip_low=bound, clip_high=bound).of_tokens(inputs)
        assert found.clipped_high.tolist() == [left, False, False, False]
        assert found.clipped_low.tolist() == [False, False, False, left]


def test_cispo_marks_the_tokens_whose_weight_a_bound_changed():
    inputs = random_inputs()
    found = SETTINGS["cispo"].of_tokens(inputs)
    ratio = found.ratio.numpy()
    np.testing.assert_array_equal(found.clipped_low, ratio < 0.8)
    np.testing.assert_array_equal(found.clipped_high, ratio > 1.3)
    (gradient,) = torch.autograd.grad(found.loss.sum(), inputs.logprobs)
    assert (gradient != 0).all()


@every_loss
def test_broken_ratios_stay_finite(name):
    logprobs = torch.tensor([0.0, -1e4, 0.0, -1e4], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, -1e4, 0.0])
    inputs = PolicyInputs(logprobs, old, torch.tensor([-1.0, 1.0, 1.0, -1.0]), sequences_of([1, 1, 1, 1]), old < -1)
    found = SETTINGS[name].of_tokens(inputs)
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_loss_by_covariance_wants_chosen_tokens(name):
    with pytest.raises(ValueError, match="chosen"):
        SETTINGS[name].of_tokens(replace(random_inputs(), chosen=None))


def test_every_loss_of_the_recipe_is_there_and_tested():
    assert names(PolicyLossConfig) == list(SETTINGS)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_token_without_a_weight_has_no_gradient_from_its_response(name):
    inputs = random_inputs([6] * 20, seed=5)
    weights = torch.ones(120, dtype=torch.float64)
    weights[::3] = 0
    (gradient,) = torch.autograd.grad((weights * SETTINGS[name].of_tokens(inputs).loss).sum(), inputs.logprobs)
    assert not gradient[::3].any()
    assert gradient.any()


NUMBERS = st.floats(-4, 4).map(lambda x: round(x, 3))
TOKENS = arrays(np.float64, (3, 12), elements=NUMBERS)
CLIPS = st.sampled_from([None, 0.1, 0.5, 2.0])


def one_token(value: float, old: float, wanted: float, clip: float | None) -> tuple[float, bool]:
    """The formula, a token at a time, and whether the clipped value is the worse one."""
    near = value if clip is None else min(max(value, old - clip), old + clip)
    whole, clipped = (value - wanted) ** 2 / 2, (near - wanted) ** 2 / 2
    return max(whole, clipped), clipped > whole


@given(TOKENS, CLIPS)
def test_the_loss_is_the_worse_of_the_value_and_the_clipped_value(numbers, clip):
    loss, is_clipped = value_loss(*torch.from_numpy(numbers), clip)
    wanted, clipped = zip(*(one_token(*token, clip) for token in numbers.T), strict=True)
    np.testing.assert_allclose(loss.numpy(), wanted, atol=1e-12)
    assert is_clipped.tolist() == list(clipped)


@given(TOKENS, CLIPS)
@settings(max_examples=50)
def test_the_gradient_is_that_of_finite_differences(numbers, clip):
    values, old, returns = numbers
    if clip is not None:  # where the two losses meet there is no gradient
        near = old + np.clip(values - old, -clip, clip)
        assume((np.abs(np.abs(values - old) - clip) > 1e-3).all())
        assume((np.abs(values + near - 2 * returns)[near != values] > 1e-3).all())
    inputs = torch.from_numpy(values).requires_grad_()
    value_loss(inputs, torch.from_numpy(old), torch.from_numpy(returns), clip)[0].sum().backward()
    step = 1e-6
    differences = [
        (one_token(v + step, o, r, clip)[0] - one_token(v - step, o, r, clip)[0]) / (2 * step)
        for v, o, r in zip(values, old, returns, strict=True)
    ]
    np.testing.assert_allclose(inputs.grad.numpy(), differences, atol=1e-7)


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
