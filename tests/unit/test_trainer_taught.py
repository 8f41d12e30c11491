"""The teachers' part in a step on the driver: rows' teachers, advantages, metrics, and the passes that ranks run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.distillation import DistillationConfig
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.batching.rank_batches import sampled_sequences
from megagrpo.errors import EngineError, TeacherError
from megagrpo.rollout.requests import training_order
from megagrpo.track.metrics import documented, undocumented
from megagrpo.trainer.schedule import Live, grpo_step
from megagrpo.trainer.step import load, sample, train, train_sequences, with_routes, with_signal
from megagrpo.trainer.step_metrics import step_metrics, step_proof
from megagrpo.trainer.taught import Taught, given_rows, taught_of, teacher_metrics
from megagrpo.types import Group, Prompt, Sample, Score, TeacherTokens
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
    scores = tuple(Score(0.0) for _ in samples)
    return Group(Prompt("p", (1, 2), source, "", extra_info=extra_info), samples, scores)


def test_rows_have_the_teacher_of_their_column_then_of_their_source() -> None:
    settings = DistillationConfig(by_source={"math*": "a", "math_hard": "b", "code": None}, column="teacher")
    given = [("math_easy", {}), ("math_hard", {}), ("code", {}), ("other", {}), ("code", {"teacher": "c"})]
    given += [("math_easy", {"teacher": ""}), ("math_easy", {"teacher": None})]
    assert [settings.teacher_of(*row, "abc") for row in given] == ["a", "b", None, None, "c", None, "a"]
    assert DistillationConfig().teacher_of("any", {}, ["only"]) == "only"
    for named in (3, "d"):
        with pytest.raises(ValueError, match=repr(named)):
            settings.teacher_of("code", {"teacher": named}, "abc")


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
    found = teacher_metrics(Taught(["a", None, "a"], values, values, agreement), np.ones(3, bool), groups)
    assert found == pytest.approx(
        {
            "teacher/tokens_share": 0.75,
            "teacher/divergence": 0.3,
            "teacher/agreement": 2 / 3,
            "teacher/given_share": 0.0,
            "teacher/code/divergence": 0.3,
            "teacher/math/divergence": 0.3,
        }
    )
    assert not undocumented(found)


def test_a_teacher_and_a_data_source_may_have_one_name() -> None:
    names = [metric.name for metric in documented() if metric.name.startswith("teacher/")]
    assert len({re.sub("{.*}", "divergence", name) for name in names}) == len(names)


def test_sequences_have_their_teachers_and_what_these_said() -> None:
    recipe = recipe_with(*TEACHERS, "algorithm.distillation={by_source: {x: a, y: c}}")
    groups = [group_of("x", sample_of([-1.0, -2.0], [-0.5, -0.7])), group_of("y", sample_of([-1.0])), group_of("z")]
    taught = taught_of(recipe, groups)
    assert taught is not None
    assert list(taught.teacher_of_row) == ["a", "c"]
    np.testing.assert_allclose(taught.logprobs.values, [-0.5, -0.7, np.nan])
    asked, other = train_sequences(groups, np.ones(2, bool), teachers=[0, 2], asked={0})
    assert (asked.teacher, other.teacher, other.taught) == (0, 2, None)
    assert asked.taught is not None
    assert asked.taught.ids.shape == (2, 2)


@pytest.mark.parametrize(
    ("objective", "sample"),
    [("sampled_token", sample_of([-1.0])), ("teacher_top_k", sample_of([-1.0])),
     ("{name: teacher_top_k, k: 3}", sample_of([-1.0], [-0.5]))],
)  # fmt: skip
def test_a_scored_sample_without_the_answer_that_the_objective_needs_is_refused(objective: str, sample: Sample) -> None:
    recipe = recipe_with(*TEACHERS, f"algorithm.distillation={{by_source: {{x: a}}, objective: {objective}}}")
    group = group_of("x", sample)
    with pytest.raises(TeacherError, match="teacher a"):
        taught_of(recipe, [group])
    assert taught_of(recipe, [replace(group, scores=(Score(None),))])


@pytest.mark.parametrize("named", [7, "nobody"])
def test_a_column_that_names_no_teacher_is_an_error_of_the_prompt(named: object) -> None:
    recipe = recipe_with(ONLY, "algorithm.distillation={column: teacher}")
    with pytest.raises(TeacherError, match="prompt p"):
        taught_of(recipe, [group_of("x", sample_of([-1.0]), teacher=named)])


def test_no_teacher_is_asked_while_the_critic_warms_up() -> None:
    warm = ["algorithm.advantage.name=gae", "algorithm.critic={lr: 1e-3, warmup_steps: 1}"]
    for step in (1, 2):
        run = make_run(ONLY, "algorithm.distillation={}", *warm, scores=lambda prompt: [1, 0, 0, 0])
        run.policy.by_token = lambda method, lengths, absent=0.0, run=run: (
            run.policy.calls.append(method) or ragged_zeros(lengths, np.float32)
        )
        grpo_step(run, Live(run), step, 0.0)
        asked = {"compute_teachers", "token_teacher"} & set(run.policy.calls)
        assert len(asked) == (0 if step == 1 else 2)


@pytest.mark.parametrize(
    "term",
    [
        "reward.overlong={buffer_tokens: 2, penalty: 1.0}",
        "reward.non_stop_score=-1.0",
        "algorithm.kl.coefficient=0.1",
        "algorithm.loss.name=kl_cov",
        "algorithm.credit=discounted",
    ],
)
def test_teachers_are_not_alone_where_another_term_has_a_gradient(term: str) -> None:
    alone = (
        ONLY,
        "algorithm.distillation.objective=full_vocabulary",
        "reward.functions=[]",
        "algorithm.kl.coefficient=0",
    )
    assert recipe_with(*alone).teachers_alone
    assert not recipe_with(*alone, term).teachers_alone


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
    assert done.metrics["teacher/tokens_share"] == bool(passes)
    assert ("teacher/divergence" in done.metrics) == bool(passes)
    assert not undocumented(done.metrics)


def test_dynamic_sampling_keeps_groups_that_a_teacher_says_something_of() -> None:
    rows = [("taught", 1.0), ("other", 1.0), ("taught", None)]
    groups = [
        replace(group_of(source, sample_of([-1.0]), sample_of([-1.0])), scores=(Score(score),) * 2)
        for source, score in rows
    ]
    recipe = recipe_with(ONLY, "algorithm.distillation.by_source={taught: a}", "rollout.dynamic_sampling={}")
    assert with_signal(groups, recipe) == groups[:1]


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


@pytest.mark.parametrize("credit", ["outcome", "turn_groups"])
def test_groups_without_signal_and_teacher_are_left_out_where_ranks_advise(credit: str) -> None:
    """Scores of every second prompt differ; the teacher of x adds to its tokens' advantages."""
    run = make_run(
        ONLY,
        "algorithm.distillation={by_source: {x: a}}",
        f"algorithm.credit.name={credit}",
        "rollout.prompts_per_step=8",
        scores=lambda prompt: [float(prompt % 2), 0.0, 0.0, 0.0],
    )
    run.policy.by_token = lambda method, lengths, absent=0.0: ragged_zeros(lengths, np.float32)
    sampled = sample(run, 1)
    differ = [group.scores[0].value == 1.0 for group in sampled.groups]
    asked = differ.index(False)
    groups = [
        replace(group, prompt=replace(group.prompt, data_source="x" if at == asked else "y"))
        for at, group in enumerate(sampled.groups)
    ]
    trained = load(run, replace(sampled, groups=groups), 1, 0.0)
    assert 0 < sum(differ) < 7
    assert trained.rows.tolist() == [differs or at == asked for at, differs in enumerate(differ) for _ in range(4)]
    assert trained.advantages.of_tokens is not None
    rows = trained.advantages.of_tokens.row_of_token
    assert (trained.advantages.of_tokens.values[rows // 4 == asked] == 1.0).all()  # log q, 0, less log p, -1


def test_a_step_in_which_teachers_failed_on_all_responses_has_taught_no_token() -> None:
    objective = "algorithm.distillation.objective=teacher_top_k"
    run = make_run("teachers={a: {kind: server, path: x}}", objective, scores=lambda prompt: [None] * 4)
    done = grpo_step(run, Live(run), 1, 0.0)
    assert "update" not in run.policy.calls
    assert done.metrics["teacher/tokens_share"] == 0.0


def with_answers(run: Any, share: float, *overrides: str) -> Any:
    """The run with given responses of 3 tokens in every row."""
    of_recipe = (
        f"algorithm.distillation={{objective: full_vocabulary, given_responses: {{share: {share}, column: answer}}}}"
    )
    recipe = recipe_with(ONLY, of_recipe, "rollout.dynamic_sampling={}", "rollout.samples_per_prompt=4", *overrides)
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
    assert {one.row for one in sampled_sequences(trained.batches)} == {*np.flatnonzero(~rows)}
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


def test_the_kl_coefficient_moves_by_the_sampled_responses_alone() -> None:
    kl = "algorithm.kl={coefficient: 0.5, target: 0.05, horizon: 160}"
    run = with_answers(make_run(scores=lambda prompt: [0, 0, 1, 1]), 0.2, kl)
    run.policy.by_token = lambda method, lengths, absent=0.0: ragged_zeros(lengths, np.float32)
    sampled = sample(run, 1)
    count = sum(len(group.samples) for group in sampled.groups if not group.given)
    assert 0 < count < 16
    with run.clock.phase("rollout"):
        trained = train(run, load(run, sampled, 1, 0.5), 1)
    assert trained.kl_coefficient == pytest.approx(0.5 * (1 + 0.2 * count / 160))


def test_given_responses_have_no_routes_and_excuse_no_sampled_one() -> None:
    group = group_of("x", sample_of([-1.0]))
    given = replace(group, samples=(replace(group.samples[0], finish="given"),))
    assert with_routes([given], np.ones(1, bool)).all()
    with pytest.raises(EngineError, match="no routes"):
        with_routes([given, group], np.ones(2, bool))


def test_an_answer_of_another_runs_teacher_is_not_taken_for_that_of_the_rows_own() -> None:
    recipe = recipe_with(*TEACHERS, "algorithm.distillation={by_source: {x: c}}")
    groups = [group_of("x", sample_of([-1.0], [-0.5])), group_of("none", sample_of([-1.0], [-0.5]))]
    taught = taught_of(recipe, groups)
    assert taught is not None
    assert np.isnan(taught.logprobs.values).all()
    assert [one.taught for one in train_sequences(groups, np.ones(2, bool), teachers=[2, -1], asked={0})] == [
        None,
        None,
    ]
