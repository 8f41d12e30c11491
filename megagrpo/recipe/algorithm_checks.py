"""Rules between fields about the objective: what belongs together, and what would silently do nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from megagrpo.recipe.passes import kl_in_reward
from megagrpo.recipe.rule_problem import RuleProblem, broken, given_keys
from megagrpo.recipe.schema import AdvantageConfig, PolicyLossConfig, Recipe

NOT_BY_GROUP = ("reinforce_plus_plus", "remax", "gae")
"""Advantages that do not compare the samples of a prompt: a single sample per prompt is enough."""

ADVANTAGE_READS: Mapping[str, tuple[str, ...]] = {
    "grpo": ("standard_deviation", "epsilon"),
    "rloo": (),
    "reinforce_plus_plus": ("discount",),
    "reinforce_plus_plus_baseline": (),
    "remax": (),
    "opo": (),
    "gpg": (),
    "pass_k": ("standard_deviation", "epsilon"),
    "gdpo": ("standard_deviation", "epsilon"),
    "gae": ("discount", "trace"),
}
LOSS_READS: Mapping[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "sapo": ("temperature_positive", "temperature_negative"),
    "clip_cov": ("clip_low", "clip_high", "dual_clip", "covariance_share", "covariance_low", "covariance_high"),
    "kl_cov": ("covariance_share", "covariance_kl"),
    "reinforce": (),
}
"""By name, the settings that it reads. Any other that differs from its default would silently do nothing."""


def _unread(recipe: Recipe) -> Iterator[RuleProblem]:
    algorithm = recipe.algorithm
    sections: tuple[tuple[str, AdvantageConfig | PolicyLossConfig, Mapping[str, tuple[str, ...]]], ...] = (
        ("advantage", algorithm.advantage, ADVANTAGE_READS),
        ("loss", algorithm.loss, LOSS_READS),
    )
    for name, section, reads in sections:
        for key in given_keys(section, except_for=("name", *reads[section.name])):
            readers = [reader for reader, keys in reads.items() if key in keys]
            yield broken(
                f"algorithm.{name}.{key}",
                reads=(f"algorithm.{name}.name",),
                given=f"{getattr(section, key)}, with name: {section.name}",
                needed=f"nothing: it is for {_listed(readers)}",
                fix=f"remove it, or write name: {readers[0]}",
            )


def _advantage(recipe: Recipe) -> Iterator[RuleProblem]:
    advantage, rollout = recipe.algorithm.advantage, recipe.rollout
    if rollout.samples_per_prompt < 2 and advantage.name not in NOT_BY_GROUP:
        yield broken(
            "rollout.samples_per_prompt",
            reads=("algorithm.advantage.name",),
            given=f"{rollout.samples_per_prompt}, with algorithm.advantage.name: {advantage.name}",
            needed="at least 2: this advantage compares the samples of one prompt; that of a single one is always 0",
            fix=f"samples_per_prompt: 8, or one of {_listed(NOT_BY_GROUP)}",
        )
    reads_epsilon = "epsilon" in ADVANTAGE_READS[advantage.name]
    if reads_epsilon and advantage.standard_deviation == "none" and given_keys(advantage, only=("epsilon",)):
        yield broken(
            "algorithm.advantage.epsilon",
            reads=("algorithm.advantage.standard_deviation", "algorithm.advantage.name"),
            given=f"{advantage.epsilon}, with standard_deviation: none",
            needed="nothing: it is added to a standard deviation, and advantages are divided by none",
            fix="remove it, or write standard_deviation: sample",
        )
    if reads_epsilon and advantage.standard_deviation != "none" and advantage.epsilon == 0:
        yield broken(
            "algorithm.advantage.epsilon",
            reads=("algorithm.advantage.standard_deviation", "algorithm.advantage.name"),
            given=f"0 with standard_deviation: {advantage.standard_deviation}",
            needed="above 0: a group with equal scores has a standard deviation of 0",
            fix="epsilon: 1e-6",
        )
    if rollout.dynamic_sampling and advantage.name in NOT_BY_GROUP:
        yield broken(
            "rollout.dynamic_sampling",
            reads=("algorithm.advantage.name",),
            given=f"given, with algorithm.advantage.name: {advantage.name}",
            needed="an advantage that compares the samples of one prompt: with this one, equal scores teach too",
            fix="remove it, or write another advantage, such as grpo",
        )
    if advantage.name == "gdpo":
        yield from _gdpo(recipe)


def _gdpo(recipe: Recipe) -> Iterator[RuleProblem]:
    reward, kl = recipe.reward, recipe.algorithm.kl
    if len(reward.functions) < 2:
        yield broken(
            "algorithm.advantage.name",
            reads=("reward.functions",),
            given="gdpo with one reward function",
            needed="at least 2: it normalises each function apart; of one function it is grpo, whitened",
            fix="name: grpo",
        )
    given = {
        "reward.overlong": reward.overlong is not None,
        "reward.non_stop_score": reward.non_stop_score is not None,
        "algorithm.kl.placement": kl.coefficient > 0 and kl.placement == "reward",
    }
    for field in (field for field, is_given in given.items() if is_given):
        yield broken(
            field,
            reads=("algorithm.advantage.name", "algorithm.kl.coefficient"),
            given="given, with algorithm.advantage.name: gdpo",
            needed="nothing that changes the sum of all rewards: gdpo never forms it",
            fix="placement: loss" if field == "algorithm.kl.placement" else "remove it, or write another advantage",
        )


def _critic(recipe: Recipe) -> Iterator[RuleProblem]:
    algorithm, steps = recipe.algorithm, recipe.train.total_steps
    critic, name = algorithm.critic, algorithm.advantage.name
    if name == "gae" and critic is None:
        yield broken(
            "algorithm.critic",
            reads=("algorithm.advantage.name",),
            given="no critic, with algorithm.advantage.name: gae",
            needed="a critic: gae is made from its values",
            fix="critic: {lr: 1e-5}",
        )
    if critic is not None and name != "gae":
        yield broken(
            "algorithm.critic",
            reads=("algorithm.advantage.name",),
            given=f"a critic, with algorithm.advantage.name: {name}",
            needed="nothing: only gae reads its values",
            fix="remove it, or write advantage: {name: gae}",
        )
    if critic is not None and steps is not None and critic.warmup_steps >= steps:
        yield broken(
            "algorithm.critic.warmup_steps",
            reads=("train.total_steps",),
            given=f"{critic.warmup_steps} of {steps} steps in all",
            needed="less than train.total_steps: the policy learns nothing before",
            fix="lower it",
        )
    warmup = recipe.train.optimizer.warmup_steps
    if critic is not None and steps is not None and critic.warmup_steps < steps < critic.warmup_steps + warmup:
        yield broken(
            "algorithm.critic.warmup_steps",
            reads=("train.total_steps", "train.optimizer.warmup_steps"),
            given=f"{critic.warmup_steps} steps, then {warmup} of the learning rate's warm-up, of {steps} in all",
            needed="together at most train.total_steps: the policy's warm-up begins when the critic's is over",
            fix="lower one of them",
        )


def _loss(recipe: Recipe) -> Iterator[RuleProblem]:
    algorithm, loss = recipe.algorithm, recipe.algorithm.loss
    reads = LOSS_READS[loss.name]
    if loss.clip_low > 1 and "clip_low" in reads and loss.name != "gmpo":  # gmpo's bounds are on log ratios
        yield broken(
            "algorithm.loss.clip_low",
            reads=("algorithm.loss.name",),
            given=f"{loss.clip_low}",
            needed="at most 1: a ratio is never below 0",
            fix="clip_low: 1.0",
        )
    if "covariance_low" in reads and loss.covariance_low >= loss.covariance_high:
        yield broken(
            "algorithm.loss.covariance_low",
            reads=("algorithm.loss.covariance_high",),
            given=f"{loss.covariance_low}, with covariance_high {loss.covariance_high}",
            needed="below covariance_high: tokens are chosen between them",
            fix="lower it",
        )
    if loss.name == "reinforce" and algorithm.rollout_logprobs_as_old and not kl_in_reward(algorithm):
        yield broken(
            "algorithm.rollout_logprobs_as_old",
            reads=("algorithm.loss.name", "algorithm.kl.coefficient", "algorithm.kl.placement"),
            given="true, with loss: {name: reinforce}",
            needed="false: this loss has no ratio, so nothing would read the old logprobs or be corrected by them",
            fix="remove it, and write correction: {weights: token}",
        )
    if loss.name == "kl_cov" and algorithm.minibatches * algorithm.epochs == 1:
        yield broken(
            "algorithm.loss.name",
            reads=("algorithm.minibatches", "algorithm.epochs"),
            given="kl_cov with one optimizer step for each batch",
            needed="at least 2: its penalty, |log ratio|, has no gradient before the policy has moved",
            fix="minibatches: 2",
        )
    if loss.name == "gmpo" and advantages_by_token(recipe):
        yield broken(
            "algorithm.loss.name",
            reads=("algorithm.advantage.name", "algorithm.advantage.discount", "algorithm.kl.placement"),
            given=f"gmpo, with advantages by token ({algorithm.advantage.name})",
            needed="one advantage for each response: the geometric mean over it is bounded on the side of its sign",
            fix="name: ppo_clip or gspo, or an advantage such as grpo",
        )


def advantages_by_token(recipe: Recipe) -> bool:
    """Whether the tokens of one response may have different advantages."""
    advantage = recipe.algorithm.advantage
    return advantage.name == "gae" or (
        advantage.name == "reinforce_plus_plus" and (advantage.discount < 1 or kl_in_reward(recipe.algorithm))
    )


def _kl(recipe: Recipe) -> Iterator[RuleProblem]:
    kl, reference = recipe.algorithm.kl, recipe.algorithm.reference
    if kl.target is not None and kl.coefficient == 0:
        yield broken(
            "algorithm.kl.target",
            reads=("algorithm.kl.coefficient",),
            given=f"{kl.target}, with coefficient 0",
            needed="a coefficient above 0 to start from: it adapts by factors",
            fix="coefficient: 0.001",
        )
    if kl.target is None and given_keys(kl, only=("horizon",)):
        yield broken(
            "algorithm.kl.horizon",
            reads=("algorithm.kl.target",),
            given=f"{kl.horizon}, without a target",
            needed="nothing: the coefficient is fixed",
            fix="remove it, or give a target",
        )
    if kl.straight_through and kl.placement == "reward":
        yield broken(
            "algorithm.kl.straight_through",
            reads=("algorithm.kl.placement",),
            given="true, with placement: reward",
            needed="false: a reward has no gradient",
            fix="remove it, or write placement: loss",
        )
    if kl.coefficient > 0 and kl.placement == "loss" and kl.estimator == "k1" and not kl.straight_through:
        yield broken(
            "algorithm.kl.estimator",
            reads=("algorithm.kl.coefficient", "algorithm.kl.placement", "algorithm.kl.straight_through"),
            given="k1 in the loss",
            needed="another: the gradient of k1 is the score function, whose expectation is 0 whatever the divergence",
            fix="estimator: k3, straight_through: true, or placement: reward",
        )
    if reference.update_every_steps is not None and kl.coefficient == 0:
        yield broken(
            "algorithm.reference.update_every_steps",
            reads=("algorithm.kl.coefficient",),
            given=f"{reference.update_every_steps}, with algorithm.kl.coefficient 0",
            needed="a reference policy: there is none without a KL penalty",
            fix="remove it, or give a coefficient",
        )
    if reference.update_every_steps is None and given_keys(reference, only=("share",)):
        yield broken(
            "algorithm.reference.share",
            reads=("algorithm.reference.update_every_steps",),
            given=f"{reference.share}, without update_every_steps",
            needed="nothing: the reference never moves",
            fix="remove it, or write update_every_steps: 1",
        )


def _aggregation(recipe: Recipe) -> Iterator[RuleProblem]:
    algorithm = recipe.algorithm
    if algorithm.aggregation_divisor is not None and algorithm.aggregation != "seq_mean_token_sum_norm":
        yield broken(
            "algorithm.aggregation_divisor",
            reads=("algorithm.aggregation",),
            given=f"{algorithm.aggregation_divisor}, with aggregation: {algorithm.aggregation}",
            needed="nothing: it is for seq_mean_token_sum_norm",
            fix="remove it, or write aggregation: seq_mean_token_sum_norm",
        )


def _reward(recipe: Recipe) -> Iterator[RuleProblem]:
    reward, longest = recipe.reward, recipe.rollout.response_tokens_max
    if all(function.weight == 0 for function in reward.functions):
        yield broken(
            "reward.functions",
            given="only weights of 0",
            needed="a reward that differs between samples",
            fix="weight: 1.0",
        )
    if all(function.counts == "when_others_score" for function in reward.functions):
        yield broken(
            "reward.functions",
            given="only functions with counts: when_others_score",
            needed="one that always counts, whose score the others wait for",
            fix="counts: always",
        )
    if reward.overlong and reward.overlong.buffer_tokens > longest:
        yield broken(
            "reward.overlong.buffer_tokens",
            reads=("rollout.response_tokens_max",),
            given=f"{reward.overlong.buffer_tokens}, and responses of up to {longest} tokens",
            needed=f"at most {longest}",
            fix="lower it, or raise rollout.response_tokens_max",
        )
    if reward.non_stop_score is not None and reward.truncated == "mask":
        yield broken(
            "reward.non_stop_score",
            reads=("reward.truncated",),
            given=f"{reward.non_stop_score}, with truncated: mask",
            needed="nothing: masked responses have no score",
            fix="remove it, or write truncated: score",
        )


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


ALGORITHM_RULES: tuple[Callable[[Recipe], Iterator[RuleProblem]], ...] = (
    _unread,
    _advantage,
    _critic,
    _loss,
    _kl,
    _aggregation,
    _reward,
)
