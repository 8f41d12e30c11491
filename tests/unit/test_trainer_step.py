"""One step on the driver: which passes run in what order, what is trained on, and what the next step inherits."""

from __future__ import annotations

import numpy as np
import pytest

from megagrpo.algorithm.ragged import Ragged
from megagrpo.recipe.passes import needs_old_logprobs
from megagrpo.track.metrics import undocumented
from megagrpo.trainer.step import critic_learning_rate, grpo_step, policy_learning_rate
from tests.step_fakes import Scores, make_run

KL = "algorithm.kl={coefficient: 0.5, placement: reward}"
PPO = ("algorithm.advantage.name=gae", "algorithm.critic={lr: 1e-3, warmup_steps: 1}")


def one_right(prompt: int) -> list[float | None]:
    return [1.0, 0.0, 0.0, 0.0]


def only_prompt_one_differs(prompt: int) -> list[float | None]:
    return [1.0, 0.0, 0.0, None] if prompt == 1 else [1.0] * 4


def calls(*overrides: str, scores: Scores = one_right, step: int = 1) -> list[str]:
    run = make_run(*overrides, scores=scores)
    done = grpo_step(run, step, run.recipe.algorithm.kl.coefficient)
    assert not undocumented(done.metrics)
    return run.policy.calls


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


def test_old_logprobs_are_needed_whenever_anything_reads_them() -> None:
    assert not needs_old_logprobs(make_run(scores=one_right).recipe.algorithm)
    assert needs_old_logprobs(make_run(KL, scores=one_right).recipe.algorithm)


def test_ppo_computes_values_then_updates_the_critic_and_after_its_warm_up_the_policy() -> None:
    assert calls(*PPO, step=1) == ["load_batch", "compute_values", "update_critic"]
    assert calls(*PPO, step=2) == ["load_batch", "compute_values", "update_critic", "update"]


def test_while_the_policy_waits_only_passes_that_advantages_need_are_run() -> None:
    more = (*PPO, "algorithm.minibatches=2")
    assert "compute_old_logprobs" not in calls(*more, step=1)
    assert "compute_old_logprobs" in calls(*more, step=2)
    assert "compute_old_logprobs" in calls(*more, KL, step=1)


def test_the_schedule_of_the_policy_begins_when_the_critics_warm_up_is_over() -> None:
    run = make_run(*PPO, "train.optimizer={lr: 1e-4, warmup_steps: 2, schedule: linear}", scores=one_right)
    assert grpo_step(run, 2, 0.0).metrics["lr"] == pytest.approx(5e-5)
    assert policy_learning_rate(run.recipe, 3, 10) == pytest.approx(1e-4)
    assert 0 < policy_learning_rate(run.recipe, 10, 10) < 2e-5


def test_the_critic_learns_returns_at_its_own_rate() -> None:
    run = make_run(
        *PPO, "train.optimizer={lr: 1e-4, warmup_steps: 2}", "algorithm.advantage.trace=0.9", scores=one_right
    )
    done = grpo_step(run, 2, 0.0)
    assert run.policy.critic_lr == done.metrics["critic/lr"] == pytest.approx(1e-3)
    assert critic_learning_rate(run.recipe, 1, 10) == pytest.approx(5e-4)
    assert isinstance(run.policy.advantages, Ragged)
    assert run.policy.returns.row(0)[-1] == 1.0  # all values are 0, and the score is at the last token
    assert run.policy.returns.row(0)[0] == pytest.approx(0.9)


def test_groups_without_signal_and_masked_samples_are_not_trained_on() -> None:
    run = make_run(scores=only_prompt_one_differs, shuffle=False)
    done = grpo_step(run, 1, 0.0)
    assert run.policy.rows == [4, 5, 6]
    assert done.metrics["groups/with_signal_share"] == 0.25
    assert run.policy.advantages[7] == 0.0


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.skip_groups_without_signal=false"],
        ["algorithm.advantage.name=gpg"],
        [KL],
        ["algorithm.advantage.name=reinforce_plus_plus"],
    ],
)
def test_groups_without_signal_stay_where_they_count(overrides: list[str]) -> None:
    run = make_run(*overrides, scores=only_prompt_one_differs, shuffle=False)
    grpo_step(run, 1, 0.5)
    assert run.policy.rows == [row for row in range(16) if row != 7]


def test_kl_in_the_reward_is_subtracted_from_scores_and_not_in_the_loss() -> None:
    run = make_run(KL, "algorithm.advantage.standard_deviation=none", scores=lambda prompt: [0.0] * 4)
    grpo_step(run, 1, 0.5)
    # Responses of 2 to 5 tokens, a KL of 0.1 at each, a coefficient of 0.5.
    assert run.policy.advantages[:4] == pytest.approx(-0.05 * (np.array([2, 3, 4, 5]) - 3.5))
    assert run.policy.kl_coefficient == 0.0


def test_kl_in_the_loss_leaves_scores_alone() -> None:
    run = make_run("algorithm.kl.coefficient=0.5", scores=one_right)
    grpo_step(run, 1, 0.25)
    assert run.policy.kl_coefficient == 0.25


def test_a_coefficient_adapts_by_the_divergence_of_the_step() -> None:
    settings = "algorithm.kl={coefficient: 0.5, target: 0.05, horizon: 160}"
    run = make_run(settings, scores=one_right)
    done = grpo_step(run, 1, 0.5)
    assert done.metrics["kl/coefficient"] == 0.5
    assert done.kl_coefficient == pytest.approx(0.5 * (1 + 0.2 * 16 / 160))
    fixed = grpo_step(make_run("algorithm.kl.coefficient=0.5", scores=one_right), 1, 0.5)
    assert fixed.kl_coefficient == 0.5


def test_the_reference_follows_every_so_many_steps_also_when_nothing_was_learnt() -> None:
    follows = ("algorithm.kl.coefficient=0.1", "algorithm.reference.update_every_steps=2")
    assert "update_reference" not in calls(*follows, step=1)
    assert calls(*follows, step=2)[-1] == "update_reference"
    assert calls(*follows, step=2, scores=lambda prompt: [1.0] * 4) == ["update_reference"]


@pytest.mark.parametrize(
    "overrides",
    [[], [KL], PPO, ["rollout.dynamic_sampling={}"], ["algorithm.advantage.name=remax"]],
)
def test_a_step_without_any_score_trains_nothing_and_goes_on(overrides: list[str]) -> None:
    assert calls(*overrides, scores=lambda prompt: [None] * 4, step=2) == []


def test_rows_whose_greedy_response_has_no_score_are_left_out() -> None:
    run = make_run(
        "algorithm.advantage.name=remax",
        scores=one_right,
        greedy=lambda prompt: None if prompt == 2 else 0.5,
        shuffle=False,
    )
    done = grpo_step(run, 1, 0.0)
    assert run.policy.rows == [*range(8), *range(12, 16)]
    assert run.policy.advantages[:4] == pytest.approx([0.5, -0.5, -0.5, -0.5])
    assert done.metrics["reward/greedy"] == 0.5
    assert done.metrics["reward/mean"] == 0.25


def test_dynamic_sampling_trains_on_what_it_has_and_says_what_it_took() -> None:
    run = make_run("rollout.dynamic_sampling={rounds_max: 2}", scores=only_prompt_one_differs, shuffle=False)
    done = grpo_step(run, 1, 0.0)
    assert run.policy.rows == [0, 1, 2]  # of the only group that is left
    assert [group.prompt.id for group in done.groups] == ["p1"]
    assert len(done.sampled) == 8
    found = {name: done.metrics[f"groups/{name}"] for name in ("rounds", "sampled", "left_over", "missing")}
    assert found == {"rounds": 2, "sampled": 8, "left_over": 0, "missing": 3}
