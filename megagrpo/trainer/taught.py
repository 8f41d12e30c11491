"""The teachers' part in a step, on the driver: which row has which teacher, their logprobs, and the divergence from
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.recipe.schema import Recipe
from megagrpo.trainer.run import TrainRun
from megagrpo.types import Group


@dataclass(frozen=True)
class Taught:
    """A step's teachers by row, and their numbers by response token: float32, NaN for tokens without a teacher."""

    teacher_of_row: Sequence[str | None]
    logprobs: Ragged  # by the teacher, of the sampled tokens; NaN too where the ranks alone have them
    divergence: Ragged | None = None  # from the teacher, before the update
    agreement: Ragged | None = None  # 1: both find the same id most likely; None: the objective does not say

    @property
    def rows(self) -> np.ndarray:
        """Returns the rows that have a teacher: bool [rows]."""
        return np.array([name is not None for name in self.teacher_of_row], bool)

    def with_ranks(self, run: TrainRun) -> Taught:
        """Adds the logprobs by teachers on the ranks."""
        of_ranks = run.policy.by_token("token_teacher", self.logprobs.lengths, np.nan).values
        known = self.logprobs.values
        return replace(self, logprobs=self.logprobs.with_values(np.where(np.isnan(known), of_ranks, known)))

    def after_update(self, run: TrainRun) -> Taught:
        """Adds the divergence that the update saw, if it is a term of the loss."""
        distillation = run.recipe.algorithm.distillation
        if distillation is None or not distillation.objective.in_loss:
            return self
        lengths = self.logprobs.lengths
        divergence = run.policy.by_token("token_divergence", lengths, np.nan)
        return replace(self, divergence=divergence, agreement=run.policy.by_token("token_agreement", lengths, np.nan))


def teacher_metrics(taught: Taught | None, groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean divergence from teachers, the agreement, and the shares of tokens that have one or are given.

    The divergence is also by data source, if there are several. {}: no teachers, or no update.
    """
    if taught is None or taught.divergence is None:
        return {}
    values = taught.divergence.values
    known = np.isfinite(values)
    given = np.array([sample.given for group in groups for sample in group.samples], bool)
    metrics = {"teacher/tokens_share": float(known.mean()) if len(known) else 0.0}
    if known.any():
        metrics["teacher/divergence"] = float(values[known].mean())
    if taught.agreement is not None and known.any():
        metrics["teacher/agreement"] = float(taught.agreement.values[known].mean())
        metrics["teacher/given_share"] = float(given[taught.divergence.row_of_token][known].mean())
    sources = np.repeat([group.prompt.data_source for group in groups], [len(group.samples) for group in groups])
    of_token = sources[taught.divergence.row_of_token]
    for source in sorted(set(sources)) if len(set(sources)) > 1 else ():
        if (its := known & (of_token == source)).any():
            metrics[f"teacher/divergence/{source}"] = float(values[its].mean())
    return metrics


def taught_of(recipe: Recipe, groups: Sequence[Group]) -> Taught | None:
    """Returns each row's teacher, and the logprobs by teachers that were asked; None if the recipe has no teachers."""
    if recipe.algorithm.distillation is None:
        return None
    samples = [sample for group in groups for sample in group.samples]
    logprobs = ragged_zeros([len(sample.tokens) for sample in samples], np.float32)
    logprobs.values.fill(np.nan)
    for row, sample in enumerate(samples):
        if sample.teacher is not None:
            logprobs.row(row)[:] = sample.teacher.logprobs
    return Taught(teachers_of_rows(recipe, groups), logprobs)


def teachers_of_rows(recipe: Recipe, groups: Sequence[Group]) -> list[str | None]:
    """Returns the name of each row's teacher, None without one."""
    of_group = [recipe.teacher_of(group.prompt.data_source, group.prompt.extra_info) for group in groups]
    return [name for name, group in zip(of_group, groups, strict=True) for _ in group.samples]


def advised(
    recipe: Recipe, advantages: Advantages, taught: Taught | None, groups: Sequence[Group], rows: np.ndarray
) -> tuple[Advantages, Taught | None]:
    """Adds the teachers' logprobs of the sampled tokens to the advantages of the chosen rows (bool [rows]).

    Adds nothing if the objective is a term of the loss. Else it notes the divergence.
    """
    distillation = recipe.algorithm.distillation
    if distillation is None or taught is None or distillation.objective.in_loss:
        return advantages, taught
    sampled = [sample.logprobs for group in groups for sample in group.samples]
    student = taught.logprobs.with_values(np.concatenate([np.empty(0, np.float32), *sampled]))
    chosen = np.repeat(rows, student.lengths)
    teacher = student.with_values(np.where(chosen, taught.logprobs.values, np.float32(np.nan)))
    divergence = student.with_values(student.values - teacher.values)
    return distillation.taught(advantages, student, teacher), replace(taught, divergence=divergence)
