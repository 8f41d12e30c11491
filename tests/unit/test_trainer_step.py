"""One step on the driver: what is sampled, which passes run in what order, what is trained on, what comes after it."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algorithm.ragged import Ragged
from megagrpo.errors import EngineError, NodeLostError, Problem
from megagrpo.recipe.defaults import prompts_of_round
from megagrpo.routes import Routes
from megagrpo.track.metrics import undocumented
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.run import SampleSource, Step
from megagrpo.trainer.sampling import Background
from megagrpo.trainer.schedule import Live, grpo_step
from megagrpo.trainer.step import (
    ATTEMPTS,
    agent_errors,
    any_ended,
    baselines_of,
    critic_learning_rate,
    policy_learning_rate,
    sample,
    solved_prompts,
    train_sequences,
    with_routes,
    with_signal,
)
from megagrpo.types import Group, Prompt
from tests.agent_runs import calculator_run, group_of
from tests.step_fakes import FakeRollouts, Scores, make_run

DYNAMIC = "rollout.dynamic_sampling={rounds_max: 3}"
KL = "algorithm.kl={coefficient: 0.5, placement: reward}"
REMAX = "algorithm.advantage.name=remax"
PPO = ("algorithm.advantage.name=gae", "algorithm.critic={lr: 1e-3, warmup_steps: 1}")


def one_right(prompt: int) -> list[float | None]:
    return [1.0, 0.0, 0.0, 0.0]


def only_prompt_one_differs(prompt: int) -> list[float | None]:
    return [1.0, 0.0, 0.0, None] if prompt == 1 else [1.0] * 4


def stepped(*overrides: str, scores: Scores = one_right, step: int = 1, **more: Any) -> tuple[Any, Step]:
    """A run after one step over prompts in their order, and the step."""
    run = make_run(*overrides, scores=scores, shuffle=False, **more)
    done = grpo_step(run, Live(run), step, run.recipe.algorithm.kl.coefficient)
    assert not undocumented(done.metrics)
    return run, done


@pytest.mark.parametrize("method", ["grpo", "remax"])
@pytest.mark.parametrize("given_up", [2, 3])
def test_a_step_whose_responses_engines_all_give_up_on_is_asked_again_and_then_an_error(
    given_up: int, method: str
) -> None:
    run = make_run(f"algorithm.advantage={method}", scores=one_right, shuffle=False)
    whole, left = run.rollouts.generate, [None] * given_up

    def generate(prompts: Sequence[Prompt], step: int) -> list[Group]:
        groups = whole(prompts, step)
        finish = "abort" if left else "stop"
        left.pop() if left else None
        return [replace(group, samples=tuple(replace(s, finish=finish) for s in group.samples)) for group in groups]

    run.rollouts.generate = generate
    if given_up < ATTEMPTS:
        assert grpo_step(run, Live(run), 1, 0.0).metrics["response_tokens/aborted_share"] == 0
    else:
        with pytest.raises(EngineError, match=r"responses of step 1(.|\n)*rollout.timeout_seconds"):
            grpo_step(run, Live(run), 1, 0.0)
        assert "update" not in run.policy.calls


def test_one_greedy_response_that_an_engine_gives_up_on_is_not_asked_again() -> None:
    run = make_run(REMAX, scores=one_right, greedy=lambda prompt: 0.5)
    whole, asked = run.rollouts.generate, []

    def generate(prompts: Sequence[Prompt], step: int) -> list[Group]:
        asked.append(step)
        first, *others = whole(prompts, step)
        return [replace(first, samples=(*first.samples[:-1], replace(first.samples[-1], finish="abort"))), *others]

    run.rollouts.generate = generate
    sample(run, 1)
    assert asked == [1]


def test_groups_in_which_all_agents_fail_have_not_ended_however_they_are_scored() -> None:
    failed = group_of(calculator_run(counts={"failed": 1.0}))
    assert not any_ended([failed, group_of(calculator_run(error="longer than 9 s"))])
    assert any_ended([failed, group_of(calculator_run())])


def test_turns_that_engines_give_up_on_are_not_the_agents_fault() -> None:
    raised = calculator_run(error="ValueError: x", counts={"failed": 1.0})
    late = calculator_run(error="longer than 9 s", counts={"late": 1.0})
    aborted = calculator_run(error="the engine gave up on a turn")
    assert agent_errors([group_of(aborted, calculator_run())]) == ""
    assert agent_errors([group_of(late, raised, aborted, raised)]) == (
        "ValueError: x (2 times); longer than 9 s (1 times)"
    )


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ({}, "never asked"),
        ({"refused/context_length_exceeded": 1.0}, "context_length_exceeded"),
        ({"refused/turn_aborted": 1.0}, ""),
    ],
)
def test_rollouts_without_a_token_have_not_ended_and_the_reason_is_said(counts: dict[str, float], why: str) -> None:
    nothing = calculator_run(branches=(), turns=(), messages=(), events=(), counts=counts)
    assert not any_ended([group_of(nothing, nothing)])
    said = agent_errors([group_of(nothing, nothing)])
    assert why in said
    assert bool(why) == bool(said)


@pytest.mark.parametrize(
    ("scores", "skipped", "changed"), [([1, 0, 0, 0], 0, True), ([1, 0, 0, 0], 2, False), ([1, 1, 1, 1], 0, False)]
)
def test_engines_are_told_whether_a_step_has_changed_weights(
    scores: list[float], skipped: int, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(scores=lambda prompt: scores)
    update = run.policy.update

    def skipping(*given: Any) -> Any:
        updated = update(*given)
        updated.skipped_steps, updated.grad_norm = skipped, math.nan if skipped else 1.0
        return updated

    monkeypatch.setattr(run.policy, "update", skipping)
    grpo_step(run, Live(run), 1, 0.0)
    assert run.weights.changed == changed


def test_engines_get_no_weights_of_a_step_in_which_the_run_was_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(scores=lambda prompt: [1, 0, 0, 0])
    monkeypatch.setattr(run.stopping, "signal", signal.SIGTERM)
    monkeypatch.setattr(run.weights, "sync", lambda *given, **how: pytest.fail("synced"))
    Live(run).sync(1, changed=True)


@pytest.mark.parametrize("where", ["finish", "sync"])
def test_a_node_that_is_lost_once_a_step_is_trained_is_a_failure_after_that_step(where: str) -> None:
    run = make_run("cluster.placement=disaggregated", "schedule=one_step_off", scores=one_right)
    lost = NodeLostError(Problem("node b"))

    def lose(*given: object, **how: object) -> None:
        raise lost

    run.rollouts.changed, run.rollouts.so_far = threading.Condition(), lambda: dict
    run.rollouts.wait = lose if where == "finish" else lambda until: None
    run.weights.sync, source = lose, Background(run)
    source.next = partial(sample, run)  # type: ignore[method-assign]
    assert grpo_step(run, source, 1, 0.0).failure is lost
    assert run.policy.step == 1
    source.close()


class Repeated(SampleSource):
    """The same samples in each step."""

    def __init__(self, sampled: Sampled) -> None:
        self.sampled, self.synced = sampled, list[tuple[int, bool]]()

    def next(self, step: int) -> Sampled:
        return self.sampled

    def sync(self, version: int, *, changed: bool) -> None:
        self.synced.append((version, changed))


def test_a_step_trains_on_the_samples_of_any_source() -> None:
    run, live = stepped(scores=only_prompt_one_differs)
    source, again = Repeated(live.sampled), make_run(scores=lambda prompt: [])
    done = grpo_step(again, source, 1, 0.0)
    assert done.metrics.items() <= live.metrics.items()
    assert (again.policy.calls, again.policy.rows) == (run.policy.calls, run.policy.rows)
    np.testing.assert_array_equal(again.policy.advantages, run.policy.advantages)
    assert source.synced == [(1, True)]


@pytest.mark.parametrize(
    ("override", "waits"),
    [("weights.pause=finish", True), ("rollout.layout={pipeline: 2}", True), ("weights.pause=in_place", False)],
)
def test_the_wait_for_what_engines_finish_before_a_sync_is_one_for_samples(override: str, waits: bool) -> None:
    run = make_run(override, scores=one_right)
    drained: list[float] = []
    run.rollouts.drain = lambda: drained.append(time.sleep(0.1) or 0.1)
    grpo_step(run, Live(run), 1, 0.0)
    assert bool(drained) == waits
    assert run.clock.take()["seconds/rollout"] >= sum(drained)


def calls(*overrides: str, scores: Scores = one_right, step: int = 1) -> list[str]:
    return stepped(*overrides, scores=scores, step=step)[0].policy.calls


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([], []),
        (["algorithm.minibatches=2"], ["compute_old_logprobs"]),
        (["algorithm.epochs=2"], ["compute_old_logprobs"]),
        (["algorithm.loss.name=clip_cov"], ["compute_old_logprobs"]),
        (["algorithm.correction.weights=token"], ["compute_old_logprobs"]),
        (["algorithm.correction.veto=1e-4"], ["compute_old_logprobs"]),
        (["algorithm.correction.reject=[{level: token, high: 2.0}]"], ["compute_old_logprobs"]),
        (["algorithm.rollout_logprobs_as_old=true", "algorithm.minibatches=2"], ["use_rollout_logprobs_as_old"]),
        (["algorithm.kl.coefficient=0.1"], ["compute_reference_logprobs"]),
        ([KL], ["compute_old_logprobs", "compute_reference_logprobs"]),
    ],
)
def test_only_the_passes_that_something_reads_are_run(overrides: list[str], passes: list[str]) -> None:
    assert calls(*overrides) == ["load_batch", *passes, "update"]


def test_ppo_computes_values_then_updates_the_critic_and_after_its_warm_up_the_policy() -> None:
    assert calls(*PPO, step=1) == ["load_batch", "compute_values", "update_critic"]
    assert calls(*PPO, step=2) == ["load_batch", "compute_values", "update_critic", "update"]


def test_while_the_policy_waits_only_passes_that_advantages_need_are_run() -> None:
    more = (*PPO, "algorithm.minibatches=2")
    assert "compute_old_logprobs" not in calls(*more, step=1)
    assert "compute_old_logprobs" in calls(*more, step=2)
    assert "compute_old_logprobs" in calls(*more, KL, step=1)


def test_the_schedule_of_the_policy_begins_when_the_critics_warm_up_is_over() -> None:
    run, done = stepped(*PPO, "train.optimizer={lr: 1e-4, warmup_steps: 2, schedule: linear}", step=2)
    assert done.metrics["lr"] == pytest.approx(5e-5)
    assert policy_learning_rate(run.recipe, 3, 10) == pytest.approx(1e-4)
    assert 0 < policy_learning_rate(run.recipe, 10, 10) < 2e-5


def test_the_critic_learns_returns_at_its_own_rate() -> None:
    settings = ("train.optimizer={lr: 1e-4, warmup_steps: 2}", "algorithm.advantage.trace=0.9")
    run, done = stepped(*PPO, *settings, step=2)
    assert "groups/with_signal_share" not in done.metrics, "with a critic every response teaches"
    assert run.policy.critic_lr == done.metrics["critic/lr"] == pytest.approx(1e-3)
    assert critic_learning_rate(run.recipe, 1, 10) == pytest.approx(5e-4)
    assert isinstance(run.policy.advantages, Ragged)
    assert run.policy.returns.row(0)[-1] == 1.0  # all values are 0, and the score is at the last token
    assert run.policy.returns.row(0)[0] == pytest.approx(0.9)


def test_groups_without_signal_and_masked_samples_are_not_trained_on() -> None:
    run, done = stepped(scores=only_prompt_one_differs)
    assert run.policy.rows == [4, 5, 6]
    assert done.metrics["groups/with_signal_share"] == 0.25
    assert run.policy.advantages[7] == 0.0


@pytest.mark.parametrize(
    "override",
    [
        *("algorithm.skip_groups_without_signal=false", "algorithm.advantage.name=gpg", KL),
        "algorithm.advantage.name=reinforce_plus_plus",
    ],
)
def test_groups_without_signal_stay_where_they_count(override: str) -> None:
    run, _ = stepped(override, scores=only_prompt_one_differs)
    assert run.policy.rows == [row for row in range(16) if row != 7]


def test_routes_go_with_the_sequences_and_rows_without_them_are_left_out_by_replay() -> None:
    prompt = Prompt("p0", (1, 2, 3), "sums", "4")
    (group,) = FakeRollouts(2).generate([prompt], 1)
    sample, other = group.samples
    read = len(group.prompt.tokens) + len(sample.tokens) - 1
    routes = Routes.of(np.tile(np.arange(2), (read, 3, 1)))
    routed = replace(group, samples=(replace(sample, routes=routes), other))
    with pytest.raises(EngineError, match="no kept sets"):
        train_sequences([routed], np.ones(2, bool), narrowed=True)
    first, second = train_sequences([routed], np.ones(2, bool))
    assert first.routes is not None
    assert (first.routes.experts == routes.experts).all()
    assert second.routes is None
    surplus = Routes.of(np.concatenate([routes.experts, routes.experts[-1:]]))
    with pytest.raises(EngineError, match=f"sample {sample.index} of prompt {group.prompt.id}"):
        train_sequences([replace(group, samples=(replace(sample, routes=surplus), other))], np.ones(2, bool))
    assert with_routes([routed], np.ones(2, bool)).tolist() == [True, False]
    assert not with_routes([routed], np.zeros(2, bool)).any()
    with pytest.raises(EngineError, match=f"sample {other.index} of prompt {group.prompt.id}"):
        with_routes([routed], np.array([False, True]))


def test_kl_in_the_reward_is_subtracted_from_scores_and_not_in_the_loss() -> None:
    run, _ = stepped(KL, "algorithm.advantage.standard_deviation=none", scores=lambda prompt: [0.0] * 4)
    # Responses of 2 to 5 tokens, a KL of 0.1 at each, a coefficient of 0.5.
    assert run.policy.advantages[:4] == pytest.approx(-0.05 * (np.array([2, 3, 4, 5]) - 3.5))
    assert run.policy.kl_coefficient == 0.0


def test_kl_in_the_loss_leaves_scores_alone() -> None:
    run, done = stepped("algorithm.kl.coefficient=0.25")
    assert run.policy.kl_coefficient == done.kl_coefficient == 0.25


def test_a_coefficient_adapts_by_the_divergence_of_the_step() -> None:
    settings = "algorithm.kl={coefficient: 0.5, target: 0.05, horizon: 160}"
    _, done = stepped(settings)
    assert done.metrics["kl/coefficient"] == 0.5
    assert done.kl_coefficient == pytest.approx(0.5 * (1 + 0.2 * 16 / 160))


def test_the_reference_follows_every_so_many_steps_also_when_nothing_was_learnt() -> None:
    follows = ("algorithm.kl.coefficient=0.1", "algorithm.reference.update_every_steps=2")
    assert "update_reference" not in calls(*follows, step=1)
    assert calls(*follows, step=2)[-1] == "update_reference"
    assert calls(*follows, step=2, scores=lambda prompt: [1.0] * 4) == ["update_reference"]


@pytest.mark.parametrize("overrides", [[], [KL], PPO, [DYNAMIC], [REMAX]])
def test_a_step_without_any_score_trains_nothing_and_goes_on(overrides: list[str]) -> None:
    assert calls(*overrides, scores=lambda prompt: [None] * 4, step=2) == []


def test_rows_whose_greedy_response_has_no_score_are_left_out() -> None:
    run, done = stepped(REMAX, greedy=lambda prompt: None if prompt == 2 else 0.5)
    assert run.policy.rows == [*range(8), *range(12, 16)]
    assert run.policy.advantages[:4] == pytest.approx([0.5, -0.5, -0.5, -0.5])
    assert done.metrics["reward/greedy"] == 0.5
    assert done.metrics["reward/mean"] == 0.25


def test_dynamic_sampling_trains_on_what_it_has_and_says_what_it_took() -> None:
    run, done = stepped("rollout.dynamic_sampling={rounds_max: 2}", scores=only_prompt_one_differs)
    assert run.policy.rows == [0, 1, 2]  # of the only group that is left
    assert [group.prompt.id for group in done.sampled.groups] == ["p1"]
    assert len(done.sampled.all) == 8
    found = {name: done.metrics[f"groups/{name}"] for name in ("rounds", "sampled", "left_over", "missing")}
    assert found == {"rounds": 2, "sampled": 8, "left_over": 0, "missing": 3}


# --- what is sampled --------------------------------------------------------------------------------------------------


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


def test_groups_without_signal_are_replaced_by_new_prompts_in_their_order() -> None:
    run = make_run(
        DYNAMIC, scores=lambda prompt: [1.0, 0.0, 0.0, 0.0] if prompt % 2 else [1.0, 1.0, None, 1.0], shuffle=False
    )
    found = sample(run, 1)
    # Round 1 has prompts 0 to 3, of which 1 and 3 teach something: 4 more should bring the 2 missing groups.
    assert ids(found.all) == [f"p{i}" for i in range(8)]
    assert ids(found.groups) == ["p1", "p3", "p5", "p7"]
    assert (found.rounds, found.left_over) == (2, 0)
    assert run.cursor.position == 8


def test_what_a_round_brings_too_much_is_left_over() -> None:
    run = make_run(DYNAMIC, scores=lambda prompt: [float(prompt == 0 or prompt > 3), 0.0, 0.0, 0.0], shuffle=False)
    found = sample(run, 1)
    assert ids(found.groups) == ["p0", "p4", "p5", "p6"]
    assert (found.rounds, found.left_over) == (2, 1)


def test_rounds_are_bounded_and_prompts_that_come_again_are_other_samples() -> None:
    run = make_run(DYNAMIC, scores=lambda prompt: [1.0] * 4, prompts=4)
    found = sample(run, 1)
    assert (len(found.groups), len(found.all), found.rounds) == (0, 12, 3)
    assert len(run.rollouts.asked) == len(set(run.rollouts.asked)) == 12


@given(st.integers(1, 64), st.data())
def test_a_round_is_as_large_as_the_share_with_signal_asks_for(wanted: int, data: st.DataObject) -> None:
    sampled = data.draw(st.integers(1, 300))
    useful = data.draw(st.integers(0, min(sampled, wanted - 1)))
    count = prompts_of_round(wanted, useful, sampled)
    assert 1 <= count <= wanted
    if useful and count < wanted:
        assert count == math.ceil((wanted - useful) / (useful / sampled) - 1e-9)


@pytest.mark.parametrize(
    ("advantage", "weight", "second", "with_one"), [("gdpo", 1, 0, 4), ("gdpo", 0, 1, 0), ("grpo", 1, 0, 0)]
)
def test_for_gdpo_a_group_has_signal_if_any_function_that_counts_differs(
    advantage: str, weight: int, second: int, with_one: int
) -> None:
    functions = f"[{{function: gsm8k}}, {{function: format, arguments: {{pattern: a}}, weight: {weight}}}]"
    counted = [(1, 0), (second, 1)] * 2
    overrides = (f"algorithm.advantage.name={advantage}", f"reward.functions={functions}")
    run = make_run(*overrides, scores=lambda prompt: [1.0] * 4, counted=counted)
    assert len(with_signal(sample(run, 1).groups, run.recipe)) == with_one


def test_remax_scores_one_greedy_response_for_each_prompt_and_trains_on_none() -> None:
    found = sample(make_run(REMAX, scores=one_right, greedy=lambda prompt: 0.5), 1)
    assert np.array_equal(baselines_of(found.groups), [0.5] * 4)
    assert all(len(group.samples) == 4 for group in found.all)


def test_a_prompt_is_solved_by_a_share_of_all_responses_that_is_met_exactly() -> None:
    run = make_run("rollout.samples_per_prompt=25", scores=lambda prompt: [1.0] * 7 + [0.0] * 9 + [None] * 9)
    groups = sample(run, 1).groups
    assert solved_prompts(groups, 0.28) == ids(groups)  # 0.28 * 25 is 7.000000000000001
    assert solved_prompts(groups, 0.29) == []


def test_a_prompt_is_set_aside_once_it_is_solved_often_enough() -> None:
    run = make_run(
        "data.no_resampling_pass_rate=0.75", scores=lambda prompt: [1.0, 1.0, float(prompt < 2), 0.0], prompts=8
    )
    for step in (1, 2):
        grpo_step(run, Live(run), step, 0.0)
    assert run.cursor.set_aside_count == 2
    before = len(run.rollouts.asked)
    for step in range(3, 9):
        grpo_step(run, Live(run), step, 0.0)
    assert {name.partition("+")[0] for name in run.rollouts.asked[before:]} == {f"p{i}" for i in range(2, 8)}


@pytest.mark.parametrize("resumed_after", [1, 3])
def test_a_resumed_run_samples_the_same_prompts(resumed_after: int) -> None:
    overrides = (DYNAMIC, "data.no_resampling_pass_rate=1.0")
    whole, first, second = (
        make_run(*overrides, scores=lambda prompt: [1.0, 1.0, 1.0, float(prompt % 3 == 0)]) for _ in range(3)
    )
    expected = [ids(grpo_step(whole, Live(whole), step, 0.0).sampled.all) for step in range(1, 6)]
    found = [ids(grpo_step(first, Live(first), step, 0.0).sampled.all) for step in range(1, resumed_after + 1)]
    second.cursor.restore(json.loads(json.dumps(first.cursor.state())))
    found += [ids(grpo_step(second, Live(second), step, 0.0).sampled.all) for step in range(resumed_after + 1, 6)]
    assert found == expected
    assert second.cursor.set_aside_count == whole.cursor.set_aside_count > 0
