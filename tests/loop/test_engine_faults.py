"""Engines that die, stay silent or hold wrong bytes in the middle of a weight sync, in a run's own processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from megagrpo.cluster import engine_answers, runtime, weight_sync
from megagrpo.cluster import rollouts as cluster_rollouts
from megagrpo.cluster.engines import EngineActors
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.errors import EngineError, Problem, RankLostError, WeightSyncError
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.rollout import SglangConfig
from megagrpo.recipe.schema.schedule import AsyncConfig
from megagrpo.types import Prompt
from tests.loop import small_run

pytestmark = pytest.mark.long
PROMPTS = [Prompt(f"p{i}", (3, 4, 5, 6 + i), "sums", "8") for i in range(4)]
SYNC_SECONDS = 120.0
PATIENCE_SECONDS = 10.0
"""With an engine that will never answer."""


class Cluster:
    """Two training ranks, two engines, and what was said to the user."""

    def __init__(self, inputs: Path, output: Path) -> None:
        values = small_run.recipe(inputs, output)
        values["rollout"]["engines"] = 2
        values["weights"] = {"timeout_seconds": SYNC_SECONDS, "bucket_bytes": 4096}
        self.recipe = Recipe.model_validate(values)
        self.runtime = runtime.start(self.recipe)
        model = inputs / "model"
        self.rollouts = Rollouts(EngineActors(self.runtime, self.recipe, model, model))
        self.policy = Policy(self.runtime, self.recipe, model)
        self.rollouts.wait_until_ready()
        self.said: list[str] = []
        self.weights = WeightSync(self.policy, self.rollouts, self.recipe, self.said.append)

    def in_engine(self, engine: str, function: Callable[[Any], Any]) -> Any:
        """Calls `function(actor)` in the engine's own process."""
        return ray.get(self.rollouts.wait_for_engines()[engine].__ray_call__.remote(function), timeout=SYNC_SECONDS)

    def wait_for_both(self) -> None:
        """Until both engines sample, or have started again."""
        small_run.wait_until(lambda: len(self.rollouts.wait_for_engines()) == 2, "both engines", SYNC_SECONDS)

    def versions(self) -> set[int]:
        """Weight versions of the tokens that the engines sample now. Each prompt goes to one engine."""
        groups = self.rollouts.generate(PROMPTS, step=1)
        return {int(version) for group in groups for sample in group.samples for version in sample.versions}


@pytest.fixture(scope="module")
def cluster(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(inputs, tmp_path_factory.mktemp("faults"))
    yield started
    started.weights.close()
    started.rollouts.close()
    runtime.stop(started.runtime)


def after(method: str, fault: Callable[[Any], None], *, times: int = 1) -> Callable[[Any], None]:
    """Lets the next calls of an engine's method end with `fault(engine)`; those after them are as always."""

    def plant(actor: Any) -> None:
        engine, whole, left = actor.engine, getattr(actor.engine, method), [None] * times

        def faulty(*arguments: Any) -> Any:
            result = whole(*arguments)
            if left:
                left.pop()
                fault(engine)
            return result

        setattr(engine, method, faulty)

    return plant


def die(engine: Any) -> None:
    os._exit(1)


def be_silent(engine: Any) -> None:
    time.sleep(600)


def flip_a_bit(engine: Any) -> None:
    weight = engine._tensors()["model.layers.1.mlp.up_proj.weight"]
    weight[3, 5] = -weight[3, 5]


def stop_sampling_after(steps: int) -> Callable[[Any], None]:
    """For ever, in the middle of a batch."""

    def plant(actor: Any) -> None:
        engine, before_step, made = actor.engine, actor.engine._before_step, []

        def stopping() -> Any:
            if len(made) == steps:
                time.sleep(600)
            made.append(None)
            return before_step()

        engine._before_step = stopping

    return plant


def sample_until_given_back(actor: Any) -> None:
    """Once, and half a second more. As SGLang, the engine frees no memory while requests run."""
    engine, before_step = actor.engine, actor.engine._before_step

    def waiting() -> Any:
        while not engine._given_back:
            time.sleep(0.01)
        time.sleep(0.5)
        engine._before_step = before_step
        return before_step()

    def release_memory(tags: Any) -> None:
        if engine._running:
            raise EngineError(Problem("release_memory", "requests that run", "an engine that is idle"))

    engine._before_step, engine.release_memory = waiting, release_memory


def restarted(cluster: Cluster) -> list[str]:
    """Engines that were started again, and why."""
    begin = "warning: restarting "
    return [line.removeprefix(begin) for line in cluster.said if line.startswith(begin)]


@pytest.mark.parametrize(
    ("version", "fault", "sync_seconds"),
    [(2, die, SYNC_SECONDS), pytest.param(5, be_silent, PATIENCE_SECONDS / 2, marks=pytest.mark.soak)],
)
def test_an_engine_that_dies_or_stays_silent_in_a_sync_is_left_out_until_it_has_started_again(
    cluster: Cluster, version: int, fault: Callable[[Any], None], sync_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = cluster.recipe.weights.model_copy(update={"timeout_seconds": sync_seconds})
    monkeypatch.setattr(cluster.weights, "_recipe", cluster.recipe.model_copy(update={"weights": weights}))
    if fault is be_silent:
        monkeypatch.setattr(weight_sync, "GRACE_SECONDS", PATIENCE_SECONDS / 2)
    cluster.weights.sync(version - 1)
    cluster.said.clear()
    cluster.in_engine("engine 1", after("receive", fault))
    cluster.weights.sync(version)
    (why,) = restarted(cluster)
    assert why.startswith("engine 1: ")
    assert why.endswith("(1 of 2 engines sample)")
    assert cluster.rollouts.serving == 1, "the sync has waited for the start"
    assert cluster.versions() == {version}
    cluster.wait_for_both()
    cluster.weights.sync(version + 1)
    assert cluster.rollouts.serving == 2
    assert cluster.versions() == {version + 1}
    assert len(restarted(cluster)) == 1


def test_wrong_bytes_are_named_by_tensor_and_bucket_and_replaced_by_another_sync(cluster: Cluster) -> None:
    cluster.said.clear()
    cluster.weights.sync(7)
    cluster.in_engine("engine 0", after("receive", flip_a_bit))
    cluster.weights.sync(8)
    (said,) = cluster.said  # an engine that answers is asked again, not restarted
    assert "model.layers.1.mlp.up_proj.weight on engine 0 rank 0" in said
    assert cluster.versions() == {8}


def test_an_engine_whose_bytes_are_wrong_again_is_left_out(cluster: Cluster) -> None:
    cluster.said.clear()
    cluster.in_engine("engine 0", after("receive", flip_a_bit, times=2))
    cluster.weights.sync(9)
    (why,) = restarted(cluster)
    assert "model.layers.1.mlp.up_proj.weight on engine 0 rank 0" in why
    assert cluster.rollouts.serving == 1
    assert cluster.versions() == {9}
    cluster.wait_for_both()


def test_requests_of_an_engine_that_dies_go_to_the_others_and_a_later_sync_brings_it_back(cluster: Cluster) -> None:
    cluster.weights.sync(10)
    cluster.said.clear()
    cluster.in_engine("engine 0", after("begin", die))
    assert cluster.versions() == {10}
    assert list(cluster.rollouts.lost) == ["engine 0"]
    cluster.wait_for_both()
    assert cluster.rollouts.serving == 1, "it has no verified weights yet"
    cluster.weights.sync(11)
    assert len(restarted(cluster)) == 1
    assert cluster.versions() == {11}
    assert not cluster.rollouts.lost


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "samples no more"])
def test_responses_of_a_lost_engine_go_on_elsewhere_with_the_tokens_that_they_had(
    hangs: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, schedule = cluster.rollouts, AsyncConfig(kind="async")  # with sync they begin anew
    monkeypatch.setattr(rollouts, "_recipe", cluster.recipe.model_copy(update={"schedule": schedule}))
    monkeypatch.setattr(engine_answers, "ANSWER_SECONDS", 0.2)
    cluster.weights.sync(12)
    whole = [sample for group in rollouts.generate(PROMPTS, step=1) for sample in group.samples]
    cluster.in_engine("engine 0", stop_sampling_after(4))
    orders = [rollouts.order(prompt, 1, lambda order: None) for prompt in PROMPTS]
    rollouts.add(orders)
    small_run.wait_until(lambda: sum(order.complete for order in orders) == 2, "the samples of engine 1")
    small_run.wait_until(lambda: 4 in {len(sample.tokens) for sample in rollouts.so_far()().values()}, "four tokens")
    known = rollouts.so_far()()
    if hangs:
        with monkeypatch.context() as patience:
            patience.setattr(engine_answers, "SILENT_SECONDS", 1.0)
            small_run.wait_until(lambda: bool(rollouts.lost), "the loss of engine 0")
    else:
        with pytest.raises(ray.exceptions.RayActorError):
            cluster.in_engine("engine 0", lambda actor: os._exit(1))
    rollouts.wait(lambda: all(order.complete for order in orders))
    assert list(rollouts.lost) == ["engine 0"]
    samples = [sample for order in orders for sample in order.finished()]
    assert [sample.tokens.tolist() for sample in samples] == [one.tokens.tolist() for one in whole]
    assert [(sample.finish, sample.text) for sample in samples] == [(one.finish, one.text) for one in whole]
    assert all((sample.versions == 12).all() for sample in samples)
    for (order, index), before in known.items():
        assert order.continued
        after, count = order.samples[index], len(before.tokens)
        assert before.tokens.tolist() == after.tokens[:count].tolist()
        assert before.logprobs.tolist() == after.logprobs[:count].tolist()
    cluster.wait_for_both()


def test_requests_of_a_step_that_is_given_up_end_before_engines_free_their_memory(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, recipe = cluster.rollouts, cluster.recipe
    cluster.weights.sync(12)
    cluster.said.clear()
    for engine in rollouts.wait_for_engines():
        cluster.in_engine(engine, sample_until_given_back)

    def lost() -> None:
        engines = rollouts.wait_for_engines()
        if all(cluster.in_engine(engine, lambda actor: bool(actor.engine._running)) for engine in engines):
            raise RankLostError(Problem("train rank 0", "it has died"))

    with monkeypatch.context() as losing:
        losing.setattr(rollouts._runtime.watch, "check", lost)
        with pytest.raises(RankLostError):
            rollouts.generate(PROMPTS, step=1)
    saver = SglangConfig.model_validate({"enable_memory_saver": True})
    rollout = recipe.rollout.model_copy(update={"engine": "sglang", "sglang": saver})
    shared = recipe.cluster.model_copy(update={"placement": "colocated"})
    with monkeypatch.context() as with_saver:
        with_saver.setattr(rollouts, "_recipe", recipe.model_copy(update={"rollout": rollout, "cluster": shared}))
        assert rollouts.release_memory()
    assert not restarted(cluster)
    assert cluster.versions() == {12}


def test_engines_that_have_drained_get_no_more_requests_until_they_have_weights(cluster: Cluster) -> None:
    rollouts = cluster.rollouts
    cluster.weights.sync(12)
    orders = [rollouts.order(prompt, 1) for prompt in PROMPTS]
    rollouts.add(orders[:2])
    rollouts.drain()
    assert all(order.complete for order in orders[:2])
    rollouts.idle()
    rollouts.add(orders[2:])
    time.sleep(0.5)
    idle, seconds = rollouts.idle()
    assert idle == pytest.approx(seconds)
    cluster.weights.sync(13)
    rollouts.wait(lambda: all(order.complete for order in orders))
    assert [{*order.samples[0].versions.tolist()} for order in orders] == [{12}, {12}, {13}, {13}]


@pytest.mark.parametrize(("trained", "version"), [pytest.param(None, 13, marks=pytest.mark.soak), (14, 14)])
def test_a_run_whose_engines_have_all_died_brings_one_back_before_it_samples_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, trained: int | None, version: int
) -> None:
    cluster.weights.sync(13)
    monkeypatch.setattr(cluster.policy, "step", trained)
    cluster.said.clear()
    for engine in cluster.rollouts.wait_for_engines():
        cluster.in_engine(engine, after("begin", die))
    assert cluster.versions() == {version}
    assert sorted(why.partition(":")[0] for why in restarted(cluster)) == ["engine 0", "engine 1"]
    assert all("died" in why for why in restarted(cluster))
    cluster.wait_for_both()


def test_wrong_bytes_on_all_engines_again_and_again_stop_the_run_and_nothing_samples_with_them(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.weights.sync(14)
    with monkeypatch.context() as same_processes:  # as if the machine's memory were at fault
        same_processes.setattr(cluster.rollouts, "lose", lambda engine, actor, error: None)
        for engine in cluster.rollouts.wait_for_engines():
            cluster.in_engine(engine, after("receive", flip_a_bit, times=100))
        with pytest.raises(WeightSyncError, match=r"up_proj.weight on engine 1 rank 0(.|\n)*bucket \d+ "):
            cluster.weights.sync(15)
    assert cluster.weights.version == 14
    for engine in cluster.rollouts.wait_for_engines():
        state = cluster.in_engine(engine, lambda actor: actor.engine.state.value)
        assert state == "holding unverified weights"


def test_a_run_goes_on_without_an_engine_that_cannot_start_and_ends_when_none_can(
    cluster: Cluster, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine, actor in cluster.rollouts.wait_for_engines().items():  # the engines of the test before
        cluster.rollouts.lose(engine, actor, EngineError(Problem(engine, "its memory is at fault")))
    cluster.wait_for_both()
    cluster.weights.sync(16)
    cluster.said.clear()
    model, away = inputs / "model", inputs / "model away"
    model.rename(away)
    try:
        cluster.in_engine("engine 0", after("begin", die))
        assert cluster.versions() == {16}
        small_run.wait_until(lambda: any("engine 0 could not start" in line for line in cluster.said), "a failed start")
        monkeypatch.setattr(cluster_rollouts, "RETRY_SECONDS", 0.0)
        cluster.rollouts._retry_at.clear()
        cluster.weights.sync(17)
        assert restarted(cluster)[-1] == "engine 0: it could not start before"
        assert cluster.versions() == {17}

        limit = cluster.recipe.rollout.model_copy(update={"no_engine_timeout_seconds": 1.0})
        monkeypatch.setattr(cluster.rollouts, "_recipe", cluster.recipe.model_copy(update={"rollout": limit}))
        cluster.in_engine("engine 1", after("begin", die))
        with pytest.raises(EngineError, match="no engine is left") as raised:
            cluster.versions()
    finally:
        away.rename(model)
    why = [problem.where for problem in raised.value.problems[1:]]
    assert {"rollout: engine 0 died", "rollout: engine 1 died"} <= set(why)
