"""The end of a run's actors, and the time that it waits for those that cannot answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megagrpo.cluster import weight_sync
from megagrpo.cluster.engines import CLOSE_SECONDS, EngineActors
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.cluster.waiting import Wait
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.errors import WeightSyncError
from megagrpo.recipe.schema.run import WeightsConfig


class Actors:
    """Engines or ranks by name, what was asked of them and done to them. What is not `ready` never answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str, ready: tuple[str, ...]) -> None:
        self.by_name = {name: SimpleNamespace(close=self._method(name)) for name in names}
        self.asked: list[str] = []
        self.waited = 0.0
        self.killed: list[str] = []
        monkeypatch.setattr(ray, "kill", lambda actor: self.killed.append(actor.close.name))

        def wait(answers: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
            done = [answer for answer in answers if answer in ready]
            if len(done) < num_returns:
                self.waited += timeout
            return done, [answer for answer in answers if answer not in done]

        monkeypatch.setattr(ray, "wait", wait)
        monkeypatch.setattr(ray, "get", lambda answer, timeout: None)

    def _method(self, name: str) -> Any:
        def remote() -> str:
            self.asked.append(f"close {name}")
            return self.asked[-1]

        return SimpleNamespace(remote=remote, name=name)


def test_an_engine_that_is_still_starting_does_not_hold_up_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, "engine 0", "engine 1", ready=("start engine 0", "close engine 0"))
    engines = object.__new__(EngineActors)
    engines.by_name = dict(actors.by_name)
    engines._other_nodes = {name: [] for name in actors.by_name}
    engines.restarts, engines._starting = {}, {name: f"start {name}" for name in actors.by_name}  # type: ignore[misc]
    engines.close()
    assert sorted(actors.asked) == ["close engine 0", "close engine 1"]
    assert sorted(actors.killed) == ["engine 0", "engine 1"]
    assert actors.waited <= CLOSE_SECONDS
    engines.close()
    assert len(actors.asked) == len(actors.killed) == 2, "engines that are gone are not asked again"


def test_ranks_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, "train rank 0", "train rank 1", ready=())
    ranks = object.__new__(TrainRanks)
    ranks.actors = dict(actors.by_name)
    ranks.close()
    assert actors.killed == ["train rank 0", "train rank 1"]


def test_a_weight_sync_that_cannot_connect_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: Wait, results: Any) -> None:
        raise WeightSyncError([])

    closed: list[WeightSync] = []
    engines = SimpleNamespace(places=tuple, manifests=lambda: {"engine 0": []})
    rollouts: Any = SimpleNamespace(engines=engines, bring_back=None)
    ranks: Any = SimpleNamespace(actors={}, places=(), call=lambda method: [], watch=None)
    recipe: Any = SimpleNamespace(weights=WeightsConfig(), transfer="auto", rollout=SimpleNamespace(urls=[]))
    for name in ("choose_transport", "RendezvousHost", "Channel"):
        monkeypatch.setattr(weight_sync, name, lambda *given, **named: SimpleNamespace(rendezvous=None))
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(Wait, "for_all", wait)
    monkeypatch.setattr(WeightSync, "close", lambda sync: closed.append(sync))
    with pytest.raises(WeightSyncError):
        WeightSync(ranks, rollouts, recipe, print)
    assert len(closed) == 1
    assert rollouts.bring_back is None
