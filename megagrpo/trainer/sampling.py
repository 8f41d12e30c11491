"""A step's prompts, responses and scores; with dynamic sampling in several rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.algorithm.advantage import groups_that_teach
from megagrpo.recipe import schema
from megagrpo.trainer.run import Run
from megagrpo.trainer.sequences import advantage_inputs, flat_scores, require_version
from megagrpo.types import Group, Prompt


@dataclass(frozen=True)
class Sampled:
    """A step's scored groups."""

    groups: list[Group]
    """Those that the step may train on, in the order of their prompts."""

    all: list[Group]
    """Everything that was sampled, `groups` included."""

    rounds: int = 1
    """How often prompts were sampled."""

    left_over: int = 0
    """Groups with signal that the last round brought beyond those wanted."""

    baselines: np.ndarray | None = None
    """Score of the greedy response to each prompt of `groups`, float64, NaN where its reward failed. For remax."""


def sample_step(run: Run, step: int) -> Sampled:
    """Samples step `step` and sets aside the prompts that it solved too often.

    Raises StopRequested if the run is told to stop before all is sampled and scored.
    """
    recipe = run.recipe
    with run.stopping.giving_up(), run.policy.released():
        if recipe.rollout.dynamic_sampling:
            sampled = _in_rounds(run, step, recipe.rollout.dynamic_sampling)
        elif recipe.algorithm.advantage.name == "remax":
            sampled = _with_baselines(run, step)
        else:
            groups = _sample(run, run.cursor.next(recipe.rollout.prompts_per_step), step)
            sampled = Sampled(groups, groups)
        run.rollouts.release_memory()
    if recipe.data.no_resampling_pass_rate is not None:
        run.cursor.set_aside(solved_prompts(sampled.all, recipe.data.no_resampling_pass_rate))
    return sampled


def prompts_of_round(wanted: int, useful: int, sampled: int) -> int:
    """How many prompts to sample next: as many as bring the rest if groups go on having signal as often as so far, and
    never more than a step's.

    wanted: groups of a step; useful: groups with signal so far, of `sampled` groups in all.
    """
    return wanted if useful == 0 else min(wanted, -(-(wanted - useful) * sampled // useful))


def with_signal(groups: Sequence[Group], recipe: schema.Recipe) -> list[Group]:
    """The groups that teach something, as `groups_that_teach` says."""
    return [groups[i] for i in groups_that_teach(advantage_inputs(recipe, groups), recipe.algorithm.advantage)]


def solved_prompts(groups: Sequence[Group], rate: float) -> list[str]:
    """Ids of the prompts of which at least this share of all responses is solved."""
    return [
        group.prompt.id for group in groups if sum(score.solved for score in group.scores) / len(group.samples) >= rate
    ]


def _in_rounds(run: Run, step: int, dynamic: schema.DynamicSamplingConfig) -> Sampled:
    """Groups without signal are replaced by those of new prompts (DAPO, arXiv:2503.14476, section 3.2, eq. 11)."""
    wanted = run.recipe.rollout.prompts_per_step
    useful: list[Group] = []
    everything: list[Group] = []
    drawn: Counter[str] = Counter()
    rounds = 0
    while len(useful) < wanted and rounds < dynamic.rounds_max:
        count = prompts_of_round(wanted, len(useful), len(everything))
        groups = _sample(run, run.cursor.next(count, drawn), step)
        everything += groups
        useful += with_signal(groups, run.recipe)
        rounds += 1
    return Sampled(useful[:wanted], everything, rounds, left_over=max(0, len(useful) - wanted))


def _sample(run: Run, prompts: Sequence[Prompt], step: int) -> list[Group]:
    with run.clock.phase("rollout"):
        groups = run.rollouts.generate(prompts, step)
        require_version(groups, run.weights.version)
    with run.clock.phase("reward"):
        return run.scorer.score(groups)


def _with_baselines(run: Run, step: int) -> Sampled:
    prompts = run.cursor.next(run.recipe.rollout.prompts_per_step)
    with run.clock.phase("rollout"):
        groups, greedy = run.rollouts.generate_with_greedy(prompts, step)
        require_version([*groups, *greedy], run.weights.version)
    with run.clock.phase("reward"):
        scored = run.scorer.score([*groups, *greedy])
    groups, greedy = scored[: len(groups)], scored[len(groups) :]
    return Sampled(groups, groups, baselines=flat_scores(greedy))
