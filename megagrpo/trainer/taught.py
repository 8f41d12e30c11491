"""The teachers' part in a step, on the driver: which row has which teacher, their logprobs, and the divergence from
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.batching.rank_batches import RankBatch, as_teachers_read, make_rank_batches
from megagrpo.batching.work import Work
from megagrpo.cluster.reward_models import asked_ids
from megagrpo.errors import Problem, TeacherError
from megagrpo.recipe.defaults import recipe_for_teacher
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.requests import teacher_of
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
        """Adds what the update saw, if the divergence is a term of the loss."""
        if run.recipe.algorithm.teachers_advise:
            return self
        lengths = self.logprobs.lengths
        divergence = run.policy.by_token("token_divergence", lengths, np.nan)
        agreement = run.policy.by_token("token_agreement", lengths, np.nan)
        taught = self.with_ranks(run) if run.recipe.teachers_on_ranks else self
        return replace(taught, divergence=divergence, agreement=agreement)


def teacher_metrics(taught: Taught | None, rows: np.ndarray, groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean divergence from teachers, the agreement, and the shares of tokens that have one or are given.

    rows: bool [rows], those in the batches. The divergence is also by data source, if there are several. {}: no
    teachers, or no update of rows with a teacher.
    """
    if taught is None or taught.divergence is None:
        return {"teacher/tokens_share": 0.0} if taught and not (taught.rows & rows).any() else {}
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
            metrics[f"teacher/{source}/divergence"] = float(values[its].mean())
    return metrics


def taught_of(recipe: Recipe, groups: Sequence[Group]) -> Taught | None:
    """Returns each row's teacher, and the logprobs by teachers that were asked; None if the recipe has no teachers.

    Raises TeacherError for a scored sample without the answer of its teacher, such as one of a run of another recipe.
    """
    if recipe.algorithm.distillation is None:
        return None
    k, names = asked_ids(recipe), teachers_of_rows(recipe, groups)
    samples = [sample for group in groups for sample in group.samples]
    scores = [score for group in groups for score in group.scores]
    logprobs, given = ragged_zeros([len(sample.tokens) for sample in samples], np.float32), given_rows(groups)
    logprobs.values.fill(np.nan)
    for row, (name, sample, score) in enumerate(zip(names, samples, scores, strict=True)):
        if name is None or recipe.teachers[name].on_ranks or not len(sample.tokens):
            continue
        if sample.teacher is not None and (not k or sample.teacher.ids.shape[1] == k):
            logprobs.row(row)[:] = sample.teacher.logprobs
        elif score.value is not None or given[row]:
            has = "no answer" if sample.teacher is None else f"logprobs of {sample.teacher.ids.shape[1]} ids"
            where, needed = f"sample {sample.index} of prompt {sample.prompt_id}", f"logprobs of {k} ids of each token"
            fix = "train on samples of a run with the same teachers and objective"
            raise TeacherError(Problem(where, f"{has} of teacher {name}", needed, fix))
    return Taught(names, logprobs)


def teachers_of_rows(recipe: Recipe, groups: Sequence[Group]) -> list[str | None]:
    """Returns the name of each row's teacher, None without one."""
    of_groups = [(teacher_of(recipe, group.prompt), group) for group in groups]
    return [name for name, group in of_groups for _ in group.samples]


def batches_of_teachers(
    recipe: Recipe, batches: Sequence[RankBatch], work: Work
) -> dict[str, Sequence[RankBatch] | None]:
    """Returns the batches of the teachers on the ranks that rows have: None where it is the policy's, `batches`.

    Others are a teacher's own rows, in its layout, with the prompts that it reads."""
    found = dict[str, Sequence[RankBatch] | None]()
    micros = [(micro, rank) for rank, batch in enumerate(batches) for of in batch.minibatches for micro in of]
    sequences = [(sequence, rank) for micro, rank in micros for sequence in micro.sequences]
    for number, name in enumerate(recipe.teachers):
        own = [as_teachers_read(*pair) for pair in sequences if pair[0].teacher == number]
        if not own or not recipe.teachers[name].on_ranks:
            continue
        read, found[name] = recipe_for_teacher(recipe, name), None
        if read is not recipe or len(own) < len(sequences):
            tokens = read.train.logprob_tokens_per_microbatch or read.train.tokens_per_microbatch
            layout = read.train.layout.parallel()
            found[name] = make_rank_batches(
                own, layout=layout, minibatches=1, tokens_per_microbatch=tokens, seed=0, work=work
            )
    return found


def given_rows(groups: Sequence[Group]) -> np.ndarray:
    """Returns the rows with given responses, but those on which a teacher failed: bool [rows]."""
    pairs = (pair for group in groups for pair in zip(group.samples, group.scores, strict=True))
    return np.array([sample.given and not score.error for sample, score in pairs], bool)


def advised(
    run: TrainRun, advantages: Advantages, taught: Taught, groups: Sequence[Group], rows: np.ndarray
) -> tuple[Advantages, Taught]:
    """Adds the teachers' logprobs of the sampled tokens to the advantages of the loaded rows (bool [rows]).

    Adds nothing if the objective is a term of the loss. Else it notes the divergence.
    """
    distillation = run.recipe.algorithm.distillation
    if distillation is None or distillation.objective.in_loss:
        return advantages, taught
    if run.recipe.teachers_on_ranks and rows.any():
        taught = taught.with_ranks(run)
    sampled = [sample.logprobs for group in groups for sample in group.samples]
    student = taught.logprobs.with_values(np.concatenate([np.empty(0, np.float32), *sampled]))
    chosen = np.repeat(rows, student.lengths)
    teacher = student.with_values(np.where(chosen, taught.logprobs.values, np.float32(np.nan)))
    divergence = student.with_values(student.values - teacher.values)
    return distillation.taught(advantages, student, teacher), replace(taught, divergence=divergence)
