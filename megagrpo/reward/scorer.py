"""Samples to scores: every function of the recipe on every response, weighted, gated, summed and shaped."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megagrpo.errors import Problem, RewardError
from megagrpo.recipe import schema
from megagrpo.reward.functions import (
    INLINE,
    FunctionSpec,
    Outcome,
    RewardCallable,
    Task,
    call,
    failure_of,
    function_specs,
    load,
    outcome_of,
    static_problems,
    user_file_problem,
    with_source,
)
from megagrpo.reward.workers import Limits, WorkerPool, load_problems
from megagrpo.types import Group, Sample, Score

OVERLONG = "overlong"
"""The part of a score that is its penalty for length."""

REACHED_LIMIT = "the response reached the token limit"


class Scorer:
    """Scores groups by the `reward:` section. `gsm8k` runs here; all else in processes, started at the first score.

    response_tokens_max is the limit that penalties for length are measured from. `check` is called a few times a
    second while functions are waited for; what it raises ends the scoring. `say` gets where each function first failed.
    Raises RewardError: from the constructor for what is wrong with the section, from scoring if a user's file cannot be
    loaded or if functions fail on more than reward.failed_share_max of the responses, once there are at least
    `judged_responses`. One that fails on a response masks that sample (value None, error says why); it never scores 0.
    Any thread may score; one does at a time.
    """

    def __init__(
        self,
        reward: schema.RewardConfig,
        response_tokens_max: int,
        check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        judged_responses: int = 1,
    ) -> None:
        if problems := static_problems(reward):
            raise RewardError(problems)
        self._check, self._say = check, say
        self._lock = threading.Lock()
        self._judged_responses, self._responses, self._failed_responses = judged_responses, 0, 0
        self._first_failures: dict[str, Outcome] = {}
        self._reward, self._response_tokens_max = reward, response_tokens_max
        self._gated = gated_functions(reward.functions)
        self._specs = function_specs(reward)
        self._inline: dict[int, RewardCallable] = {
            i: load(spec) for i, spec in enumerate(self._specs) if spec.function in INLINE
        }
        self._isolated = [i for i in range(len(self._specs)) if i not in self._inline]
        specs = [with_source(self._specs[i]) for i in self._isolated]
        self._pool = WorkerPool(specs, workers=reward.workers, limits=_limits(reward))

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with a score for each sample, as training sees it: penalties and masks included."""
        return [
            replace(
                group,
                scores=tuple(
                    shaped_score(score, sample, self._reward, self._response_tokens_max)
                    for sample, score in zip(group.samples, group.scores, strict=True)
                ),
            )
            for group in self.score_unshaped(groups)
        ]

    def score_unshaped(self, groups: Sequence[Group]) -> list[Group]:
        """The same with the functions' weighted sums alone, gates included: what responses are worth to an evaluation,
        whatever their length and however they ended."""
        with self._lock:
            return self._score_unshaped(groups)

    def _score_unshaped(self, groups: Sequence[Group]) -> list[Group]:
        tasks = [
            Task(group.prompt.data_source, sample.text, group.prompt.ground_truth, group.prompt.extra_info)
            for group in groups
            for sample in group.samples
        ]
        by_function = {i: [_call_inline(function, task) for task in tasks] for i, function in self._inline.items()}
        isolated = self._pool.run(
            [(index, task) for index in range(len(self._isolated)) for task in tasks], self._check
        )
        for index, function in enumerate(self._isolated):
            by_function[function] = isolated[index * len(tasks) : (index + 1) * len(tasks)]
        self._note_failures(by_function, len(tasks))
        in_order = zip(*(by_function[i] for i in range(len(self._specs))), strict=True)
        solved_at = solved_from(self._reward)
        scores = iter([weighted_score(self._specs, self._gated, outcomes, solved_at) for outcomes in in_order])
        return [
            replace(group, scores=tuple(_unless_aborted(sample, next(scores)) for sample in group.samples))
            for group in groups
        ]

    def _note_failures(self, by_function: Mapping[int, Sequence[Outcome]], responses: int) -> None:
        """Says where each function first failed. Raises RewardError if too many responses have no score."""
        for index, outcomes in by_function.items():
            name, failed = self._specs[index].name, [outcome for outcome in outcomes if outcome.score is None]
            if failed and name not in self._first_failures:
                self._first_failures[name] = failed[0]
                self._say(f"reward {name} failed for the first time: {failed[0].trace or failed[0].error}".rstrip())
        self._responses += responses
        self._failed_responses += sum(
            any(outcome.score is None for outcome in of_response)
            for of_response in zip(*by_function.values(), strict=True)
        )
        if self._responses < self._judged_responses:
            return
        responses, failed_responses = self._responses, self._failed_responses
        self._responses = self._failed_responses = 0
        if failed_responses > self._reward.failed_share_max * responses:
            given = "\n".join(
                [
                    f"{failed_responses} of {responses} responses have no score; the first failure of each function:",
                    *(f"{name}: {first.trace or first.error}" for name, first in self._first_failures.items()),
                ]
            )
            needed = f"at most a share of {self._reward.failed_share_max:g} (reward.failed_share_max)"
            raise RewardError(Problem("reward.functions", given, needed, "correct the function; the run then goes on"))

    def close(self) -> None:
        """Ends the worker processes. A later `score` starts them again."""
        self._pool.close()


def reward_problems(reward: schema.RewardConfig) -> list[Problem]:
    """Everything wrong with the section. Files of the user's own are imported, in a process that ends afterwards."""
    loadable = [spec for spec in function_specs(reward) if not spec.built_in and user_file_problem(spec) is None]
    return static_problems(reward) + (load_problems(loadable, _limits(reward)) if loadable else [])


def _limits(reward: schema.RewardConfig) -> Limits:
    return Limits(reward.timeout_seconds, int(reward.memory_gib * 2**30), tuple(reward.environment))


def _call_inline(function: RewardCallable, task: Task) -> Outcome:
    try:
        return outcome_of(call(function, task))
    except ValueError as raised:  # how a built-in refuses a ground truth
        return failure_of(raised)


def _unless_aborted(sample: Sample, score: Score) -> Score:
    return Score(None, error="the engine gave up on the response") if sample.finish == "abort" else score


def gated_functions(functions: Sequence[schema.RewardFunctionConfig]) -> tuple[bool, ...]:
    """For each function, whether it counts only if those that always count give a sum other than 0."""
    waits = [
        function.counts == "when_others_score" or (function.counts == "auto" and function.function == "format")
        for function in functions
    ]
    alone = all(waits)  # then those that were not told to wait count
    return tuple(
        wait and not (alone and function.counts == "auto") for wait, function in zip(waits, functions, strict=True)
    )


def solved_from(reward: schema.RewardConfig) -> float:
    """The least weighted sum of a solved response."""
    if reward.solved_at is not None:
        return reward.solved_at
    return rounded(sum(function.weight for function in reward.functions if function.weight > 0))


def rounded(score: float) -> float:
    """To 12 digits, so that 0.1 + 0.2 and 0.3 are one score: a group that differs by rounding alone teaches nothing."""
    return float(f"{score:.12g}")


def weighted_score(
    specs: Sequence[FunctionSpec], gated: Sequence[bool], outcomes: Sequence[Outcome], solved_at: float
) -> Score:
    """The weighted sum, or no value if any function failed, gated or not.

    `parts`: raw scores by name, and metrics as name.metric. `counted`: raw scores in order, 0 where a gate was shut. A
    gate is shut if the weighted sum of the functions that always count is 0.
    """
    parts: dict[str, float] = {}
    errors: list[str] = []
    for spec, outcome in zip(specs, outcomes, strict=True):
        if outcome.score is None:
            errors.append(f"{spec.name}: {outcome.error}")
            continue
        parts[spec.name] = rounded(outcome.score)
        parts.update({f"{spec.name}.{metric}": value for metric, value in outcome.metrics.items()})
    if errors:
        return Score(None, parts, "; ".join(errors))
    always = sum(spec.weight * parts[spec.name] for spec, has_gate in zip(specs, gated, strict=True) if not has_gate)
    counted = tuple(
        0.0 if has_gate and always == 0 else parts[spec.name] for spec, has_gate in zip(specs, gated, strict=True)
    )
    total = rounded(sum((spec.weight * score for spec, score in zip(specs, counted, strict=True)), 0.0))
    if not math.isfinite(total):
        return Score(None, parts, f"the weighted sum is {total}")
    return Score(total, parts, counted=counted, solved=total >= solved_at)


def shaped_score(score: Score, sample: Sample, reward: schema.RewardConfig, response_tokens_max: int) -> Score:
    """What training makes of a score: non_stop_score, then the penalty for length, then the mask. `solved` stays.

    A score without a value is returned as it is.
    """
    if score.value is None:
        return score
    truncated = sample.finish == "length"
    value, parts = score.value, score.parts
    if truncated and reward.non_stop_score is not None:
        value = reward.non_stop_score
    if reward.overlong is not None:
        penalty = overlong_penalty(len(sample.tokens), reward.overlong, response_tokens_max)
        value, parts = rounded(value + penalty), {**parts, OVERLONG: penalty}
    if truncated and reward.truncated == "mask":
        return replace(score, value=None, parts=parts, counted=(), masked=REACHED_LIMIT)
    return replace(score, value=value, parts=parts)


def overlong_penalty(tokens: int, overlong: schema.OverlongConfig, response_tokens_max: int) -> float:
    """DAPO, arXiv:2503.14476, eq. 13: 0 up to the buffer, falling in a line to -penalty at the limit; never above 0."""
    used = tokens - (response_tokens_max - overlong.buffer_tokens)
    return -overlong.penalty * min(max(used / overlong.buffer_tokens, 0.0), 1.0) + 0.0
