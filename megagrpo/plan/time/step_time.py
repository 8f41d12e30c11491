"""How long a step takes: its phases, and what each is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from megagrpo.algorithm.advantage import is_by_group
from megagrpo.layout.parallel import RankCoordinates
from megagrpo.plan.assumptions import Assumptions, lengths_of
from megagrpo.plan.machines import A_CPU, Machines
from megagrpo.plan.memory.engine import engine_memory
from megagrpo.plan.memory.models import model_memory
from megagrpo.plan.time.rollout import Engine, rollout_seconds
from megagrpo.plan.time.seconds import PhaseTime, Seconds, StepTime, added
from megagrpo.plan.time.training import Batch, TrainingRanks
from megagrpo.plan.time.weight_sync import sync_seconds
from megagrpo.recipe.defaults import dtype_name, plan_devices, total_steps
from megagrpo.recipe.passes import computes_old_logprobs, reads_batch
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.families.architecture import Architecture, critic_of

ON_DRIVER = ("gsm8k",)
"""Reward functions that run on the driver (reward/functions.py); the others run in reward.workers."""

FIRST_RANK = RankCoordinates(rank=0, tensor=0, pipeline=0, context=0, data=0, expert=0, expert_tensor=0, expert_data=0)


def step_time(
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines,
    assumptions: Assumptions,
    critic: Architecture | None = None,
) -> StepTime:
    """Expected seconds of one step, by phase. A sixth phase, driver, is what metrics have between the others.

    For a recipe on CPUs pass `A_CPU`, and believe the result only with calibrated assumptions. Evaluation and
    checkpoints are not in it. `critic` is the model of algorithm.critic.path, if it is another.
    """
    if isinstance(recipe, SftRecipe):
        return _sft_step(recipe, architecture, machines, assumptions)
    return _grpo_step(recipe, architecture, machines, assumptions, critic or architecture)


def _grpo_step(
    recipe: Recipe, arch: Architecture, machines: Machines, assumed: Assumptions, critic: Architecture
) -> StepTime:
    lengths = lengths_of(recipe, assumed)
    rounds = list(prompts_of_rounds(recipe, assumed.signal_share))
    responses = sum(rounds) * recipe.rollout.samples_per_prompt
    batch = trained_batch(recipe, assumed, sum(rounds))
    item_bytes = _item_bytes(recipe, machines)
    ranks = TrainingRanks(arch, recipe.train, machines, assumed, item_bytes)
    engine = Engine(arch, _engine_tensor(recipe), machines, assumed, item_bytes)
    cache_tokens = _cache_tokens(recipe, arch, machines)
    phases = {
        "rollout": added(*(rollout_seconds(engine, recipe, lengths, prompts, cache_tokens) for prompts in rounds)),
        "reward": _reward(recipe, assumed, responses),
        "logprobs": _logprobs(recipe, ranks, critic, batch),
        "update": _update(recipe, ranks, critic, batch),
        "weight_sync": sync_seconds(recipe, arch, machines, assumed, item_bytes),
        "driver": _driver(recipe, arch, assumed, responses, critic),
    }
    return _step(recipe, phases, assumed, responses * lengths.sequence)


def _sft_step(recipe: SftRecipe, arch: Architecture, machines: Machines, assumed: Assumptions) -> StepTime:
    lengths, examples = lengths_of(recipe, assumed), recipe.data.examples_per_step
    tokens = examples * lengths.sequence
    batch = Batch(examples, tokens, examples * lengths.sequence_square, tokens)
    ranks = TrainingRanks(arch, recipe.train, machines, assumed, _item_bytes(recipe, machines))
    phases = {"update": ranks.update_seconds(batch), "driver": _driver(recipe, arch, assumed, examples)}
    return _step(recipe, phases, assumed, tokens)


def _step(recipe: AnyRecipe, phases: Mapping[str, Seconds], assumed: Assumptions, tokens: float) -> StepTime:
    factors = {phase: getattr(assumed, f"{phase}_factor") for phase in phases}
    times = tuple(
        PhaseTime(phase, tuple((name, spent * factors[phase]) for name, spent in seconds.items() if spent > 0))
        for phase, seconds in phases.items()
    )
    known = assumed.epoch_rows is not None or recipe.train.total_epochs is None
    steps = total_steps(recipe, math.ceil(assumed.epoch_rows or 0)) if known else None
    return StepTime(times, tokens, plan_devices(recipe, "cuda").bundles, steps)


def prompts_of_rounds(recipe: Recipe, signal_share: float) -> Iterator[int]:
    """Prompts of every round of a step: one, or as many as dynamic sampling needs if that share has signal.

    As trainer/step.py: each round samples as many as bring the rest, and never more than a step's.
    """
    wanted, dynamic = recipe.rollout.prompts_per_step, recipe.rollout.dynamic_sampling
    yield wanted
    missing = wanted * (1 - signal_share)
    for _ in range(1, dynamic.rounds_max if dynamic else 1):
        if missing < 0.5:
            return
        prompts = min(wanted, math.ceil(missing / signal_share)) if signal_share else wanted
        yield prompts
        missing -= prompts * signal_share


def trained_batch(recipe: Recipe, assumed: Assumptions, prompts: int) -> Batch:
    """What the update passes over in one epoch, if `prompts` prompts were sampled."""
    algorithm, rollout, lengths = recipe.algorithm, recipe.rollout, lengths_of(recipe, assumed)
    groups = float(rollout.prompts_per_step)
    # As trainer/step.py: gpg's factor makes up for groups without signal, so they stay.
    by_group = is_by_group(algorithm.advantage.name) and algorithm.advantage.name != "gpg"
    skips = algorithm.skip_groups_without_signal and by_group and not reads_batch(algorithm)
    if skips or rollout.dynamic_sampling:
        groups = min(groups, prompts * assumed.signal_share)
    sequences = groups * rollout.samples_per_prompt
    return Batch(
        sequences, sequences * lengths.sequence, sequences * lengths.sequence_square, sequences * lengths.response
    )


def _reward(recipe: Recipe, assumed: Assumptions, responses: float) -> Seconds:
    functions = [entry.function for entry in recipe.reward.functions]
    isolated = sum(function not in ON_DRIVER for function in functions)
    return {
        "on the driver": responses * assumed.reward_seconds * (len(functions) - isolated),
        "in workers": responses * assumed.isolated_reward_seconds * isolated / max(1, recipe.reward.workers),
    }


def _logprobs(recipe: Recipe, ranks: TrainingRanks, critic: Architecture, batch: Batch) -> Seconds:
    algorithm = recipe.algorithm
    seconds = {"sending the batch": batch.sequences * ranks.assumptions.send_seconds_per_response}
    if computes_old_logprobs(algorithm):
        seconds |= _of("old", ranks.forward_seconds(batch))
    if algorithm.kl.coefficient > 0:
        seconds |= _of("reference", ranks.forward_seconds(batch))
    if algorithm.critic is not None:
        seconds |= _of("values", _critic_ranks(ranks, critic).forward_seconds(batch))
    return seconds


def _update(recipe: Recipe, ranks: TrainingRanks, critic: Architecture, batch: Batch) -> Seconds:
    algorithm = recipe.algorithm
    minibatch = batch.share(1 / algorithm.minibatches)
    times = algorithm.minibatches * algorithm.epochs
    seconds = {name: spent * times for name, spent in ranks.update_seconds(minibatch).items()}
    if algorithm.critic is not None:
        of_critic = _critic_ranks(ranks, critic).update_seconds(minibatch)
        seconds |= _of("critic", {name: spent * times for name, spent in of_critic.items()})
    return seconds


def _critic_ranks(ranks: TrainingRanks, critic: Architecture) -> TrainingRanks:
    """The same ranks with the critic's model, which is never trained by adapters."""
    return replace(ranks, arch=critic_of(critic), train=ranks.train.model_copy(update={"lora": None}))


def _of(what: str, seconds: Seconds) -> Seconds:
    return {f"{what}: {name}": spent for name, spent in seconds.items()}


def _driver(
    recipe: AnyRecipe, arch: Architecture, assumed: Assumptions, responses: float, critic: Architecture | None = None
) -> Seconds:
    seconds = {"bookkeeping": assumed.driver_seconds + responses * assumed.driver_seconds_per_response}
    if isinstance(recipe, Recipe) and recipe.train.offload:
        held = model_memory(arch, recipe, FIRST_RANK, "cuda", critic).parts()
        # Gradients are not copied: they come back as zeros.
        moved = sum(size for name, size in held.items() if name in recipe.train.offload and name != "gradients")
        seconds["to the host and back"] = 2 * moved / assumed.host_bytes_per_second
    return seconds


def _item_bytes(recipe: AnyRecipe, machines: Machines) -> int:
    return ITEM_BYTES[dtype_name(recipe, _device(machines))]


def _device(machines: Machines) -> str:
    return "cpu" if machines.gpu.name == A_CPU.gpu.name else "cuda"


def _engine_tensor(recipe: Recipe) -> int:
    return 1 if recipe.rollout.engine == "transformers" else recipe.rollout.layout.tensor


def _cache_tokens(recipe: Recipe, arch: Architecture, machines: Machines) -> float:
    """Tokens whose keys and values one engine holds."""
    if recipe.rollout.engine != "sglang" or _device(machines) == "cpu":
        return math.inf
    return engine_memory(recipe, arch, machines.gpu.memory_bytes, "cuda").cache_tokens
