"""Which passes over a step's batch a recipe asks for, besides the update. Pure."""

from __future__ import annotations

from megagrpo.recipe.schema import AlgorithmConfig

BY_COVARIANCE = ("clip_cov", "kl_cov")
"""Losses that choose tokens of a whole minibatch by their old logprobs, before its first gradient."""


def corrects(algorithm: AlgorithmConfig) -> bool:
    """Whether anything corrects for the difference between engine and trainer."""
    correction = algorithm.correction
    return correction.weights is not None or bool(correction.reject) or correction.veto is not None


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether the KL penalty is a part of the reward, not of the loss."""
    return algorithm.kl.placement == "reward" and algorithm.kl.coefficient > 0


def reads_batch(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages are made from what the ranks compute: the KL in the reward, or a critic's values."""
    return kl_in_reward(algorithm) or algorithm.critic is not None


def prepares_by_old_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Whether tokens of a minibatch are weighed or chosen by old logprobs before its first gradient."""
    return corrects(algorithm) or algorithm.loss.name in BY_COVARIANCE


def needs_old_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Whether anything reads the policy's logprobs before the update begins. If not, and with one optimizer step, the
    update's own forward pass gives them."""
    return (
        algorithm.minibatches * algorithm.epochs > 1 or kl_in_reward(algorithm) or prepares_by_old_logprobs(algorithm)
    )


def computes_old_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Whether the ranks pass over the batch for them: not if the engine's are taken for the old ones."""
    return needs_old_logprobs(algorithm) and not algorithm.rollout_logprobs_as_old


def policy_learns(algorithm: AlgorithmConfig, step: int) -> bool:
    """Whether the critic's warm-up, if there is one, is over at `step`."""
    return algorithm.critic is None or step > algorithm.critic.warmup_steps
