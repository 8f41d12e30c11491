"""Rules about the objective: what does nothing, and what makes no sense together, is refused with a remedy."""

import pytest

from megagrpo.algorithm.advantage import METHODS, is_by_group
from megagrpo.algorithm.policy_loss import LOSSES
from megagrpo.recipe.algorithm_checks import ADVANTAGE_READS, LOSS_READS, NOT_BY_GROUP, advantages_by_token
from megagrpo.recipe.checks import recipe_problems
from megagrpo.recipe.rule_problem import given_keys
from megagrpo.recipe.schema import AdvantageConfig, PolicyLossConfig
from tests.unit.test_recipe_checks import assert_speaks, recipe_with

CRITIC = "algorithm.critic={}"
GAE = "algorithm.advantage.name=gae"
TWO_FUNCTIONS = "reward.functions=[{function: gsm8k}, {function: format, arguments: {pattern: a}}]"
WEIGHTS = "algorithm.correction.weights=token"
REJECT = "algorithm.correction.reject.0"

CASES: list[tuple[list[str], str, str]] = [
    (["algorithm.advantage={name: rloo, epsilon: 0.1}"], "algorithm.advantage.epsilon", "grpo, pass_k and gdpo"),
    (
        ["algorithm.advantage={standard_deviation: none, epsilon: 0.5}"],
        "algorithm.advantage.epsilon",
        "with standard_deviation: none",
    ),
    (
        ["algorithm.advantage={name: pass_k, standard_deviation: none, epsilon: 0.5}"],
        "algorithm.advantage.epsilon",
        "write standard_deviation: sample",
    ),
    (
        ["algorithm.advantage={name: gdpo, standard_deviation: none, epsilon: 0.5}", TWO_FUNCTIONS],
        "algorithm.advantage.epsilon",
        "write standard_deviation: sample",
    ),
    (
        ["algorithm.advantage={name: rloo, standard_deviation: none}"],
        "algorithm.advantage.standard_deviation",
        "grpo, pass_k and gdpo",
    ),
    (["algorithm.advantage.trace=0.9"], "algorithm.advantage.trace", "write name: gae"),
    (["algorithm.advantage.discount=0.9"], "algorithm.advantage.discount", "reinforce_plus_plus and gae"),
    (["algorithm.loss={name: gspo, dual_clip: 3.0}"], "algorithm.loss.dual_clip", "ppo_clip and clip_cov"),
    (["algorithm.loss={name: reinforce, clip_high: 0.3}"], "algorithm.loss.clip_high", "with name: reinforce"),
    (["algorithm.loss.covariance_kl=2.0"], "algorithm.loss.covariance_kl", "write name: kl_cov"),
    (["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt", "at least 2"),
    (["algorithm.advantage.epsilon=0"], "algorithm.advantage.epsilon", "above 0"),
    (["algorithm.advantage={epsilon: 0, standard_deviation: population}"], "algorithm.advantage.epsilon", "above 0"),
    (["algorithm.advantage.name=remax", "rollout.dynamic_sampling={}"], "rollout.dynamic_sampling", "such as grpo"),
    (["algorithm.advantage.name=gdpo"], "algorithm.advantage.name", "at least 2"),
    (
        ["algorithm.advantage.name=gdpo", TWO_FUNCTIONS, "reward.overlong={buffer_tokens: 2}"],
        "reward.overlong",
        "gdpo never forms it",
    ),
    (["algorithm.advantage.name=gdpo", TWO_FUNCTIONS, "reward.non_stop_score=-1"], "reward.non_stop_score", "gdpo"),
    (
        ["algorithm.advantage.name=gdpo", TWO_FUNCTIONS, "algorithm.kl={coefficient: 0.1, placement: reward}"],
        "algorithm.kl.placement",
        "fix: placement: loss",
    ),
    ([GAE], "algorithm.critic", "made from its values"),
    ([CRITIC], "algorithm.critic", "only gae reads its values"),
    ([GAE, "algorithm.critic.warmup_steps=2"], "algorithm.critic.warmup_steps", "2 of 2 steps"),
    (
        [GAE, "algorithm.critic.warmup_steps=1", "train.optimizer.warmup_steps=2"],
        "algorithm.critic.warmup_steps",
        "1 steps, then 2",
    ),
    (["train.offload=[critic]"], "train.offload", "without algorithm.critic"),
    (["algorithm.loss.clip_low=1.5"], "algorithm.loss.clip_low", "at most 1"),
    (
        ["algorithm.loss={name: clip_cov, covariance_low: 5.0}"],
        "algorithm.loss.covariance_low",
        "below covariance_high",
    ),
    (["algorithm.loss.name=kl_cov"], "algorithm.loss.name", "before the policy has moved"),
    ([GAE, CRITIC, "algorithm.loss.name=gmpo"], "algorithm.loss.name", "one advantage for each response"),
    (
        ["algorithm.advantage={name: reinforce_plus_plus, discount: 0.9}", "algorithm.loss.name=gmpo"],
        "algorithm.loss.name",
        "gmpo, with advantages by token",
    ),
    (["algorithm.kl.target=0.1"], "algorithm.kl.target", "adapts by factors"),
    (["algorithm.kl={coefficient: 0.1, horizon: 5}"], "algorithm.kl.horizon", "without a target"),
    (
        ["algorithm.kl={coefficient: 0.1, placement: reward, straight_through: true}"],
        "algorithm.kl.straight_through",
        "no gradient",
    ),
    (["algorithm.kl={coefficient: 0.1, estimator: k1}"], "algorithm.kl.estimator", "whose expectation is 0"),
    (["algorithm.reference.update_every_steps=1"], "algorithm.reference.update_every_steps", "a reference policy"),
    (["algorithm.kl.coefficient=0.1", "algorithm.reference.share=0.5"], "algorithm.reference.share", "never moves"),
    (["algorithm.aggregation_divisor=8.0"], "algorithm.aggregation_divisor", "seq_mean_token_sum_norm"),
    (
        ["algorithm.rollout_logprobs_as_old=true", WEIGHTS],
        "algorithm.rollout_logprobs_as_old",
        "every weight would be 1",
    ),
    (
        ["algorithm.rollout_logprobs_as_old=true", "algorithm.loss.name=reinforce"],
        "algorithm.rollout_logprobs_as_old",
        "write correction: {weights: token}",
    ),
    (
        ["algorithm.rollout_logprobs_as_old=true", "algorithm.loss.name=reinforce", "algorithm.kl.coefficient=0.1"],
        "algorithm.rollout_logprobs_as_old",
        "has no ratio",
    ),
    (["algorithm.correction.high=3.0"], "algorithm.correction.high", "without weights"),
    (["algorithm.correction.low=0.5"], "algorithm.correction.low", "without weights"),
    (["algorithm.correction.outside=zero"], "algorithm.correction.outside", "without weights"),
    (["algorithm.correction.normalize=true"], "algorithm.correction.normalize", "write weights: token"),
    ([WEIGHTS, "algorithm.correction.high=0.5"], "algorithm.correction.high", "bounds around 1"),
    ([WEIGHTS, "algorithm.correction.low=1.5"], "algorithm.correction.low", "bounds around 1"),
    (["algorithm.correction.veto=1.0"], "algorithm.correction.veto", "below 1"),
    (["algorithm.correction.reject=[{level: token}]"], f"{REJECT}.high", "at least one bound"),
    (["algorithm.correction.reject=[{level: token, high: 0.5}]"], f"{REJECT}.high", "bounds around 1"),
    (["algorithm.correction.reject=[{level: token, low: 0.1, statistic: k1}]"], f"{REJECT}.low", "bounds around 0"),
    (["algorithm.correction.reject=[{level: token, over: sum, high: 2.0}]"], f"{REJECT}.over", "level: sequence"),
    (["reward.functions.0.weight=0"], "reward.functions", "only weights of 0"),
    (["reward.functions.0.counts=when_others_score"], "reward.functions", "one that always counts"),
    (["reward.overlong={buffer_tokens: 17}"], "reward.overlong.buffer_tokens", "at most 16"),
    (["reward.non_stop_score=-1", "reward.truncated=mask"], "reward.non_stop_score", "have no score"),
]


@pytest.mark.parametrize(("overrides", "field", "words"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_what_cannot_work_is_refused_with_a_remedy(overrides: list[str], field: str, words: str) -> None:
    (problem,) = recipe_problems(recipe_with(*overrides))
    assert_speaks(problem, field, words)


@pytest.mark.parametrize(
    "overrides",
    [
        [GAE, CRITIC, "rollout.samples_per_prompt=1", "algorithm.critic.warmup_steps=1", "train.offload=[critic]"],
        ["algorithm.advantage={name: gae, trace: 0.0}", CRITIC],  # TD(0)
        ["algorithm.advantage.name=remax", "rollout.samples_per_prompt=1"],
        ["algorithm.advantage={name: reinforce_plus_plus, discount: 0.9}", "algorithm.loss.name=gspo"],
        ["algorithm.advantage.name=reinforce_plus_plus", "algorithm.loss.name=gmpo"],
        ["algorithm.advantage.name=gdpo", TWO_FUNCTIONS, "algorithm.kl.coefficient=0.1"],
        ["algorithm.loss={name: gmpo, clip_low: 1.5, clip_high: 1.5}"],
        ["algorithm.loss={name: cispo, clip_low: 1.0}"],
        ["algorithm.loss={name: kl_cov, covariance_kl: 2.0}", "algorithm.minibatches=2"],
        ["algorithm.loss={name: clip_cov, dual_clip: 3.0}"],
        ["algorithm.kl={coefficient: 0.1, estimator: k1, straight_through: true, target: 0.1, horizon: 5}"],
        ["algorithm.kl={coefficient: 0.1, estimator: k1, placement: reward}"],
        ["algorithm.kl={coefficient: 0.1}", "algorithm.reference={update_every_steps: 2, share: 0.5}"],
        ["algorithm.kl.estimator=k1"],  # switched off by its coefficient
        ["algorithm.aggregation=seq_mean_token_sum_norm", "algorithm.aggregation_divisor=8.0"],
        ["algorithm.correction={weights: token, low: 0.5, high: 2.0, outside: zero, veto: 1e-4}"],
        ["algorithm.correction.reject=[{level: sequence, over: max, statistic: k2, high: 0.1}]"],
        [WEIGHTS, "algorithm.correction.outside=zero"],  # only large weights are masked
        ["algorithm.rollout_logprobs_as_old=true", "algorithm.minibatches=2"],
        [
            "algorithm.rollout_logprobs_as_old=true",
            "algorithm.loss.name=reinforce",
            "algorithm.kl={coefficient: 0.1, placement: reward}",  # reads the old logprobs
        ],
        ["rollout.dynamic_sampling={}", "data.no_resampling_pass_rate=0.9", "reward.overlong={buffer_tokens: 16}"],
    ],
)
def test_sensible_combinations_are_accepted(overrides: list[str]) -> None:
    assert recipe_problems(recipe_with(*overrides)) == []


def test_the_tables_know_every_name_and_every_setting() -> None:
    assert set(ADVANTAGE_READS) == set(METHODS)
    assert set(LOSS_READS) == set(LOSSES)
    assert {name for name in METHODS if not is_by_group(name)} == set(NOT_BY_GROUP)
    for section, reads in ((AdvantageConfig, ADVANTAGE_READS), (PolicyLossConfig, LOSS_READS)):
        assert {key for keys in reads.values() for key in keys} == set(section.model_fields) - {"name"}


def test_only_these_give_the_tokens_of_a_response_advantages_of_their_own() -> None:
    by_token = [name for name in METHODS if advantages_by_token(recipe_with(f"algorithm.advantage.name={name}"))]
    assert by_token == ["gae"]
    assert advantages_by_token(recipe_with("algorithm.advantage={name: reinforce_plus_plus, discount: 0.9}"))


def test_keys_that_differ_from_their_defaults_are_given() -> None:
    assert given_keys(PolicyLossConfig(clip_low=0.2, clip_high=0.3)) == ["clip_high"]
