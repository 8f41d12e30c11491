"""A step's batch on the training ranks: what is sent, and the passes over it before the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megagrpo.algorithm.advantage import AdvantageInputs
from megagrpo.algorithm.ragged import ragged_zeros
from megagrpo.batching.rank_batches import RankBatch, make_rank_batches
from megagrpo.recipe.passes import kl_in_reward, needs_old_logprobs, policy_learns
from megagrpo.trainer.run import Run
from megagrpo.trainer.sequences import train_sequences
from megagrpo.types import Group


def load_batch(run: Run, groups: Sequence[Group], rows: np.ndarray, step: int) -> list[RankBatch]:
    """Sends the chosen rows (bool [rows]) to the training ranks and has them compute what logprobs the recipe needs.

    Returns what was sent, one batch per data rank; nothing if no row was chosen.
    """
    sequences = train_sequences(groups, rows)
    if not sequences:
        return []
    recipe, policy = run.recipe, run.policy
    batches = make_rank_batches(
        sequences,
        layout=recipe.train.layout.parallel(),
        minibatches=recipe.algorithm.minibatches,
        tokens_per_microbatch=recipe.train.tokens_per_microbatch,
        seed=recipe.seed + step,
        work=run.work,
    )
    policy.load_batch(batches)
    algorithm = recipe.algorithm
    if not policy_learns(algorithm, step) and not kl_in_reward(algorithm):
        return batches
    if algorithm.rollout_logprobs_as_old:
        policy.use_rollout_logprobs_as_old()
    elif needs_old_logprobs(algorithm):
        policy.compute_old_logprobs()
    if algorithm.kl.coefficient > 0:
        policy.compute_reference_logprobs()
    return batches


def with_kl_and_values(run: Run, inputs: AdvantageInputs, kl_coefficient: float, *, loaded: bool) -> AdvantageInputs:
    """Adds what the ranks know of every response token. loaded: whether they have a batch; else it is all zeros."""
    algorithm, policy = run.recipe.algorithm, run.policy
    nothing = ragged_zeros(inputs.tokens)
    if kl_in_reward(algorithm):
        kl = policy.token_kl(inputs.tokens) if loaded else nothing
        inputs = replace(inputs, kl=kl, kl_coefficient=kl_coefficient)
    if algorithm.critic is not None:
        if loaded:
            policy.compute_values()
        inputs = replace(inputs, values=policy.token_values(inputs.tokens) if loaded else nothing)
    return inputs
