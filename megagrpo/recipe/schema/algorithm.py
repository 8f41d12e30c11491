"""algorithm: from scores to advantages, and what is minimised."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class AdvantageConfig(Section):
    """From scores to advantages. docs/algorithms.md has every formula and source."""

    name: Literal[
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
        "pass_k",
        "gdpo",
        "gae",
    ] = "grpo"
    """grpo: (score - mean of the group) / (standard deviation of the group + epsilon). rloo: score - mean of the
    others. opo: score - length-weighted mean. remax: score - that of the greedy response. gdpo: each reward function
    normalised apart. gae: with a critic (PPO)."""

    standard_deviation: Literal["sample", "population", "none"] = "sample"
    """For grpo, gdpo and pass_k. sample: n - 1; population: n; none: only subtract (Dr.GRPO)."""

    epsilon: NonNegativeFloat = 1e-6
    """Added to the standard deviation that advantages are divided by."""

    discount: Fraction = 1.0
    """For gae and reinforce_plus_plus: weight of a reward one token later (gamma)."""

    trace: Annotated[float, Field(ge=0, le=1)] = 1.0
    """For gae: how far rewards replace the critic's estimates (lambda). 0: by one token, TD(0)."""


class PolicyLossConfig(Section):
    """What is minimised, per token. docs/algorithms.md has every formula and source."""

    name: Literal["ppo_clip", "gspo", "cispo", "gmpo", "sapo", "clip_cov", "kl_cov", "reinforce"] = "ppo_clip"
    """ppo_clip: min(r A, clip(r) A). gspo: the same with the ratio of whole sequences. cispo: the clipped ratio as a
    constant weight. gmpo: geometric mean of ratios. sapo: soft gates. clip_cov, kl_cov: tokens of high covariance are
    left out or held back. reinforce: no ratio at all (also GPG)."""

    clip_low: NonNegativeFloat = 0.2
    """Ratios are clipped at 1 - clip_low. (gmpo: at exp(-clip_low), by token.)"""

    clip_high: NonNegativeFloat = 0.2
    """Ratios are clipped at 1 + clip_high. (gmpo: at exp(clip_high), by token.)"""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For ppo_clip and clip_cov: with a negative advantage A the loss is at most dual_clip x |A|. null: no bound."""

    temperature_positive: PositiveFloat = 1.0
    """For sapo: steepness of the gate where the advantage is positive."""

    temperature_negative: PositiveFloat = 1.05
    """For sapo: steepness of the gate where it is not."""

    covariance_share: Fraction = 2e-4
    """For clip_cov and kl_cov: share of a minibatch's tokens that are chosen, at least one token."""

    covariance_low: float = 1.0
    """For clip_cov: covariances from here on may be chosen."""

    covariance_high: float = 5.0
    """For clip_cov: up to here."""

    covariance_kl: PositiveFloat = 1.0
    """For kl_cov: weight of the penalty |log ratio| on the chosen tokens."""


class KLConfig(Section):
    """Penalty for leaving the reference policy."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 switches the reference policy off altogether."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Per-token estimate from the two logprobs (http://joschu.net/blog/kl-approx.html); k3 is the low-variance one."""

    straight_through: bool = False
    """In the loss: the estimator's value with the gradient of k2, which is that of the true divergence."""

    placement: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: subtracted from each sample's score before the advantages, token by token where
    the advantages are."""

    target: PositiveFloat | None = None
    """Adapt the coefficient, step by step, towards this divergence in nats per token (arXiv:1909.08593, section 2.2).
    null: fixed."""

    horizon: PositiveInt = 10000
    """Samples after which an adaptive coefficient may have changed by a fifth."""


class ReferenceConfig(Section):
    """The policy that the KL penalty is against: the starting weights, unless it follows."""

    update_every_steps: PositiveInt | None = None
    """Steps after which the reference moves towards the policy. null: never."""

    share: Fraction = 1.0
    """How far it moves: 1 copies the policy, less averages (Polyak)."""


class RejectionConfig(Section):
    """Tokens or whole responses left out because trainer and engine disagree on them: outside of [low, high]."""

    level: Literal["token", "sequence"]
    """token: each by itself. sequence: all tokens of a response, by their `over`."""

    statistic: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """Of log r = train - rollout logprob. ratio: r itself; k1: -log r; k2: (log r)^2 / 2; k3: r - 1 - log r."""

    over: Literal["sum", "mean", "max"] = "mean"
    """For level: sequence: how a response's tokens become one number. The ratio is exp of the sum, mean or largest
    log r."""

    low: float | None = None
    """Smallest value that stays; null: no bound."""

    high: float | None = None
    """Largest value that stays; null: no bound."""


class CorrectionConfig(Section):
    """For what engines sample a little differently from what the trainer computes: importance weights, train over
    rollout probability, on the policy's loss.
    """

    weights: Literal["token", "sequence"] | None = None
    """By token, or the product over the response for all its tokens. null: no weights."""

    low: NonNegativeFloat = 0.0
    """Lower bound of the weights. 0: none, only large weights are bounded."""

    high: PositiveFloat = 2.0
    """Upper bound of the weights."""

    outside: Literal["truncate", "zero"] = "truncate"
    """Weights outside of the bounds. truncate: set to the bound (TIS). zero: set to 0: with low above 0 it is IcePop
    (arXiv:2510.18855: low 0.5, high 5), with low 0 only large weights are masked."""

    normalize: bool = False
    """Divide the weights by their mean over the minibatch: over its tokens, or its responses for weights: sequence,
    without those left out."""

    reject: list[RejectionConfig] = []
    """What is left out of the loss and of its denominators."""

    veto: PositiveFloat | None = None
    """Leave out every response with a token whose train over rollout probability is below this. null: none."""


class CriticConfig(Section):
    """The value model of PPO: the same architecture with a value head, on the same ranks."""

    path: str | None = None
    """Model directory to start from; the default is model.path. Its value head is new unless the files have one."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate. Everything else is as in train.optimizer, min_lr in proportion."""

    value_clip: PositiveFloat | None = 0.5
    """New values are compared as if they moved from the old by at most this. null: not clipped."""

    warmup_steps: NonNegativeInt = 0
    """First steps of the run in which only the critic learns. The policy's learning rate schedule begins after them."""


class AlgorithmConfig(Section):
    """The objective."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How advantages are made from scores."""

    loss: PolicyLossConfig = PolicyLossConfig()
    """The policy's loss."""

    kl: KLConfig = KLConfig()
    """Penalty against the reference policy."""

    reference: ReferenceConfig = ReferenceConfig()
    """Whether the reference policy follows."""

    critic: CriticConfig | None = None
    """For advantage: gae only."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """From losses per token to one number, over a whole minibatch. token_mean: over all response tokens. seq_mean_...:
    over responses, of each one's sum, mean, or sum divided by aggregation_divisor (Dr.GRPO)."""

    aggregation_divisor: PositiveFloat | None = None
    """For seq_mean_token_sum_norm; the default is rollout.response_tokens_max."""

    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction between engines and trainer."""

    rollout_logprobs_as_old: bool = False
    """Ratios are to the engines' logprobs; the trainer's own old logprobs are not computed."""

    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a step's samples. Must divide prompts_per_step x samples_per_prompt."""

    epochs: PositiveInt = 1
    """Passes over a step's samples."""

    skip_groups_without_signal: bool = True
    """Leave out groups whose advantages are all zero. They add no policy gradient, but they leave the denominators as
    well: every mean is over the other groups, so the policy gradient is larger, by total over kept, than with them in
    (not for token_sum, which has none).
    Their KL and entropy terms are left out too. No effect where advantages are not made by group, for gpg (its factor
    makes up for them, so they stay), or if the KL penalty is in the reward. They are counted either way."""
