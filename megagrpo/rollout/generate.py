"""From prompts to requests and from samples back to groups. Pure; everything is in the order of the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megagrpo.errors import EngineError, Problem
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.seeds import sample_seed
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams


def rollout_sampling(recipe: Recipe) -> SamplingParams:
    """How training rollouts are sampled."""
    rollout = recipe.rollout
    return SamplingParams(
        max_tokens=rollout.response_tokens_max,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_tokens=tuple(rollout.stop_token_ids),
    )


def greedy_sampling(recipe: Recipe) -> SamplingParams:
    """As training rollouts, but the likeliest token each time."""
    return replace(rollout_sampling(recipe), temperature=0.0)


def evaluation_sampling(recipe: Recipe) -> SamplingParams:
    """How evaluation responses are sampled."""
    evaluation = recipe.eval
    return SamplingParams(
        max_tokens=evaluation.response_tokens_max or recipe.rollout.response_tokens_max,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        stop_tokens=tuple(recipe.rollout.stop_token_ids),
    )


def requests_for(
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: SamplingParams,
    recipe_seed: int,
    step: int,
    first_index: int = 0,
) -> list[Request]:
    """`samples_per_prompt` requests for each prompt, side by side, counted from `first_index`.

    A prompt that occurs again in one step goes on counting its samples, so that they are other samples.
    """
    requests = []
    asked: Counter[str] = Counter()
    for prompt in prompts:
        first = first_index + asked[prompt.id]
        for index in range(first, first + samples_per_prompt):
            seed = sample_seed(recipe_seed, step, prompt.id, index)
            requests.append(Request(prompt.id, index, prompt.tokens, seed, sampling))
        asked[prompt.id] += samples_per_prompt
    return requests


def groups_of(prompts: Sequence[Prompt], samples: Sequence[Sample], samples_per_prompt: int) -> list[Group]:
    """The groups of `prompts`, from the samples of `requests_for(prompts, …)` in the same order.

    Raises EngineError if the samples are not those that were asked for.
    """
    got = [sample.prompt_id for sample in samples]
    if got != [prompt.id for prompt in prompts for _ in range(samples_per_prompt)]:
        raise EngineError(
            Problem(
                where="rollout: the samples are not those that were asked for",
                given=f"{len(samples)} samples of {len(set(got))} prompts",
                needed=f"{samples_per_prompt} samples of each of {len(prompts)} prompts, in their order",
            )
        )
    return [
        Group(prompt, tuple(samples[start : start + samples_per_prompt]))
        for start, prompt in zip(range(0, len(samples), samples_per_prompt), prompts, strict=True)
    ]
