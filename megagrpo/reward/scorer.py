"""Samples to scores: every function of the recipe on every response, weighted, summed and shaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megagrpo.recipe import schema
from megagrpo.reward.function import Outcome, RewardCallable, Task, failure_of, outcome_of
from megagrpo.reward.functions import INLINE, load_functions
from megagrpo.reward.loading import load
from megagrpo.reward.shaping import gated_functions, shaped_score, weighted_score
from megagrpo.reward.workers import WorkerPool
from megagrpo.types import Group, Sample, Score


class Scorer:
    """Scores groups by the `reward:` section. `gsm8k` runs here; all else in processes, started at the first score.

    response_tokens_max is the limit that penalties for length are measured from. `check` is called a few times a
    second while functions are waited for; what it raises ends the scoring.
    Raises RewardError: from the constructor for what is wrong with the section, from scoring if a user's file cannot be
    loaded. A function that fails on a response masks that sample (value None, error says why); it never scores 0.
    """

    def __init__(
        self, reward: schema.RewardConfig, response_tokens_max: int, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self._reward, self._response_tokens_max = reward, response_tokens_max
        self._gated = gated_functions(reward.functions)
        self._specs = load_functions(reward)
        self._inline: dict[int, RewardCallable] = {
            i: load(spec) for i, spec in enumerate(self._specs) if spec.function in INLINE
        }
        self._isolated = [i for i in range(len(self._specs)) if i not in self._inline]
        self._pool = WorkerPool(
            [self._specs[i] for i in self._isolated], workers=reward.workers, timeout_seconds=reward.timeout_seconds
        )

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
        tasks = [
            Task(group.prompt.data_source, sample.text, group.prompt.ground_truth, group.prompt.extra_info)
            for group in groups
            for sample in group.samples
        ]
        by_function = {i: [_call(function, task) for task in tasks] for i, function in self._inline.items()}
        isolated = self._pool.run(
            [(index, task) for index in range(len(self._isolated)) for task in tasks], self._check
        )
        for index, function in enumerate(self._isolated):
            by_function[function] = isolated[index * len(tasks) : (index + 1) * len(tasks)]
        in_order = zip(*(by_function[i] for i in range(len(self._specs))), strict=True)
        solved_at = self._reward.solved_at
        scores = iter([weighted_score(self._specs, self._gated, outcomes, solved_at) for outcomes in in_order])
        return [
            replace(group, scores=tuple(_unless_aborted(sample, next(scores)) for sample in group.samples))
            for group in groups
        ]

    def close(self) -> None:
        """End the worker processes. A later `score` starts them again."""
        self._pool.close()


def _call(function: RewardCallable, task: Task) -> Outcome:
    try:
        return outcome_of(
            function(
                data_source=task.data_source,
                response=task.response,
                ground_truth=task.ground_truth,
                extra_info=task.extra_info,
            )
        )
    except ValueError as raised:  # how a built-in refuses a ground truth
        return failure_of(raised)


def _unless_aborted(sample: Sample, score: Score) -> Score:
    return Score(None, error="the engine gave up on the response") if sample.finish == "abort" else score
