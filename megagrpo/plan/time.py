"""Estimated seconds of a step, by phase and by the parts of each phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megagrpo.algorithm.distillation import FullVocabularyConfig
from megagrpo.plan.assumptions import Assumptions, Lengths
from megagrpo.plan.case import Case
from megagrpo.plan.communication import LinkUse, Seconds, added, sync_time
from megagrpo.plan.engine import EngineSpeed
from megagrpo.plan.memory import model_parts
from megagrpo.plan.other_models import heads_again, offloaded_bytes
from megagrpo.plan.training_time import FORWARD, BatchSize, TrainingRanks, training_products
from megagrpo.recipe.defaults import prompts_of_round, total_steps
from megagrpo.recipe.reward_functions import executor_of
from megagrpo.recipe.schema import Recipe, SftRecipe
from megagrpo.weights.families.architecture import critic_of

POINTS = 24
"""Intervals of the sum over time at the end of a batch."""
HALVINGS = 40
"""Bisection steps of the search for the number of answers that are decoded at once."""


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase of a step. `phase` is rollout, reward, logprobs, update or weight_sync, as in the metrics
    seconds/PHASE; or driver, the time between them."""

    phase: str
    parts: Seconds

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> list[tuple[str, float]]:
        """Returns its parts, the longest first."""
        return sorted(self.parts.items(), key=lambda part: part[1], reverse=True)


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one step. `tokens` are the prompt and response tokens of its samples."""

    phases: tuple[PhaseTime, ...]
    tokens: float
    gpus: int
    steps: int | None  # None: the recipe counts epochs, and the rows of one are not known
    sync: tuple[LinkUse, ...] = ()
    """The bytes and seconds of the weight sync, by kind of link; empty if weights are transferred by disk."""

    scheduled: float | None = None
    """Seconds of a step under the recipe's schedule (plan/schedules.py), unless one phase follows the other."""

    @cached_property
    def phase_seconds(self) -> float:
        """Returns the seconds of all phases, one after the other."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def seconds(self) -> float:
        return self.phase_seconds if self.scheduled is None else self.scheduled

    def of(self, *names: str) -> float:
        """Returns the seconds of these phases together."""
        return sum(phase.seconds for phase in self.phases if phase.phase in names)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus

    @property
    def pipeline_bubble(self) -> float:
        """Returns the share of the update in which pipeline stages wait for one another."""
        waits = sum(phase.parts.get("pipeline bubble", 0.0) for phase in self.phases if phase.phase == "update")
        return waits / self.of("update")

    @property
    def days(self) -> float | None:
        return None if self.steps is None else self.steps * self.seconds / 86400


def step_time(case: Case, training: Mapping[str, Seconds] | None = None) -> StepTime:
    """Returns the expected seconds of one step, without evaluation and checkpoints. `training` is the result of
    `training_phases`, if it is known already."""
    recipe, assumed = case.recipe, case.assumptions
    phases, links = dict(training or training_phases(case)), tuple[LinkUse, ...]()
    if isinstance(recipe, SftRecipe):
        samples = float(recipe.data.examples_per_step)
    else:
        rounds, by = list(prompts_of_rounds(case)), Sampling.of(case)
        samples = float(sum(rounds) * recipe.rollout.samples_per_prompt)
        # All samples of a prompt are on one engine: the one that has most to do.
        of_rounds = (rollout_seconds(by, case.lengths, math.ceil(prompts / by.engines)) for prompts in rounds)
        phases = {"rollout": added(*of_rounds), "reward": _reward(recipe, assumed, samples), **phases}
        phases["weight_sync"], links = sync_time(case)
    phases["driver"] = _driver(case, samples)
    times = []
    for phase, seconds in phases.items():
        factor = getattr(assumed, f"{phase}_factor")
        times.append(PhaseTime(phase, {name: spent * factor for name, spent in seconds.items() if spent > 0}))
    known = assumed.epoch_rows is not None or recipe.train.total_epochs is None
    steps = total_steps(recipe, math.ceil(assumed.epoch_rows or 0)) if known else None
    return StepTime(tuple(times), samples * case.lengths.sequence, case.device_plan.bundles, steps, links)


# --- rollout ---------------------------------------------------------------------------------------------------------


def prompts_of_rounds(case: Case) -> Iterator[int]:
    """Yields the prompts of every round of a step: one, or as many as dynamic sampling needs at the signal share."""
    wanted, dynamic, sampled = case.grpo.rollout.prompts_per_step, case.grpo.rollout.dynamic_sampling, 0
    for _ in range(dynamic.rounds_max if dynamic else 1):
        useful = sampled * case.assumptions.signal_share
        if wanted - useful < 0.5:
            return
        yield (prompts := prompts_of_round(wanted, useful, sampled))
        sampled += prompts


@dataclass(frozen=True)
class Turns:
    """The rollouts of an agent on one engine, and their turns: a rollout waits for tools between answers, and each turn
    reads what is new. Tokens and seconds are means over turns."""

    conversations: float  # rollouts that have begun and not ended
    slots: float  # answers that the engine decodes at once
    tokens: float  # sampled
    new: float
    """Tokens before an answer that no engine has seen: results of tools, and what the template writes around them."""

    again: float  # tokens before an answer whose keys and values are not in the engine's cache any more
    history: float  # tokens of a conversation when a turn begins
    wait: float  # seconds in which tools and the agent work, from an answer to the next request
    reuse: float  # share of the tokens of histories that are found in the cache
    cached: float  # conversations that the cache has room for, at most all

    @classmethod
    def of(cls, case: Case, engines: int, slots: float, cache_tokens: float) -> Turns | None:
        """Returns the turns on one engine; None without an agent. slots: of an engine. cache_tokens: the size of its
        cache; 0 if it keeps nothing from one request to the next.

        If not all conversations fit into the cache, the histories of those that fit are taken to be found.
        """
        recipe, lengths, assumed = case.grpo, case.lengths, case.assumptions
        if recipe.agent is None:
            return None
        of_engine = recipe.prompts_at_once * recipe.rollout.samples_per_prompt / engines
        conversations = max(1.0, min(recipe.agent.rollouts_at_once / engines, of_engine))
        turns, history = lengths.turns, (lengths.prompt + lengths.sequence) / 2
        cached = min(conversations, cache_tokens / history)
        reuse = assumed.prefix_share * cached / conversations
        later = (turns - 1) / turns  # the first turn reads the prompt
        return cls(
            conversations=conversations,
            slots=slots,
            tokens=lengths.turn,
            new=lengths.response * lengths.given / turns,
            again=later * (1 - reuse) * history,
            history=history,
            wait=assumed.tool_seconds * later,
            reuse=reuse,
            cached=cached,
        )

    def pace(self, engine: EngineSpeed, running: float, context: float) -> tuple[float, float, float]:
        """Returns the seconds in which each of `running` conversations gets one sampled token after `context` tokens.
        Three parts: its own decoding, the engine's reading for other conversations, and the wait for tools or for a
        place in the decoded batch."""
        tokens, seen = self.new + self.again, max(0.0, self.history - self.again)  # what it reads, behind a history
        reading = engine.prefill_seconds(tokens, tokens**2 + 2 * tokens * seen, 1) if tokens else 0.0
        read = reading / self.tokens

        def of_token(batch: float) -> float:
            return engine.decode_seconds(batch, context) + batch * read

        # As many are decoded as the others, which wait for tools, leave over: the more, the longer an answer takes.
        low, high = 0.0, min(running, self.slots)
        for _ in range(HALVINGS if self.wait else 0):
            batch = (low + high) / 2
            seconds = self.tokens * of_token(max(1.0, batch))
            low, high = (batch, high) if running * seconds / (seconds + self.wait) > batch else (low, batch)
        batch = max(1.0, high) if running > 1 else 1.0
        decoded, reading = engine.decode_seconds(batch, context), batch * read
        whole = max(running / batch * (decoded + reading), decoded + reading + self.wait / self.tokens)
        return decoded, reading, whole - decoded - reading


@dataclass(frozen=True)
class Sampling:
    """The samplers of a step's prompts: engines that are alike, all of which work at once."""

    engine: EngineSpeed
    engines: int
    at_once: float
    """Responses that an engine has begun and not ended: it decodes them all at once, but for agents that wait."""

    samples: int  # responses to each prompt
    turns: Turns | None = None

    @classmethod
    def of(cls, case: Case) -> Sampling:
        """Returns the engines of a case. Engines that share a device take turns, so they count as one."""
        recipe, rollout = case.grpo, case.grpo.rollout
        devices = case.device_plan.bundles_of_engine
        given = case.architecture, rollout.layout, case.speeds, case.assumptions, case.item_bytes
        engine = EngineSpeed(*given, quantized=rollout.multiplies_in_float8)
        blocks = len(set(devices)) if devices[0] else rollout.engines
        at_once = float(rollout.kind.requests_at_once(recipe) * math.ceil(rollout.engines / blocks))
        held = rollout.kind.memory(case)
        if held.reserved and case.device == "cuda":
            # Responses whose keys and values fit. They end before they are longest: at their mean length.
            at_once = min(at_once, max(1.0, held.cache_tokens / case.lengths.sequence))
        kept = held.cache_tokens if rollout.kind.keeps_prefixes(rollout) else 0
        turns = Turns.of(case, blocks, at_once, kept)
        at_once = turns.conversations if turns else at_once
        return cls(engine, blocks, at_once, rollout.samples_per_prompt + recipe.algorithm.greedy_responses, turns)

    def pace(self, running: float, context: float) -> tuple[float, float, float]:
        """Returns three times in seconds in which each of `running` responses gets a token, after `context` tokens in
        the mean: decoding, reading other conversations' turns, and waiting for tools or a place."""
        if self.turns:
            return self.turns.pace(self.engine, running, context)
        return self.engine.decode_seconds(running, context), 0.0, 0.0

    def token_seconds(self, running: float, context: float) -> float:
        return sum(self.pace(running, context))


@lru_cache(maxsize=4096)
def rollout_seconds(by: Sampling, lengths: Lengths, prompts: int) -> Seconds:
    """Returns the seconds in which an engine samples all responses to `prompts` prompts.

    It decodes full batches of at most `at_once` until no response waits, then one batch whose responses end one by one.
    """
    responses, growth = float(prompts * by.samples), 1 + lengths.given
    batch = min(responses, by.at_once)
    steps = [((responses - batch) * lengths.response / batch, batch, lengths.underway)]
    width = lengths.longest / POINTS
    for point in range(POINTS):  # until the longest response ends: alone, if it is much longer than the others
        decoded = (point + 0.5) * width
        steps.append((width, max(1.0, batch * lengths.alive(decoded)), lengths.prompt + growth * decoded))
    seconds = {"prompts": by.engine.prefill_seconds(prompts * lengths.prompt, prompts * lengths.prompt**2, prompts)}
    for batches, chosen in (("full batches", steps[:1]), ("last batch", steps[1:])):
        paces = [(tokens, by.pace(running, context)) for tokens, running, context in chosen]
        for part, name in enumerate((batches, "reading turns", "waiting for tools")):
            seconds[name] = seconds.get(name, 0.0) + sum(tokens * pace[part] for tokens, pace in paces)
    return seconds


# --- the other phases ------------------------------------------------------------------------------------------------


def _reward(recipe: Recipe, assumed: Assumptions, responses: float) -> Seconds:
    # The slowest list of functions: which share of the rows each list scores is in the data, not in the recipe.
    lists = [[executor_of(entry.function) for entry in entries] for entries in recipe.reward.lists().values()]
    isolated = max((len(executors) - executors.count("inline") for executors in lists), default=0)
    inline = max((executors.count("inline") for executors in lists), default=0)
    return {
        "on the driver": responses * assumed.reward_seconds * inline,
        "in workers": responses * assumed.isolated_reward_seconds * isolated / max(1, recipe.reward.workers),
    }


def training_phases(case: Case) -> dict[str, Seconds]:
    """Returns the seconds of the passes before the update, and of the update, of the policy and a critic on the same
    ranks. Nothing in `rollout` but the size of a step, in `cluster` or in `train.offload` changes them."""
    recipe, lengths = case.recipe, case.lengths
    ranks = TrainingRanks(case)
    if isinstance(recipe, SftRecipe):
        return {"update": ranks.update_seconds(BatchSize.of(recipe.data.examples_per_step, lengths))}
    algorithm, rollout = recipe.algorithm, recipe.rollout
    groups = float(rollout.prompts_per_step)
    skips = algorithm.skips_groups and not algorithm.reads_batch and algorithm.distillation is None
    if rollout.dynamic_sampling or skips:
        groups = min(groups, sum(prompts_of_rounds(case)) * case.assumptions.signal_share)
    batch = BatchSize.of(groups * rollout.samples_per_prompt, lengths)
    minibatch, times = batch.share(1 / algorithm.minibatches), algorithm.minibatches * algorithm.epochs
    before = {"sending the batch": batch.sequences * case.assumptions.send_seconds_per_response}
    passes = {"old": algorithm.computes_old_logprobs, "reference": algorithm.kl.coefficient > 0}
    for name in (name for name, made in passes.items() if made):
        before |= _named(name, ranks.forward_seconds(batch))
    update = ranks.update_seconds(minibatch)
    teachers, divergence = _teaching(case, groups * rollout.samples_per_prompt, minibatch)
    before, update = before | teachers, update | divergence
    if algorithm.critic is not None:
        whole = recipe.train.model_copy(update={"lora": None})  # adapters are never on a critic
        model = critic_of(case.critic or case.architecture)
        critics = TrainingRanks(replace(case, recipe=recipe.model_copy(update={"train": whole}), architecture=model))
        before |= _named("values", critics.forward_seconds(batch))
        update |= _named("critic", critics.update_seconds(minibatch))
    return {"logprobs": before, "update": {name: spent * times for name, spent in update.items()}}


def _teaching(case: Case, responses: float, minibatch: BatchSize) -> tuple[Seconds, Seconds]:
    """Returns the seconds of teachers' passes on the ranks, and those that a divergence in the loss adds to updates."""
    recipe, passes, update = case.grpo, dict[str, float](), dict[str, float]()
    algorithm, advises = recipe.algorithm, recipe.algorithm.teachers_advise
    shared = advises and algorithm.kl.coefficient > 0 and not recipe.teachers_read_more
    for name, of in case.teacher_cases.items():
        if not shared or name in case.teachers:  # else the penalty's pass finds the reference's logprobs
            read = BatchSize.of(responses / len(recipe.teachers), of.lengths)  # as if all had equally many rows
            read = read if advises else replace(read, head_tokens=0.0)  # hidden states alone
            passes |= _named(f"teacher {name}", TrainingRanks(of).forward_seconds(read))
    if algorithm.distillation is not None and not advises:
        head, objective = TrainingRanks(case).head_seconds, algorithm.distillation.objective
        if recipe.rollout.narrowing:  # the rewards' loss has logits of its own
            own = head(FORWARD if recipe.teachers_alone else training_products(recipe.train), minibatch)
            update["divergence: output layer"] = own
        for name, of in heads_again(case).items():  # at its own rows, as if all had equally many
            once = TrainingRanks(of).head_seconds(FORWARD, minibatch.share(1 / len(recipe.teachers)))
            update[f"teacher {name}: output layer"] = (1 + isinstance(objective, FullVocabularyConfig)) * once
    return passes, update


def _named(what: str, seconds: Seconds) -> Seconds:
    return {f"{what}: {name}": spent for name, spent in seconds.items()}


def _driver(case: Case, responses: float) -> Seconds:
    assumed, train = case.assumptions, case.recipe.train
    seconds = {"bookkeeping": assumed.driver_seconds + responses * assumed.driver_seconds_per_response}
    if isinstance(case.recipe, Recipe) and (train.offload or offloaded_bytes(case, 0)):
        # Gradients are not copied: they come back as zeros.
        held = {name: size for name, size in model_parts(case, 0).items() if name != "gradients"}
        moved = 2 * sum(size for name, size in held.items() if name in train.offload)
        moved += offloaded_bytes(case, 0)  # teachers do not change: one way
        seconds["to the host and back"] = moved / assumed.host_bytes_per_second
    return seconds
