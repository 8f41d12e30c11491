"""The scorer: calls every function of the recipe on every response, then weights, gates, sums and shapes the scores."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from megagrpo.errors import Problem, RewardError
from megagrpo.progress import progress
from megagrpo.recipe import schema
from megagrpo.recipe.reward_functions import executor_of
from megagrpo.reward.executors import CHECK_SECONDS, Asking, Executor, Inline, Outcomes, Specs
from megagrpo.reward.functions import (
    ANSWER,
    FunctionSpec,
    Outcome,
    Task,
    function_specs,
    static_problems,
    user_file_problem,
)
from megagrpo.reward.workers import WorkerPool, limits_of
from megagrpo.types import Group, Sample, Score

OVERLONG = "overlong"
"""The part of a score that is its penalty for length."""

REACHED_LIMIT = "the response reached the token limit"
GIVEN_UP = "the engine gave up on the response"
NOT_DONE = ("late", "failed")
"""Names of the counts that mark a rollout as unfinished by its agent's fault, not by an engine's."""

Executors = Mapping[str, Callable[[Specs, schema.RewardConfig], Executor]]
EXECUTORS: Executors = {"asking": Asking, "workers": WorkerPool.of, "inline": Inline}
"""Makers of executors, by the names in BUILT_IN. They get their calls in this order: inline functions run meanwhile."""


class Scorer:
    """The scorer of groups by the `reward:` section. Each of `executors` calls the functions that name it.

    Penalties for length are measured from response_tokens_max. `check` is called a few times a second while functions
    run; an exception from it ends the scoring. `say` reports the first failure of each function. The constructor raises
    RewardError if the section is wrong. Scoring raises it if a user's file cannot be loaded, or if functions fail on
    more than reward.failed_share_max of the responses, once there are at least `judged_responses`. A function that
    fails on a response masks that sample (value None, error says why); it never scores 0. Any thread may score; one
    does at a time. Processes start at the first score.
    """

    def __init__(
        self,
        reward: schema.RewardConfig,
        response_tokens_max: int,
        check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        judged_responses: int = 1,
        executors: Executors = EXECUTORS,
    ) -> None:
        if problems := static_problems(reward):
            raise RewardError(problems)
        self._check, self._say = check, say
        self._lock = threading.Lock()
        self._judged_responses, self._responses, self._failed_responses = judged_responses, 0, 0
        self._first_failures: dict[str, str] = {}
        self._reward, self._response_tokens_max = reward, response_tokens_max
        self._specs = function_specs(reward)
        self._lists: dict[str, list[int]] = {}
        """Functions by the field that lists them."""
        for number, spec in enumerate(self._specs):
            self._lists.setdefault(spec.where.rpartition("[")[0], []).append(number)
        self._names = [executor_of(spec.function) for spec in self._specs]
        """The executor of each function."""
        specs: dict[str, dict[int, FunctionSpec]] = {name: {} for name in executors}
        for number, (name, spec) in enumerate(zip(self._names, self._specs, strict=True)):
            specs[name][number] = spec
        self._executors = {name: make(specs[name], reward) for name, make in executors.items()}

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the same groups with a score for each response as training uses it, with penalties and masks."""
        with self._lock:
            scored = self._score_unshaped([replace(group, samples=group.responses) for group in groups])
        shaped_groups = []
        for group, whole in zip(groups, scored, strict=True):
            shaped = [
                shaped_score(score, sample, self._reward, self._response_tokens_max)
                for sample, score in zip(whole.samples, whole.scores, strict=True)
            ]
            baseline_score = shaped.pop() if group.baseline else None
            shaped_groups.append(replace(group, scores=tuple(shaped), baseline_score=baseline_score))
        return shaped_groups

    def score_unshaped(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the same groups with the weighted sums, gates included, for an evaluation: length and finish do not
        count. A rollout whose agent was late or failed scores 0, with the error."""
        with self._lock:
            scored = self._score_unshaped(groups)
        return [replace(group, scores=tuple(map(evaluated_score, group.scores, group.samples))) for group in scored]

    def _score_unshaped(self, groups: Sequence[Group]) -> list[Group]:
        chosen = [self._list_of(group) for group in groups]
        by_group: dict[int, bool] = {}
        for name in {self._names[spec] for numbers in chosen for spec in numbers}:
            by_group |= self._executors[name].by_group(self._check)
        calls: list[tuple[int, int, list[int]]] = []
        for row, (group, numbers) in enumerate(zip(groups, chosen, strict=True)):
            members = [member for member, sample in enumerate(group.samples) if unscored(sample) is None]
            alone = [[member] for member in members]
            for spec in numbers:
                calls += [(spec, row, of_call) for of_call in ([members] if by_group[spec] and members else alone)]
        calls.sort(key=lambda call: call[0])  # function after function: workers stay warm, async ones run side by side
        outcomes = self._outcomes(
            [
                (spec, Task(groups[row].prompt, tuple(groups[row].samples[member] for member in members)))
                for spec, row, members in calls
            ]
        )
        outcome_of = {
            (spec, row, member): outcome
            for (spec, row, members), of_call in zip(calls, outcomes, strict=True)
            for member, outcome in zip(members, of_call, strict=True)
        }
        self._note_failures(groups, outcome_of)
        scored = []
        for row, (group, numbers) in enumerate(zip(groups, chosen, strict=True)):
            specs = [self._specs[spec] for spec in numbers]
            solved_at = solved_from(self._reward.solved_at, specs)
            scores = (
                unscored(sample)
                or weighted_score(specs, [outcome_of[spec, row, member] for spec in numbers], solved_at)
                for member, sample in enumerate(group.samples)
            )
            scored.append(replace(group, scores=tuple(scores)))
        return scored

    def _outcomes(self, calls: Sequence[tuple[int, Task]]) -> list[list[Outcome]]:
        """Gives each call (index of the function, task) to its executor. Returns the outcomes of each."""
        futures: dict[int, Outcomes] = {}
        ended: SimpleQueue[Outcomes] = SimpleQueue()
        try:
            for name, executor in self._executors.items():
                numbers = [number for number, (spec, _) in enumerate(calls) if self._names[spec] == name]
                futures |= zip(numbers, executor.submit([calls[number] for number in numbers]), strict=True)
            pending = [future for future in futures.values() if not future.done() or future.exception()]
            for future in pending:
                future.add_done_callback(ended.put)
            with progress("scoring", len(calls), "calls") as work:
                work.done = len(calls) - len(pending)
                while work.done < len(calls):
                    self._check()
                    with suppress(Empty):
                        ended.get(timeout=CHECK_SECONDS).result()  # raises an executor's error at once
                        work.done += 1
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        return [futures[number].result() for number in range(len(calls))]

    def _list_of(self, group: Group) -> list[int]:
        if not self._reward.scores:
            return []
        where = self._reward.list_of(group.prompt.data_source)
        if where is None:
            problem = self._reward.source_problem(group.prompt.data_source, f"prompt {group.prompt.id}")
            raise RewardError(problem or [])
        return self._lists[where]

    def _note_failures(self, groups: Sequence[Group], outcome_of: Mapping[tuple[int, int, int], Outcome]) -> None:
        """Reports the row at which each function first failed. Raises RewardError, with the same rows, if too many
        responses have no score."""
        failed: set[tuple[int, int]] = set()
        first_failed: dict[str, str] = {}
        for (spec, row, member), outcome in outcome_of.items():
            if outcome.score is not None or outcome.masked:
                continue
            failed.add((row, member))
            if (name := self._specs[spec].name) not in self._first_failures:
                # what a built-in function cannot use is the row's fault: the place that raised tells nothing
                of_row = self._specs[spec].built_in and outcome.error.startswith("ValueError: ")
                reason = outcome.error.removeprefix("ValueError: ") if of_row else outcome.trace or outcome.error
                self._first_failures[name] = first_failed[name] = f"prompt {groups[row].prompt.id}: {reason}"
        self._responses += len({(row, member) for _, row, member in outcome_of})
        self._failed_responses += len(failed)
        if self._responses >= self._judged_responses:
            responses, failures = self._responses, self._failed_responses
            self._responses = self._failed_responses = 0
            if failures > self._reward.failed_share_max * responses:
                given = f"{failures} of {responses} responses have no score; the first failure of each function:"
                given += "".join(f"\n{name}: {first}" for name, first in self._first_failures.items())
                needed = f"at most a share of {self._reward.failed_share_max:g} (reward.failed_share_max)"
                fix = "correct the function; the run then resumes"
                raise RewardError(Problem("reward.functions", given, needed, fix))
        for name, first in first_failed.items():
            self._say(f"warning: reward {name} failed for the first time: {first}".rstrip())

    def take_metrics(self) -> dict[str, float]:
        """Returns the executors' metrics since the last call, and begins new budgets. Called once in each step, and
        after each evaluation."""
        return {name: value for executor in self._executors.values() for name, value in executor.take_metrics().items()}

    def close(self) -> None:
        """Ends the worker processes. A later `score` starts them again."""
        for executor in self._executors.values():
            executor.close()


def reward_problems(reward: schema.RewardConfig, *, sandbox: bool = True) -> list[Problem]:
    """Returns all problems of the section; without `sandbox`, not those of this machine's isolation. Imports the user's
    own files, in a process that ends afterwards."""
    problems = static_problems(reward, sandbox=sandbox)
    loadable = [spec for spec in function_specs(reward) if not spec.built_in and user_file_problem(spec) is None]
    if loadable:
        pool = WorkerPool(dict(enumerate(loadable)), workers=1, limits=limits_of(reward))
        try:
            pool.by_group()
        except RewardError as error:
            problems += error.problems
        finally:
            pool.close()
    return problems


def unscored(sample: Sample) -> Score | None:
    """Returns the score of a response that no function scores, None for others."""
    if sample.given:
        return Score(None, masked="given")
    return Score(None, error=(sample.agent and sample.agent.error) or GIVEN_UP) if sample.finish == "abort" else None


def solved_from(solved_at: float | None, specs: Sequence[FunctionSpec]) -> float:
    """Returns the least weighted sum of a solved response: the recipe's solved_at, else the sum of positive weights."""
    return solved_at if solved_at is not None else rounded(sum(spec.weight for spec in specs if spec.weight > 0))


def rounded(score: float) -> float:
    """Rounds to 12 digits: 0.1 + 0.2 and 0.3 are one score. A group that differs by rounding alone teaches nothing."""
    return float(f"{score:.12g}")


def weighted_score(specs: Sequence[FunctionSpec], outcomes: Sequence[Outcome], solved_at: float) -> Score:
    """Returns the weighted sum as a Score; its value is None if any function failed, gated or not.

    `parts`: raw scores by name, and metrics as name.metric; `notes` likewise. `counted`: raw scores in order, 0 where a
    gate was shut. A gate is shut if the weighted sum of the functions that always count is 0.
    """
    parts: dict[str, float] = {}
    notes: dict[str, str] = {}
    errors: list[str] = []
    masked: list[str] = []
    for spec, outcome in zip(specs, outcomes, strict=True):
        if outcome.score is None:
            (masked if outcome.masked else errors).append(f"{spec.name}: {outcome.masked or outcome.error}")
            continue
        parts[spec.name] = rounded(outcome.score)
        parts.update({f"{spec.name}.{metric}": value for metric, value in outcome.metrics.items()})
        notes.update({f"{spec.name}.{name}": note for name, note in outcome.notes.items()})
    if errors or masked:
        return Score(None, parts, "; ".join(errors), "" if errors else "; ".join(masked), notes=notes)
    answer = next((outcome.notes[ANSWER] for outcome in outcomes if ANSWER in outcome.notes), None)
    always = sum(spec.weight * parts[spec.name] for spec in specs if not spec.gated)
    counted = tuple(0.0 if spec.gated and always == 0 else parts[spec.name] for spec in specs)
    total = rounded(sum((spec.weight * score for spec, score in zip(specs, counted, strict=True)), 0.0))
    if not math.isfinite(total):
        return Score(None, parts, f"the weighted sum is {total}", notes=notes)
    return Score(total, parts, counted=counted, solved=bool(specs) and total >= solved_at, notes=notes, answer=answer)


def evaluated_score(score: Score, sample: Sample) -> Score:
    """Returns the score for an evaluation: 0 if the agent was late or failed. A missing value would raise the mean."""
    counts = sample.agent.counts if sample.agent else {}
    if score.value is None and sample.finish == "abort" and any(counts.get(name) for name in NOT_DONE):
        return replace(score, value=0.0)
    return score


def shaped_score(score: Score, sample: Sample, reward: schema.RewardConfig, response_tokens_max: int) -> Score:
    """Returns the score for training: applies non_stop_score, the penalty for length, then the mask. Keeps `solved`.

    Returns a score without a value unchanged.
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
    """Returns DAPO's penalty <= 0 (arXiv:2503.14476, eq. 13): 0 up to the buffer, linear to -penalty at the limit."""
    used = tokens - (response_tokens_max - overlong.buffer_tokens)
    return -overlong.penalty * min(max(used / overlong.buffer_tokens, 0.0), 1.0) + 0.0
