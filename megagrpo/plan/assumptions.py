"""The assumptions of a plan about speeds, lengths and overheads. Each number can be given, or taken from a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe

VALUE_MAX = 1e15
"""The largest number of bytes, tokens, rows, seconds, or a factor."""
SPREAD_MAX = 3.0


@dataclass(frozen=True)
class Assumptions:
    """The numbers that a plan assumes. docs/plan.md gives the meaning, unit and source of each, and marks guesses.

    Shares are of a maximum, efficiencies of a data sheet's speed, seconds are wall-clock. The six `..._factor` are
    measured over predicted seconds of a phase: 1 until `plan --calibrate` takes them from a run.
    """

    # lengths; None: the share of the longest that the recipe allows, and for the longest one, that itself
    prompt_tokens: float | None = None
    prompt_share: float = 0.25
    response_tokens: float | None = None
    response_share: float = 0.4
    longest_response_tokens: float | None = None
    response_spread: float = 1.0  # deviation of the logarithm of a response's tokens
    example_share: float = 0.5
    epoch_rows: float | None = None  # None: unknown
    signal_share: float = 0.7  # of sampled groups

    # agents: of a rollout, unless said otherwise
    turns: float | None = None  # answers
    turns_share: float = 0.4  # of agent.turns_max
    given_tokens: float = 300.0  # between an answer and the next: results of tools, or what an environment says
    tool_seconds: float = 1.0  # between an answer and the next request
    sequences: float = 1.0  # that are trained: branches
    prefix_share: float = 0.95  # of a history's tokens, in a cache with room for all conversations

    # training
    packing: float = 0.9  # tokens of a microbatch over what it can hold
    imbalance: float = 1.03  # work of the busiest data rank over the mean
    matrix_efficiency: float = 0.55
    expert_efficiency: float = 0.3
    expert_imbalance: float = 1.3  # tokens of the busiest expert rank over the mean
    attention_efficiency: float = 0.4
    layer_seconds: float = 1.5e-4  # per layer and forward pass of a microbatch, besides its products

    # engines
    prefill_efficiency: float = 0.45
    decode_efficiency: float = 0.5
    decode_step_seconds: float = 3e-3  # per decoded token of a batch, besides reading and products

    # links
    collective_seconds: float = 1.5e-5
    network_collective_seconds: float = 5e-5
    node_efficiency: float = 0.75
    network_bytes_per_second: float = 50e9  # of each GPU, in each direction
    network_efficiency: float = 0.75
    overlap: float = 0.0  # share of the data-parallel communication that is hidden behind backward passes

    optimizer_efficiency: float = 0.5
    host_bytes_per_second: float = 20e9
    disk_bytes_per_second: float = 5e9  # of all writers together, and of all readers together

    # weight sync
    sync_efficiency: float = 0.5
    sync_seconds: float = 0.3  # per sync, whatever the size
    digest_bytes_per_second: float = 50e9

    # routes of a mixture of experts, in each layer
    route_read_experts_per_second: float = 4e7  # of a server's answers, in an engine's process
    route_digest_experts_per_second: float = 2.5e8  # packed and digested: by a training rank, and the embedded engine

    # rewards and the driver
    reward_seconds: float = 1.3e-4  # per response, by a function that runs on the driver
    isolated_reward_seconds: float = 0.01  # per response, in one of reward.workers
    send_seconds_per_response: float = 6e-5
    driver_seconds: float = 0.2
    driver_seconds_per_response: float = 1e-4

    rollout_factor: float = 1.0
    reward_factor: float = 1.0
    logprobs_factor: float = 1.0
    update_factor: float = 1.0
    weight_sync_factor: float = 1.0
    driver_factor: float = 1.0


OF_AGENTS = ("turns", "turns_share", "given_tokens", "tool_seconds", "sequences", "prefix_share")


def longest_sequence(recipe: AnyRecipe) -> int:
    """Returns the tokens of the longest trained sequence: a prompt with its response, a conversation or an example."""
    if isinstance(recipe, SftRecipe):
        return recipe.data.tokens_max
    return recipe.sequence_tokens_max


def sampled_tokens_max(recipe: Recipe) -> int:
    """Returns the most tokens that a response has; those of an agent's rollout in all turns."""
    return recipe.sequence_tokens_max if recipe.agent else recipe.rollout.response_tokens_max


def minibatch_sequences(recipe: AnyRecipe) -> int:
    """Returns the number of sequences in one optimizer step, over all data ranks."""
    if isinstance(recipe, SftRecipe):
        return recipe.data.examples_per_step
    return recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt // recipe.algorithm.minibatches


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's sequences: the mean prompt, the mean response and the longest response.

    Lengths of responses are log-normal, cut off at the longest; `spread` is the deviation of their logarithm.
    Supervised fine-tuning has examples in their place, and no prompts. The response of an agent's rollout counts the
    tokens sampled in all its turns; for each of them, `given` tokens lie between the turns.
    """

    prompt: float
    response: float
    longest: float
    spread: float = Assumptions.response_spread
    turns: float = 1.0
    given: float = 0.0
    sequences: float = 1.0
    """Training sequences of one rollout. Each holds the conversation up to an answer, the last one all of it."""

    def _moment(self, power: int, middle: float) -> float:
        """Returns the mean of a response's length to the given power."""
        cut, spread = (math.log(self.longest) - middle) / self.spread, self.spread
        whole = math.exp(power * middle + (power * spread) ** 2 / 2)
        return whole * _normal(cut - power * spread) + self.longest**power * _normal(-cut)

    def alive(self, tokens: float) -> float:
        """Returns the share of responses that are longer than `tokens`."""
        if not 0 < tokens < self.longest:
            return float(tokens < self.longest)
        return _normal((_middle_of(self) - math.log(tokens)) / self.spread)

    def drawn(self, count: int, seed: int) -> NDArray[np.float64]:
        """Draws the tokens of `count` responses [count], the same for the same seed."""
        if _middle_of(self) == math.inf:
            return np.full(count, self.longest)
        drawn = np.random.default_rng(seed).lognormal(_middle_of(self), self.spread, count)
        return drawn.clip(min(1.0, self.longest), self.longest)

    @property
    def turn(self) -> float:
        """Returns the mean tokens sampled in a turn."""
        return self.response / self.turns

    @property
    def sequence(self) -> float:
        """Returns the mean tokens of a prompt and its response, with the given tokens between turns."""
        return self.prompt + self.response * (1 + self.given)

    @property
    def response_square(self) -> float:
        """Returns the mean of a response's squared length."""
        return self.longest**2 if _middle_of(self) == math.inf else self._moment(2, _middle_of(self))

    @property
    def underway(self) -> float:
        """Returns the mean tokens of a conversation that is met at a random moment of a long run: of a response that is
        longer than the mean, and half done."""
        return self.prompt + (1 + self.given) * self.response_square / (2 * self.response)

    @property
    def sequence_square(self) -> float:
        """Returns the mean of the squared `sequence`, which attention's products grow with; prompts do not vary."""
        growth = 1 + self.given
        return self.prompt**2 + 2 * self.prompt * self.response * growth + self.response_square * growth**2


@lru_cache(maxsize=256)  # a search asks for each of its thousands of cases
def _middle_of(lengths: Lengths) -> float:
    """Returns the mean of the logarithm before the cut, chosen so that the mean after the cut is `response`; infinite
    if all responses are longest."""
    if lengths.response > 0.999 * lengths.longest:
        return math.inf
    low = math.log(lengths.response) - lengths.spread**2 / 2 - 1
    high = math.log(lengths.longest) + 4 * lengths.spread
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths._moment(1, middle) < lengths.response else (low, middle)
    return (low + high) / 2


def lengths_of(recipe: AnyRecipe, assumptions: Assumptions) -> Lengths:
    """Returns the lengths as given, else as shares of the recipe's maxima. A mean never exceeds the longest.

    Unless response_tokens is given, an agent's mean conversation fills about `response_share` of the allowed tokens:
    given ones, and the rest, at least a quarter, sampled.
    """
    prompt, share, conversation = 0.0, assumptions.response_share, (1.0, 0.0, 1.0)  # turns, given tokens, sequences
    if isinstance(recipe, SftRecipe):
        most, share = float(recipe.data.tokens_max), assumptions.example_share
    else:
        most, prompt_max = float(recipe.rollout.response_tokens_max), float(recipe.data.prompt_tokens_max)
        prompt = min(prompt_max, assumptions.prompt_tokens or assumptions.prompt_share * prompt_max)
    mean = min(most, assumptions.response_tokens or share * most)
    if isinstance(recipe, Recipe) and (agent := recipe.agent) is not None:
        turns = min(float(agent.turns_max), max(1.0, assumptions.turns or assumptions.turns_share * agent.turns_max))
        room, between = max(2.0, recipe.sequence_tokens_max - prompt), assumptions.given_tokens * (turns - 1)
        wanted = min(turns * share * most, max(share * room - between, share * room / 4))
        mean = min(assumptions.response_tokens or wanted, room, agent.turns_max * most)
        given = min(between, room - mean) / mean
        most, conversation = min(room / (1 + given), agent.turns_max * most), (turns, given, assumptions.sequences)
    longest = min(most, max(mean, assumptions.longest_response_tokens or most))
    return Lengths(prompt, mean, longest, assumptions.response_spread, *conversation)


def _normal(deviations: float) -> float:
    """Returns the share of a normal distribution below so many deviations."""
    return math.erfc(-deviations / math.sqrt(2)) / 2


def assumptions_from(given: Iterable[str]) -> Assumptions:
    """Returns the defaults, replaced by each "name=value" of `given`. Raises RecipeError that names every bad one."""
    values: dict[str, float] = {}
    problems: list[Problem] = []
    for text in given:
        name, _, written = (part.strip() for part in text.partition("="))
        problem = _problem(name, written)
        if problem is None:
            values[name] = float(written)
        else:
            problems.append(problem)
    if problems:
        raise RecipeError(problems)
    return replace(Assumptions(), **values)


def _problem(name: str, written: str) -> Problem | None:
    where, names = f"assumption {name}", [field.name for field in fields(Assumptions)]
    if name not in names:
        near = get_close_matches(name, names, n=1)
        given = f"{name}={written}" if written else name or "nothing"
        fix = f"did you mean {near[0]}?" if near else ""
        return Problem(where, given, f"NAME=VALUE with one of {', '.join(names)}", fix)
    try:
        value = float(written)
    except ValueError:
        return Problem(where, written or "nothing", f"a number, as in {name}=0.5")
    share = name in ("packing", "overlap") or name.endswith(("_share", "_efficiency"))
    none = name in ("overlap", "given_tokens", "prefix_share") or "seconds" in name.split("_per_")[0]
    least = 0 if none else 1 if name in ("turns", "sequences") else 1 / VALUE_MAX
    most = 1 if share else SPREAD_MAX if name == "response_spread" else VALUE_MAX
    if not least <= value <= most:
        return Problem(where, written, f"at least {least:g} and at most {most:g}")
    return None
