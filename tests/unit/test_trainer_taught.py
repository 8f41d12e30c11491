"""The teachers' part in a step on the driver: rows' teachers, advantages, metrics, and the passes that ranks run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.distillation import DistillationConfig
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.batching.rank_batches import sequences_of
from megagrpo.rollout.requests import training_order
from megagrpo.track.metrics import undocumented
from megagrpo.trainer.schedule import Live, grpo_step
from megagrpo.trainer.step import given_rows, load, sample, train, train_sequences
from megagrpo.trainer.step_metrics import step_metrics, step_proof
from megagrpo.trainer.taught import Taught, taught_of, teacher_metrics
from megagrpo.types import Group, Prompt, Sample, TeacherTokens
from tests.step_fakes import make_run
from tests.tiny_run import recipe_with

TEACHERS = ("teachers={a: {kind: server, path: x}, b: {kind: ranks, path: x}, c: {kind: reference}}",)
ONLY = "teachers={a: {kind: ranks, path: x}}"


def sample_of(logprobs: list[float], teacher: list[float] | None = None) -> Sample:
    tokens = np.arange(len(logprobs), dtype=np.int32)
    taught = None
    if teacher is not None:
        ids = np.stack([tokens, tokens + 1], 1)
        taught = TeacherTokens(np.array(teacher, np.float32), ids, np.log(np.full(ids.shape, 0.25, np.float32)))
    values = np.array(logprobs, np.float32)
    return Sample("p", 0, tokens, values, np.zeros(len(tokens), np.int32), "stop", "", teacher=taught)


def group_of(source: str, *samples: Sample, **extra_info: Any) -> Group:
    return Group(Prompt("p", (1, 2), source, "", extra_info=extra_info), samples)


def test_rows_have_the_teacher_of_their_column_then_of_their_source() -> None:
    settings = DistillationConfig(by_source={"math*": "a", "math_hard": "b", "code": None}, column="teacher")
    given = [("math_easy", {}), ("math_hard", {}), ("code", {}), ("other", {}), ("code", {"teacher": "c"})]
    given += [("math_easy", {"teacher": ""}), ("math_easy", {"teacher": None})]
    assert [settings.teacher_of(*row, "only") for row in given] == ["a", "b", None, None, "c", None, "a"]
    assert DistillationConfig().teacher_of("any", {}, "only") == "only"
    with pytest.raises(ValueError, match="teacher: 3"):
        settings.teacher_of("code", {"teacher": 3}, None)


def test_advantages_get_the_difference_of_logprobs_where_there_is_a_teacher() -> None:
    lengths = np.array([2, 1, 2])
    of_rows = Advantages(np.array([1.0, -1.0, 0.5]))
    student = Ragged(np.array([-1.0, -2.0, -3.0, -1.0, -1.0], np.float32), ragged_zeros(lengths).offsets)
    teacher = student.with_values(np.array([-2.0, -1.5, np.nan, -1.0, np.nan], np.float32))
    taught = DistillationConfig(weight=0.5).taught(of_rows, student, teacher)
    assert taught.of_tokens is not None
    np.testing.assert_allclose(taught.of_tokens.values, [0.5, 1.25, -1.0, 0.5, 0.5])
    np.testing.assert_allclose(taught.of_rows, [0.875, -1.0, 0.5])


def test_metrics_are_means_over_tokens_with_a_teacher_also_by_source() -> None:
    groups = [group_of("math", sample_of([-1.0, -1.0])), group_of("code", sample_of([-1.0]), sample_of([-1.0]))]
    values = ragged_zeros([2, 1, 1], np.float32).with_values(np.array([0.5, 0.1, np.nan, 0.3], np.float32))
    agreement = values.with_values(np.array([1, 0, np.nan, 1], np.float32))
    found = teacher_metrics(Taught(["a", None, "a"], values, values, agreement), groups)
    assert found == pytest.approx(
        {
            "teacher/tokens_share": 0.75,
            "teacher/divergence": 0.3,
            "teacher/agreement": 2 / 3,
            "teacher/given_share": 0.0,
            "teacher/divergence/code": 0.3,
            "teacher/divergence/math": 0.3,
        }
    )
    assert not undocumented(found)


def test_sequences_have_their_teachers_and_what_these_said() -> None:
    recipe = recipe_with(*TEACHERS, "algorithm.distillation={by_source: {x: a, y: c}}")
    groups = [group_of("x", sample_of([-1.0, -2.0], [-0.5, -0.7])), group_of("y", sample_of([-1.0])), group_of("z")]
    taught = taught_of(recipe, groups)
    assert taught is not None
    assert taught.teacher_of_row == ["a", "c"]
    np.testing.assert_allclose(taught.logprobs.values, [-0.5, -0.7, np.nan])
    asked, other = train_sequences(groups, np.ones(2, bool), teachers=[0, 2])
    assert (asked.teacher, other.teacher, other.taught) == (0, 2, None)
    assert asked.taught is not None
    assert asked.taught.ids.shape == (2, 2)


def equal(prompt: int) -> list[float | None]:
    return [0.0] * 4


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (["algorithm.distillation.objective=full_vocabulary"], ["load_batch", "compute_teachers", "update"]),
        (["algorithm.distillation={}"], ["load_batch", "compute_teachers", "update"]),
        (["algorithm.distillation={objective: full_vocabulary, by_source: {elsewhere: a}}"], []),
    ],
)
def test_rows_with_a_teacher_are_trained_on_though_their_scores_are_equal(
    overrides: list[str], passes: list[str]
) -> None:
    run = make_run(ONLY, *overrides, scores=equal)
    run.policy.by_token = lambda method, lengths, absent=0.0: ragged_zeros(lengths, np.float32)
    done = grpo_step(run, Live(run), 1, 0.0)
    assert [call for call in run.policy.calls if call in ("load_batch", "compute_teachers", "update")] == passes
    assert not undocumented(done.metrics)
    assert ("teacher/divergence" in done.metrics) == bool(passes)


def test_a_response_whose_teacher_failed_is_not_trained_on() -> None:
    run = make_run(
        "teachers={a: {kind: server, path: x}}", "algorithm.distillation={}", scores=lambda p: [None, 0, 0, 0]
    )
    whole = run.rollouts.generate

    def generate(prompts: Any, step: int) -> list[Group]:
        def heard(sample: Sample) -> Sample:
            said = np.full(len(sample.tokens), -0.5, np.float32)
            return replace(
                sample, teacher=TeacherTokens(said, np.zeros((len(said), 0), np.int32), said[:, None][:, :0])
            )

        return [
            replace(group, samples=(group.samples[0], *map(heard, group.samples[1:]))) for group in whole(prompts, step)
        ]

    run.rollouts.generate = generate
    grpo_step(run, Live(run), 1, 0.0)
    assert all(row % 4 for row in run.policy.rows)
    assert len(run.policy.rows) == 12


def with_answers(run: Any, share: float) -> Any:
    """The run with given responses of 3 tokens in every row."""
    of_recipe = (
        f"algorithm.distillation={{objective: full_vocabulary, given_responses: {{share: {share}, column: answer}}}}"
    )
    recipe = recipe_with(ONLY, of_recipe, "rollout.dynamic_sampling={}", "rollout.samples_per_prompt=4")
    whole = run.rollouts.generate

    def generate(prompts: Any, step: int) -> list[Group]:
        answered = [replace(one, given=(7, 8, 9), extra_info={"answer": "x"}) for one in prompts]
        orders = [training_order(recipe, one, step) for one in answered]
        pairs = zip(orders, whole(answered, step), strict=True)
        return [order.group() if order.complete else group for order, group in pairs]

    run.rollouts.generate = generate
    return replace(run, recipe=recipe)


def test_given_responses_are_trained_on_without_an_advantage_and_count_in_the_teachers_metrics_alone() -> None:
    run = with_answers(make_run(scores=lambda prompt: [0, 0, 1, 1]), share=0.2)
    run.policy.by_token = lambda method, lengths, absent=0.0: ragged_zeros(lengths, np.float32)
    sampled = sample(run, 1)
    given = [group for group in sampled.all if group.given]
    assert 0 < len(given) < len(sampled.all) == 4, "dynamic sampling keeps them"
    run.clock.take()
    trained = train(run, load(run, sampled, 1, 0.0), 1)
    rows = given_rows(sampled.groups)
    assert rows.sum() == len(given)
    assert trained.rows.all()
    assert not trained.advantages.of_rows[rows].any()
    assert trained.advantages.of_rows[~rows].all()
    sequences = sequences_of(*trained.batches)
    assert sorted(one.row for one in sequences if one.given) == np.flatnonzero(rows).tolist()
    found = step_metrics(run, sampled, trained, 1, 0.0)
    others = [group for group in sampled.all if not group.given]
    of_others = step_metrics(run, replace(sampled, all=others), trained, 1, 0.0)
    assert found == of_others | {"groups/sampled": 4.0}
    assert found["response_tokens/mean"] == pytest.approx(3.5)
    assert found["reward/mean"] == 0.5
    assert found["groups/with_signal_share"] == 1.0
    tokens = 3 * len(given) + 14 * (4 - len(given))
    assert found["teacher/given_share"] == pytest.approx(3 * len(given) / tokens)
    assert not undocumented(found)
    proof = step_proof(run, sampled, trained)
    assert proof is not None
    assert proof.tokens == sum(count for _, count in proof.versions) == 14 * (4 - len(given))


def test_a_step_of_given_responses_alone_is_trained_on() -> None:
    run = with_answers(make_run(scores=lambda prompt: [0, 0, 1, 1]), share=1.0)
    run.policy.by_token = lambda method, lengths, absent=0.0: ragged_zeros(lengths, np.float32)
    done = grpo_step(run, Live(run), 1, 0.0)
    assert run.policy.rows == [0, 1, 2, 3]
    assert done.metrics["teacher/given_share"] == 1.0
    assert not {"reward/mean", "response_tokens/mean", "advantages/mean"} & done.metrics.keys()
    assert done.proof is not None
    assert (done.proof.tokens, done.proof.versions) == (0, ())
