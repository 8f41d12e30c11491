"""What a plan takes for granted about speeds, lengths and overheads. Each number can be given, or taken from a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.schema import AnyRecipe, SftRecipe

VALUE_MAX = 1e15
"""The largest number of bytes, tokens, rows, seconds, or a factor."""


@dataclass(frozen=True)
class Assumptions:
    """docs/plan.md gives the meaning, the unit and the source of each, and says which are guesses.

    Shares are of a maximum, efficiencies of a data sheet's speed, seconds are wall-clock. The six `..._factor` are
    measured over predicted seconds of a phase: 1 until `plan --calibrate` takes them from a run.
    """

    # lengths; None: the share of the longest that the recipe allows, and for the longest one, that itself
    prompt_tokens: float | None = None
    prompt_share: float = 0.25
    response_tokens: float | None = None
    response_share: float = 0.4
    longest_response_tokens: float | None = None
    example_share: float = 0.5
    epoch_rows: float | None = None  # None: unknown
    signal_share: float = 0.7  # of sampled groups

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


def longest_sequence(recipe: AnyRecipe) -> int:
    """Tokens of the longest prompt with the longest response, or of the longest example."""
    if isinstance(recipe, SftRecipe):
        return recipe.data.tokens_max
    return recipe.data.prompt_tokens_max + recipe.rollout.response_tokens_max


def minibatch_sequences(recipe: AnyRecipe) -> int:
    """Sequences of one optimizer step, over all data ranks."""
    if isinstance(recipe, SftRecipe):
        return recipe.data.examples_per_step
    return recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt // recipe.algorithm.minibatches


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's sequences: the mean prompt, the mean response and the longest response.

    How long responses are follows `alive`. Supervised fine-tuning has examples in their place, and no prompts.
    """

    prompt: float
    response: float
    longest: float

    @property
    def _steepness(self) -> float:
        return self.longest / self.response - 1

    def alive(self, tokens: float) -> float:
        """Share of the responses that are longer than `tokens`: (1 - tokens / longest)^(longest / mean - 1).

        Among curves of this form it is the one with the right mean; 1 up to the end if all are equally long.
        """
        return (1 - tokens / self.longest) ** self._steepness if tokens < self.longest else 0.0

    @property
    def sequence(self) -> float:
        """Mean prompt and response together."""
        return self.prompt + self.response

    @property
    def response_square(self) -> float:
        """Mean of a response's squared length."""
        return 2 * self.longest**2 / ((self._steepness + 1) * (self._steepness + 2))

    @property
    def sequence_square(self) -> float:
        """The same of prompt and response together, which attention's products grow with; all prompts alike."""
        return self.prompt**2 + 2 * self.prompt * self.response + self.response_square


def lengths_of(recipe: AnyRecipe, assumptions: Assumptions) -> Lengths:
    """As given, else shares of what the recipe allows at most. A mean is never above the longest."""
    if isinstance(recipe, SftRecipe):
        most, share, prompt = float(recipe.data.tokens_max), assumptions.example_share, 0.0
    else:
        most, share = float(recipe.rollout.response_tokens_max), assumptions.response_share
        most_prompt = float(recipe.data.prompt_tokens_max)
        prompt = min(most_prompt, assumptions.prompt_tokens or assumptions.prompt_share * most_prompt)
    mean = min(most, assumptions.response_tokens or share * most)
    return Lengths(prompt, mean, min(most, max(mean, assumptions.longest_response_tokens or most)))


def assumptions_from(given: Iterable[str]) -> Assumptions:
    """The defaults with each "name=value" of `given` in their place. Raises RecipeError naming every bad one."""
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
    least = "at least 0" if name == "overlap" or "seconds" in name.split("_per_")[0] else "more than 0"
    most = 1 if share else VALUE_MAX
    if not 0 <= value <= most or (value == 0 and least == "more than 0"):
        return Problem(where, written, f"{least} and at most {most:g}")
    return None
