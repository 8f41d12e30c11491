"""Credit by turn against loops over turns in float64, and worked examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from megagrpo.algorithm.advantage_method import AdvantageInputs, Advantages
from megagrpo.algorithm.credit import CreditConfig, CreditMethod, Turns
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.step import advantage_inputs, load, turns_of, with_signal
from megagrpo.types import AgentRun, Branch, Group, Prompt, Sample, Score, Turn
from tests.methods import advantage
from tests.step_fakes import make_run
from tests.tiny_run import recipe_with

EPSILON = 1e-6
AGENT = "agent={tools: [python]}"

rewards = st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 4))
scores = st.one_of(st.none(), st.integers(-4, 4).map(lambda n: n / 4))
turn = st.tuples(st.integers(1, 4), rewards)
rollouts = st.tuples(scores, st.lists(turn, max_size=5), st.randoms(use_true_random=False))
steps = st.lists(st.lists(rollouts, min_size=1, max_size=4), min_size=1, max_size=4)


def credit(**settings: Any) -> CreditMethod:
    return TypeAdapter(CreditConfig).validate_python(settings)


def groups_of(step: list[list[Any]]) -> list[Group]:
    """Turns lie in the order of their tokens, with numbers of another order that skips some."""
    groups = []
    for number, of_group in enumerate(step):
        samples, values = [], []
        for index, (score, turns, random) in enumerate(of_group):
            numbers = random.sample(range(10), len(turns))
            tokens = np.zeros(sum(count for count, _ in turns), np.int32)
            made = tuple(Turn(n, 0, count, reward) for n, (count, reward) in zip(numbers, turns, strict=True))
            run = AgentRun((Branch(tokens, np.ones(len(tokens), bool)),), made, ())
            samples.append(Sample("p", index, tokens, tokens.astype(np.float32), tokens, "stop", "", run))
            values.append(Score(score))
        groups.append(Group(Prompt(f"p{number}", (1,), "", ""), tuple(samples), tuple(values)))
    return groups


def found(groups: list[Group], method: CreditMethod, **settings: Any) -> Advantages:
    recipe = recipe_with(AGENT, f"algorithm.credit={method.name}")
    return method.advantages(advantage(**settings), advantage_inputs(recipe, groups), turns_of(recipe, groups))


# --- loops ------------------------------------------------------------------------------------------------------------


def in_time(sample: Sample, score: Score) -> list[tuple[Turn, float]]:
    """A rollout's turns in the order of time, each with its reward; the score is the last one's."""
    turns = sorted(sample.agent.turns, key=lambda each: each.number) if sample.agent else []
    last = len(turns) - 1
    return [(each, (each.reward or 0.0) + (score.value if at == last else 0.0)) for at, each in enumerate(turns)]


def summed(values: list[float], discount: float) -> list[float]:
    return [sum(discount ** (j - k) * values[j] for j in range(k, len(values))) for k in range(len(values))]


def normalized(values: list[float], own: float) -> float:
    """GRPO's; 0 for a value without another to compare it with."""
    return (own - np.mean(values)) / (np.std(values, ddof=1) + EPSILON) if len(values) > 1 else 0.0


def looped(groups: list[Group], name: str, discount: float, of: str) -> list[list[float]]:
    """Advantages of all tokens, row by row."""
    rows = []
    for group in groups:
        known = [(s, v) for s, v in zip(group.samples, group.scores, strict=True) if v.value is not None]
        rewards = {sample.index: [reward for _, reward in in_time(sample, value)] for sample, value in known}
        returns = {index: summed(own, discount) for index, own in rewards.items()}
        compared = rewards if of == "rewards" else returns
        together = [value for own in compared.values() for value in own]
        for sample in group.samples:
            tokens: list[float] = []
            if sample.index in compared:
                own = compared[sample.index]
                if name == "turn_groups":
                    of_turn = [[r[k] for r in returns.values() if len(r) > k] for k in range(len(own))]
                    values = [normalized(of_turn[k], own[k]) for k in range(len(own))]
                else:
                    values = [normalized(together, value) for value in own]
                values = summed(values, discount) if of == "rewards" else values
                order = sorted(each.number for each in sample.agent.turns)
                for each in sample.agent.turns:
                    tokens += [values[order.index(each.number)]] * each.tokens
            rows.append(tokens or [0.0] * len(sample.tokens))
    return rows


@given(
    steps,
    st.sampled_from([("discounted", "returns"), ("discounted", "rewards"), ("turn_groups", "returns")]),
    st.sampled_from([1.0, 0.5]),
)
def test_turns_get_what_loops_over_them_give(step: list[list[Any]], way: tuple[str, str], discount: float) -> None:
    name, of = way
    groups = groups_of(step)
    method = credit(name=name, discount=discount, **({"normalized": of} if name == "discounted" else {}))
    result = found(groups, method, name="grpo", epsilon=EPSILON)
    wanted = looped(groups, name, discount, of)
    assert result.of_tokens is not None
    for row, tokens in enumerate(wanted):
        # A standard deviation of rounding errors is not one of 0, but for ours.
        np.testing.assert_allclose(result.of_tokens.row(row), tokens, rtol=1e-6, atol=1e-7)
        assert result.of_rows[row] == pytest.approx(np.mean(tokens) if tokens else 0.0, abs=1e-7)
    differ = [any(abs(value) > 1e-9 for value in tokens) for tokens in wanted]
    assert result.taught.tolist() == differ


@given(steps, st.sampled_from(["discounted", "turn_groups"]), st.sampled_from(["grpo", "rloo", "opo", "gpg"]))
def test_of_one_turn_without_a_reward_of_its_own_it_is_the_outcome(
    step: list[list[Any]], name: str, advantage_name: str
) -> None:
    alone = [[(score, [(sum(count for count, _ in turns) + 1, None)], r) for score, turns, r in of] for of in step]
    groups = groups_of(alone)
    outcome = found(groups, credit(name="outcome"), name=advantage_name)
    by_turn = found(groups, credit(name=name), name=advantage_name)
    np.testing.assert_allclose(by_turn.of_rows, outcome.of_rows, atol=1e-12)


def test_a_worked_example() -> None:
    """Two rollouts of one prompt: a good call and a right answer; a bad call, a good one, and a wrong answer."""
    turns = Turns(
        np.array([0, 0, 1, 1, 1]), np.array([0, 1, 0, 1, 2]), np.ones(5, int), np.array([0.5, 0, -0.5, 0.5, 0])
    )
    inputs = AdvantageInputs(np.array([1.0, 0.0]), np.array([0, 0]), np.array([2, 3]))
    plain = advantage(name="grpo", standard_deviation="none")

    def of(**settings: Any) -> list[float]:
        result = credit(**settings).advantages(plain, inputs, turns)
        assert result.of_tokens is not None
        return result.of_tokens.values.tolist()

    # Returns with a discount of 0.5: 1, 1 and -0.25, 0.5, 0; their mean is 0.45.
    assert of(name="discounted", discount=0.5) == pytest.approx([0.55, 0.55, -0.7, 0.05, -0.45])
    assert of(name="turn_groups", discount=0.5) == pytest.approx([0.625, 0.25, -0.625, -0.25, 0])
    # Rewards: 0.5, 1 and -0.5, 0.5, 0; their mean is 0.3.
    assert of(name="discounted", normalized="rewards") == pytest.approx([0.9, 0.7, -0.9, -0.1, -0.3])


@pytest.mark.parametrize("name", ["discounted", "turn_groups"])
def test_turns_that_are_missing_or_do_not_fit_are_an_error(name: str) -> None:
    inputs = AdvantageInputs(np.array([1.0, 0.0]), np.array([0, 0]), np.array([2, 3]))
    short = Turns(np.array([0, 1]), np.array([0, 0]), np.array([2, 2]), np.zeros(2))
    for turns in (None, short):
        with pytest.raises(ValueError, match="turns"):
            credit(name=name).advantages(advantage(name="grpo"), inputs, turns)


# --- in a step --------------------------------------------------------------------------------------------------------


def test_a_group_of_equal_scores_teaches_by_what_its_turns_were_given() -> None:
    def rollout(index: int, *turn_rewards: float) -> Sample:
        tokens = np.zeros(len(turn_rewards), np.int32)
        turns = tuple(Turn(at, 0, 1, reward) for at, reward in enumerate(turn_rewards))
        run = AgentRun((Branch(tokens, np.ones(len(tokens), bool)),), turns, ())
        return Sample("p", index, tokens, tokens.astype(np.float32), tokens, "stop", "", run)

    def group(name: str, *samples: Sample) -> Group:
        return Group(Prompt(name, (1,), "", ""), samples, tuple(Score(1.0) for _ in samples))

    # As much in all, at other times: the rows' means are equal, the turns are not.
    groups = [group("same", rollout(0, 1, 0), rollout(1, 1, 0)), group("other", rollout(0, 1, 0), rollout(1, 0, 1))]
    names: dict[str, list[str]] = {"outcome": [], "turn_groups": ["other"], "discounted": ["same", "other"]}
    for name, taught in names.items():
        recipe = recipe_with(AGENT, f"algorithm.credit={name}")
        assert [each.prompt.id for each in with_signal(groups, recipe)] == taught
        run = make_run(AGENT, f"algorithm.credit={name}", scores=lambda prompt: ())
        loaded = load(run, Sampled(groups, groups), 1, 0.0)
        assert run.policy.rows == [row for row in range(4) if ("same", "other")[row // 2] in taught]
        assert (loaded.advantages.of_tokens is not None) == (name != "outcome")
