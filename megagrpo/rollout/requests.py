"""From prompts to requests, each for one engine, and from samples back to groups, in the order of the prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams

SEED_BITS = 63  # a seed fits a signed 64-bit integer, which torch and most engines want


def sampling_of(recipe: Recipe, section: RolloutConfig | EvalConfig) -> SamplingParams:
    """How responses are sampled for training (section: recipe.rollout), or for an evaluation (recipe.eval)."""
    return SamplingParams(
        max_tokens=section.response_tokens_max or recipe.rollout.response_tokens_max,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
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

    The samples of a prompt that occurs again in a step are counted on, so that they are other samples.
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


def training_requests(recipe: Recipe, prompt: Prompt, step: int) -> list[Request]:
    """All of a prompt in a step: its samples, and then the greedy response that remax wants."""
    sampling = sampling_of(recipe, recipe.rollout)
    asked = (
        (0, recipe.rollout.samples_per_prompt, sampling),
        (
            recipe.rollout.samples_per_prompt,
            recipe.algorithm.greedy_responses,
            replace(sampling, temperature=0.0),
        ),
    )
    return [
        request
        for first, count, params in asked
        for request in requests_for(
            [prompt], samples_per_prompt=count, sampling=params, recipe_seed=recipe.seed, step=step, first_index=first
        )
    ]


def sample_seed(recipe_seed: int, step: int, prompt_id: str, index: int) -> int:
    """Seed of sample `index` of a prompt in a step, in [0, 2**63): BLAKE2b of the four, the same on every machine."""
    digest = hashlib.blake2b(f"{recipe_seed}/{step}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def nothing_sampled(request: Request) -> Sample:
    """The sample of a request that ended before its first token."""
    nothing = np.zeros(0, dtype=np.int32)
    return Sample(request.prompt_id, request.index, nothing, nothing.astype(np.float32), nothing, "abort", "")


def after_begun(request: Request, sample: Sample) -> Sample:
    """The whole sample, from what was sampled after `request.read`. Its text is that of `sample` alone."""
    begun = request.begun
    if begun is None:
        return sample
    tokens = np.concatenate([begun.tokens, sample.tokens])
    logprobs = np.concatenate([begun.logprobs, sample.logprobs])
    return replace(sample, tokens=tokens, logprobs=logprobs, versions=np.concatenate([begun.versions, sample.versions]))


def groups_of(prompts: Sequence[Prompt], samples: Sequence[Sample], samples_per_prompt: int) -> list[Group]:
    """The groups of `prompts`, from the samples of `requests_for(prompts, …)` in the same order.

    Raises EngineError if they are samples of other prompts.
    """
    got = [sample.prompt_id for sample in samples]
    if got != [prompt.id for prompt in prompts for _ in range(samples_per_prompt)]:
        given = f"{len(samples)} samples of {len(set(got))} prompts"
        needed = f"{samples_per_prompt} samples of each of {len(prompts)} prompts, in their order"
        raise EngineError(Problem("rollout: the samples are not those that were asked for", given, needed))
    return [
        Group(prompt, tuple(samples[start : start + samples_per_prompt]))
        for start, prompt in zip(range(0, len(samples), samples_per_prompt), prompts, strict=True)
    ]
