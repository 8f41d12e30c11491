"""Requests of prompts, each for one engine; what is sampled after tokens of an earlier engine; baselines of groups."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megagrpo.errors import Problem, TeacherError
from megagrpo.recipe.defaults import replays_routes
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import EvalSet
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.rollout.pool import Order
from megagrpo.types import Group, KeptSets, Prompt, Request, Sample, SamplingParams

SEED_BITS = 63  # a seed fits a signed 64-bit integer, which torch and most engines want
GIVEN = -1
"""In place of a sample's index, in the draw that decides if a prompt has its row's response."""


def sampling_of(recipe: Recipe, section: RolloutConfig | EvalSet) -> SamplingParams:
    """Returns the sampling parameters of training (section: recipe.rollout), or of an evaluation on a set."""
    return SamplingParams(
        max_tokens=section.response_tokens_max or recipe.rollout.response_tokens_max,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p if isinstance(section, RolloutConfig) else 0.0,
        stop_tokens=tuple(recipe.rollout.stop_token_ids),
        routes=section is recipe.rollout and replays_routes(recipe),
        kept_sets=isinstance(section, RolloutConfig) and bool(section.narrowing),
    )


def requests_for(
    prompt: Prompt, *, samples: int, sampling: SamplingParams, recipe_seed: int, step: int, first_index: int = 0
) -> list[Request]:
    """Returns `samples` requests for a prompt, counted from `first_index`."""
    return [
        Request(prompt.id, index, prompt.tokens, sample_seed(recipe_seed, step, prompt.id, index), sampling)
        for index in range(first_index, first_index + samples)
    ]


def training_requests(recipe: Recipe, prompt: Prompt, step: int) -> list[Request]:
    """Returns all requests of a prompt in a step: its samples, then the greedy response that remax wants."""
    sampling = sampling_of(recipe, recipe.rollout)
    samples, seeds = recipe.rollout.samples_per_prompt, {"recipe_seed": recipe.seed, "step": step}
    likeliest = replace(sampling, temperature=0.0, routes=False, kept_sets=False)
    greedy = recipe.algorithm.greedy_responses
    return [
        *requests_for(prompt, samples=samples, sampling=sampling, **seeds),
        *requests_for(prompt, samples=greedy, sampling=likeliest, first_index=samples, **seeds),
    ]


def training_order(
    recipe: Recipe, prompt: Prompt, step: int, on_complete: Callable[[Order], None] = lambda order: None
) -> Order:
    """Returns an order of a prompt's training rollouts, with the seeds of a step. One whose response is given is
    complete from the start."""
    requests, given = training_requests(recipe, prompt, step), given_sample(recipe, prompt, step)
    if given is None:
        return Order(requests, on_complete, prompt)
    return Order(requests[:1], on_complete, prompt, samples={0: given})


def given_sample(recipe: Recipe, prompt: Prompt, step: int) -> Sample | None:
    """Returns the response of a prompt's row, if the step trains on it and samples none. It is cut at
    rollout.response_tokens_max."""
    distillation = recipe.algorithm.distillation
    given = distillation and distillation.given_responses
    if not given or not prompt.given or teacher_of(recipe, prompt) is None:
        return None
    if sample_seed(recipe.seed, step, prompt.id, GIVEN) >= given.share * 2**SEED_BITS:
        return None
    tokens = np.array(prompt.given[: recipe.rollout.response_tokens_max], np.int32)
    logprobs = np.full(len(tokens), np.nan, np.float32)
    return Sample(prompt.id, 0, tokens, logprobs, np.zeros_like(tokens), "given", "")


def teacher_of(recipe: Recipe, prompt: Prompt) -> str | None:
    """Returns the name of a row's teacher, None without one. Raises TeacherError if the row names another thing."""
    try:
        return recipe.teacher_of(prompt.data_source, prompt.extra_info)
    except ValueError as error:
        known = ", ".join(recipe.teachers)
        raise TeacherError(Problem(f"prompt {prompt.id}", str(error), f"one of {known}")) from error


def evaluation_requests(recipe: Recipe, held_out: EvalSet, prompts: Sequence[Prompt]) -> list[list[Request]]:
    """Returns the requests of each prompt of a set. A repeated prompt gets other samples: indices continue."""
    sampling, samples = sampling_of(recipe, held_out), held_out.samples_per_prompt
    counts: Counter[str] = Counter()
    requests = []
    for prompt in prompts:
        first = counts[prompt.id]
        requests.append(
            requests_for(prompt, samples=samples, sampling=sampling, recipe_seed=recipe.seed, step=0, first_index=first)
        )
        counts[prompt.id] += samples
    return requests


def sample_seed(recipe_seed: int, step: int, prompt_id: str, index: int) -> int:
    """Hashes the four arguments, by BLAKE2b, into a sample's seed in [0, 2**63): the same on every machine."""
    digest = hashlib.blake2b(f"{recipe_seed}/{step}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def nothing_sampled(request: Request) -> Sample:
    """Returns the sample of a request that ended before its first token."""
    nothing = np.zeros(0, dtype=np.int32)
    return Sample(request.prompt_id, request.index, nothing, nothing.astype(np.float32), nothing, "abort", "")


def after_begun(request: Request, sample: Sample) -> Sample:
    """Joins the tokens of `request.begun` and those of `sample`, sampled after them. The text is `sample`'s alone.

    `sample.routes`, of all tokens that its engine has read, replace only those that `begun` lacks: a token's row is of
    the pass after which the next one was sampled. Raises EngineError if those of `begun` are not of its tokens.
    """
    begun = request.begun
    if begun is None:
        return sample
    tokens = np.concatenate([begun.tokens, sample.tokens])
    logprobs = np.concatenate([begun.logprobs, sample.logprobs])
    routes = sample.routes if len(sample.tokens) else begun.routes
    if routes is not None and begun.routes is not None:
        where = f"sample {request.index} of prompt {request.prompt_id}, resumed after {len(begun.tokens)} tokens"
        begun.routes.require_rows(where, len(request.read) - 1)
        routes = begun.routes.joined(routes, where)
    kept = begun.kept
    if kept is not None or sample.kept is not None:
        kept = KeptSets.joined([(one.kept, len(one.tokens)) for one in (begun, sample)])
    versions = np.concatenate([begun.versions, sample.versions])
    return replace(sample, tokens=tokens, logprobs=logprobs, versions=versions, routes=routes, kept=kept)


def with_baseline(group: Group, recipe: Recipe) -> Group:
    """Makes the greedy response of training_requests, the last sample, the group's baseline."""
    if not recipe.algorithm.greedy_responses or group.baseline:
        return group
    samples, scores, score = group.samples, group.scores, group.scores[-1] if group.scores else None
    return Group(group.prompt, samples[:-1], scores[:-1], baseline=samples[-1], baseline_score=score)
