"""Advantages against formulas written out group by group, and of single tokens response by response."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.advantage_method import AdvantageInputs
from megagrpo.algorithm.advantages import AdvantageConfig
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.algorithm.token_advantages import token_energy
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from tests.methods import advantage, names

NAN = np.nan
WEIGHTS = np.array([1.0, 0.5])
BY_GROUP = [name for name in names(AdvantageConfig) if name not in ("gae", "remax", "reinforce_plus_plus")]
BY_RESPONSE = [name for name in BY_GROUP if name != "otb"]
SCALED = ("grpo", "gdpo", "pass_k")
WHITENED = ("reinforce_plus_plus_baseline", "gdpo")

sixteenths = st.integers(-160, 160).map(lambda n: n / 16)
rows = st.tuples(st.one_of(st.just(NAN), sixteenths), sixteenths, st.integers(0, 4), st.integers(1, 9))
steps = st.lists(rows, min_size=1, max_size=30).map(
    lambda step: tuple(np.array(column) for column in zip(*step, strict=True))
)


def advantages_of(name, scores, ids, tokens=None, second=None, kl=None, coefficient=0.0, **options):
    """Advantages by row, and the ids of the groups that teach something."""
    scores, ids = np.asarray(scores, float), np.asarray(ids)
    tokens = np.ones(len(scores), int) if tokens is None else np.asarray(tokens)
    parts = np.stack([scores, scores if second is None else second], 1) if name == "gdpo" else None
    inputs = AdvantageInputs(scores, ids, tokens, parts, WEIGHTS, kl=kl, kl_coefficient=coefficient)
    method = advantage(name=name, **(options if name in SCALED else {}))
    result = method.advantages(inputs)
    assert (result.of_tokens, result.returns) == (None, None)
    return result.of_rows, set(ids[method.teaches(inputs)].tolist())


# The formulas, with loops over groups.


def spread(values, deviation, epsilon):
    return 1.0 if deviation == "none" else np.std(values, ddof=deviation == "sample") + epsilon


def group_formula(name, values, tokens, deviation, epsilon):
    """Advantages of one group with two scored samples or more, before anything that is over the whole step."""
    n, mean = len(values), values.mean()
    if name == "grpo":
        return (values - mean) / spread(values, deviation, epsilon)
    if name == "rloo":
        return np.array([values[i] - np.delete(values, i).mean() for i in range(n)])
    if name == "opo":
        return values - np.average(values, weights=tokens)
    if name == "pass_k":
        second, best = np.sort(values)[-2:]
        gain = (best - second) / spread(values, deviation, epsilon)
        return np.array([gain if value == best else 0.0 for value in values])
    return values - mean


def whiten(values, tokens):
    every_token = np.repeat(values, tokens)
    if len(every_token) < 2:
        return np.zeros_like(values)
    return (values - every_token.mean()) / np.sqrt(every_token.var(ddof=1) + 1e-8)


def one_group_at_a_time(name, scores, second, ids, tokens, deviation="sample", epsilon=1e-6):
    result, compared, teaching, alike, scored = np.zeros(len(scores)), [], set(), 0, 0
    for group in set(ids.tolist()):
        members = [i for i in range(len(scores)) if ids[i] == group and not np.isnan(scores[i])]
        scored += len(members)
        if len(members) < 2 or len(set(scores[members])) == 1:
            alike += len(members)
        if len(members) < 2:
            continue
        compared += members
        formula, parts = ("grpo", (scores, second)) if name == "gdpo" else (name, (scores,))
        found = [group_formula(formula, part[members], tokens[members], deviation, epsilon) for part in parts]
        result[members] = sum(weight * each for weight, each in zip(WEIGHTS, found, strict=False))
        if any(each.any() for each in found):
            teaching.add(group)
    if name in WHITENED and compared:
        result[compared] = whiten(result[compared], tokens[compared])
    if name == "gpg" and alike < scored:
        result *= scored / (scored - alike)
    return result, teaching


@settings(max_examples=300)
@given(steps, st.sampled_from(sorted(BY_RESPONSE)), st.sampled_from(["sample", "population", "none"]))
def test_every_method_matches_its_formula_written_by_group(step, name, deviation):
    scores, second, ids, tokens = step
    found, teaches = advantages_of(name, scores, ids, tokens, second, standard_deviation=deviation, epsilon=0.01)
    expected, teaching = one_group_at_a_time(name, scores, second, ids, tokens, deviation, epsilon=0.01)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)
    assert teaches == teaching


@pytest.mark.parametrize("name", BY_RESPONSE)
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_scores_are_exactly_zero_although_their_mean_is_not_exact(name, epsilon):
    scores, ids, tokens = np.array([0.1] * 7 + [0.7] * 3), np.array([0] * 7 + [1] * 3), np.arange(3, 13)
    assert scores[:7].mean() != 0.1
    found, teaching = advantages_of(name, scores, ids, tokens, scores * 3, epsilon=epsilon)
    np.testing.assert_array_equal(found, np.zeros(10))
    assert not teaching


# The reward less KL, ReMax, and the names of groups.


def test_kl_in_the_reward_is_subtracted_by_response_before_anything_else():
    kl = Ragged(np.array([0.5, 0.5, 9.0, 2.0, -1.0]), np.array([0, 2, 3, 3, 5]))  # the third row is masked: no tokens
    found, _ = advantages_of("rloo", [1, 0, NAN, 0], [0, 0, 0, 0], [2, 1, 4, 2], kl=kl, coefficient=0.1)
    expected, _ = advantages_of("rloo", [0.9, -0.9, NAN, -0.1], [0, 0, 0, 0])
    np.testing.assert_allclose(found, expected)
    with pytest.raises(ValueError, match="tokens"):
        advantages_of("rloo", [1, 0, 0, 0], [0, 0, 0, 0], [2, 1, 4, 2], kl=kl, coefficient=0.1)


def test_remax_subtracts_the_score_of_the_greedy_response():
    inputs = AdvantageInputs(
        np.array([1.0, NAN, 0.25, 1.0]),
        np.array([7, 3, 3, 5]),
        np.array([1, 1, 1, 1]),
        baselines=np.array([1.0, NAN, 0.5]),
    )
    found = advantage(name="remax").advantages(inputs).of_rows
    np.testing.assert_array_equal(found, [0.5, 0, -0.75, 0])  # the greedy response of prompt 5 has no score


def test_only_methods_that_compare_samples_are_by_group():
    assert [name for name in names(AdvantageConfig) if advantage(name=name).by_group] == BY_GROUP


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("grpo", {"tokens": np.ones(3, int)}),
        ("gdpo", {}),
        ("gdpo", {"parts": np.zeros((2, 1)), "weights": np.ones(1), "kl": ragged_zeros([1, 1])}),
        ("remax", {}),
        ("remax", {"baselines": np.zeros(2)}),
        ("gae", {}),
        ("otb", {}),
    ],
)
def test_missing_inputs_are_refused(name, more):
    inputs = {"scores": np.zeros(2), "group_ids": np.zeros(2, int), "tokens": np.ones(2, int)} | more
    with pytest.raises(ValueError):
        advantage(name=name).advantages(AdvantageInputs(**inputs))


numbers = st.integers(-64, 64).map(lambda n: n / 16)
tokens = st.lists(st.tuples(numbers, numbers), min_size=0, max_size=6)
responses = st.lists(st.tuples(st.one_of(st.just(NAN), numbers), tokens), min_size=1, max_size=8)


def ragged(rows):
    return Ragged(
        np.array([value for row in rows for value in row], float), np.cumsum([0, *map(len, rows)], dtype=np.int64)
    )


def inputs_of(step, coefficient=0.25):
    return AdvantageInputs(
        scores=np.array([score for score, _ in step]),
        group_ids=np.zeros(len(step), int),
        tokens=np.array([len(row) for _, row in step]),
        kl=ragged([[kl for kl, _ in row] for _, row in step]),
        kl_coefficient=coefficient,
        values=ragged([[value for _, value in row] for _, row in step]),
        energy=ragged([[abs(value) for _, value in row] for _, row in step]),
    )


def rewards_of(score, row, coefficient=0.25):
    rewards = [-coefficient * kl for kl, _ in row]
    if rewards:
        rewards[-1] += score
    return rewards


def whiten_all(rows, known):
    """Over the tokens of known rows together; None where a row is masked."""
    everything = [value for row, of_step in zip(rows, known, strict=True) if of_step for value in row]
    if len(everything) < 2:
        return [[0.0] * len(row) for row in rows]
    mean, deviation = np.mean(everything), np.sqrt(np.var(everything, ddof=1) + 1e-8)
    return [
        [(value - mean) / deviation if of_step else 0.0 for value in row]
        for row, of_step in zip(rows, known, strict=True)
    ]


@settings(max_examples=300)
@given(responses, st.sampled_from([1.0, 0.9, 0.25]), st.sampled_from([1.0, 0.95, 0.25]), st.booleans())
def test_tokens_get_whitened_sums_of_what_is_to_come(step, discount, trace, critic):
    """Sums of TD errors for gae; reinforce_plus_plus is the same with values of 0 and a trace of 1."""
    options = {"name": "gae", "trace": trace} if critic else {"name": "reinforce_plus_plus"}
    found = advantage(discount=discount, **options).advantages(inputs_of(step))
    decay = discount * trace if critic else discount
    advantages, returns = [], []
    for score, row in step:
        rewards, values = rewards_of(score, row), [value if critic else 0.0 for _, value in row]
        after = [*values, 0.0][1:]
        errors = [r + discount * later - v for r, later, v in zip(rewards, after, values, strict=True)]
        advantages.append([sum(decay ** (s - t) * errors[s] for s in range(t, len(row))) for t in range(len(row))])
        returns.append([0.0 if np.isnan(score) else a + v for a, v in zip(advantages[-1], values, strict=True)])
    expected = whiten_all(advantages, [not np.isnan(score) for score, _ in step])
    np.testing.assert_allclose(found.of_tokens.values, ragged(expected).values, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.of_rows, [np.mean(row) if row else 0 for row in expected], rtol=1e-6, atol=1e-7)
    assert (found.returns is not None) == critic
    if critic:
        np.testing.assert_allclose(found.returns.values, ragged(returns).values, atol=1e-12)
        np.testing.assert_array_equal(found.returns.offsets, inputs_of(step).values.offsets)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae", "otb"])
def test_only_a_masked_response_may_lack_its_tokens(name):
    step = [(1.0, [(0.5, 0.25), (0.0, 0.5)]), (NAN, [(7.0, 9.0)] * 3), (0.0, [(0.25, 0.125)])]
    found = advantage(name=name).advantages(inputs_of(step))
    lacking = replace(inputs_of([step[0], (NAN, []), step[2]]), tokens=np.array([2, 3, 1]))
    again = advantage(name=name).advantages(lacking)
    np.testing.assert_array_equal(again.of_tokens.values, found.of_tokens.values)
    with pytest.raises(ValueError, match="3"):
        advantage(name=name).advantages(replace(lacking, tokens=np.array([3, 3, 1])))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "otb"])
def test_equal_scores_are_exactly_zero(name):
    step = [(0.1, [(0.0, 0.7)] * length) for length in (3, 1, 4, 2)]
    found = advantage(name=name).advantages(inputs_of(step))
    np.testing.assert_array_equal(found.of_tokens.values, np.zeros(10))
    np.testing.assert_array_equal(found.of_rows, np.zeros(4))


def padded_baselines(returns, weights, mask):
    """A group's baselines as the authors of OTB compute them, from rows padded to one length."""
    sums = np.cumsum(weights * mask, axis=1)
    return (returns * sums * mask).sum(0) / ((sums * mask).sum(0) + 1e-12)


@settings(max_examples=100)
@given(responses, st.data())
def test_otb_weighs_returns_by_the_energy_up_to_each_place(step, data):
    ids = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(step), max_size=len(step))))
    inputs = replace(inputs_of(step), group_ids=ids)
    inputs = replace(inputs, energy=inputs.energy.with_values(inputs.energy.values + 0.25))
    found = advantage(name="otb").advantages(inputs)
    wide = max(len(row) for _, row in step)
    expected = [[0.0] * len(row) for _, row in step]
    for group in set(ids.tolist()):
        members = [i for i, (score, _) in enumerate(step) if ids[i] == group and not np.isnan(score)]
        mask, returns, weights = np.zeros((3, len(members), wide))
        for at, i in enumerate(members):
            score, row = step[i]
            rewards = rewards_of(score, row)
            mask[at, : len(row)] = 1
            returns[at, : len(row)] = [sum(rewards[t:]) for t in range(len(row))]
            weights[at, : len(row)] = [abs(value) + 0.25 for _, value in row]
        baselines = padded_baselines(returns, weights, mask)
        for at, i in enumerate(members):
            for t in range(len(step[i][1])):
                expected[i][t] = returns[at, t] - baselines[t] if mask[:, t].sum() > 1 else 0.0
    np.testing.assert_allclose(found.of_tokens.values, ragged(expected).values, atol=1e-8)
    np.testing.assert_allclose(found.of_rows, [np.mean(row) if row else 0 for row in expected], atol=1e-8)


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.6, 4.0)])
def test_the_energy_of_a_token_is_the_squared_gradient_of_its_logprob_for_the_logits(scale, cap):
    random = torch.Generator().manual_seed(0)
    hidden, matrix = torch.randn(9, 16, generator=random), torch.randn(53, 16, generator=random)
    labels = torch.randint(0, 53, (9,), generator=random)
    logits = scale * hidden.double() @ matrix.double().t()
    logits = ((logits if cap is None else cap * (logits / cap).tanh()) / 0.7).requires_grad_()
    (gradient,) = torch.autograd.grad(logits.log_softmax(-1).gather(1, labels[:, None]).sum(), logits)
    shard = VocabularyShard(53, 0, None)
    logprobs, sharpened = (
        vocabulary_logprobs(
            hidden, torch.arange(9), labels, Head(matrix, shard, HeadScale(scale, cap, temperature)), entropy=False
        )[0]
        for temperature in (0.7, 0.35)
    )
    torch.testing.assert_close(token_energy(logprobs, sharpened).double(), gradient.square().sum(1), rtol=0, atol=3e-6)
