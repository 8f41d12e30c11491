"""Ray is joined or started with what the run needs, and left again when the run is told to stop meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from megagrpo.cluster import runtime
from megagrpo.cluster.nodes import NodeWatch
from megagrpo.errors import RankError
from megagrpo.recipe.defaults import DevicePlan
from megagrpo.recipe.schema import Recipe
from megagrpo.trainer.stopping import StopRequested
from tests import tiny_run

RECIPE = Recipe.model_validate({**tiny_run.recipe(Path("tiny")), "cluster": {"device": "cpu"}})
ON_ONE_DEVICE, BESIDE, ELSEWHERE = ((0,),), ((1,),), ((),)


def stop() -> None:
    raise StopRequested


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was done to Ray, which is not there: settings it was started with, and its end."""
    done: list[Any] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(runtime, "_connect", lambda address, settings: done.append(settings))
    monkeypatch.setattr(runtime, "node_names", lambda: {"a": "host-a"})
    monkeypatch.setattr(runtime, "_reserve", lambda devices, recipe, names, watch: (None, ("a",) * devices.bundles))
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("end"))
    return done


def test_ray_starts_here_with_as_many_cpus_as_the_run_reserves(connected: list[Any]) -> None:
    started = runtime.start(RECIPE)
    assert connected == [{"num_cpus": started.devices.bundles, "include_dashboard": False}]


@pytest.mark.parametrize("raised", [AuthenticationError("no such token"), Exception("late"), ConnectionError()])
@pytest.mark.parametrize(("address", "remedy"), [("head:6379", "RAY_AUTH_MODE"), ("local", "session_latest")])
def test_whatever_ray_raises_at_its_start_is_told_with_a_remedy(
    raised: Exception, address: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RankError, match=rf"{address}(.|\n)*{remedy}"):
        runtime._connect(address, {})


def test_a_run_told_to_stop_while_it_reserves_devices_leaves_ray(
    connected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_reserve", lambda devices, recipe, names, watch: watch.check())
    with pytest.raises(StopRequested):
        runtime.start(RECIPE, stop)
    assert connected[1:] == ["end"]


def test_a_stop_ends_the_wait_for_the_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    never = SimpleNamespace(options=lambda **where: SimpleNamespace(remote=object))
    monkeypatch.setattr(ray, "remote", lambda **resources: lambda function: never)
    monkeypatch.setattr(runtime, "PlacementGroupSchedulingStrategy", lambda group, index: None)
    with pytest.raises(StopRequested):
        runtime._gpus(None, ["host-a", "host-a"], 60.0, NodeWatch({}, stop))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("resource", "of_engine", "shared"),
    [("GPU", ON_ONE_DEVICE, True), ("GPU", BESIDE, False), ("GPU", ELSEWHERE, False), ("CPU", ON_ONE_DEVICE, False)],
)
def test_only_gpus_are_shared(resource: str, of_engine: tuple[tuple[int, ...], ...], shared: bool) -> None:
    devices = DevicePlan(resource, 2, (0,), of_engine, 0.5, 0.5)
    device = {"GPU": "cuda", "CPU": "cpu"}[resource]
    assert runtime.Runtime(device, devices, None, (), NodeWatch({})).shares_gpus is shared  # type: ignore[arg-type]
