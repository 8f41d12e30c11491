"""Which device each rank and engine gets. Ray must be able to start all of them at once, or the run waits for ever."""

from __future__ import annotations

from collections import Counter
from itertools import chain, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.recipe.defaults import DevicePlan, plan_devices
from megagrpo.recipe.schema import Recipe
from tests.tiny_run import recipe

RAY_UNITS = 10_000
"""Ray counts resources in ten-thousandths of a device and drops what is smaller."""


def plan(
    ranks: int, engines: int, *, engine: str = "sglang", tensor: int = 1, device: str = "cpu", **cluster: str | int
) -> DevicePlan:
    values = recipe(Path("tiny"))
    values["train"]["layout"] = {"data": ranks}
    values["rollout"] |= {"engine": engine, "engines": engines, "layout": {"tensor": tensor}}
    return plan_devices(Recipe.model_validate(values | {"cluster": cluster}), device)


@st.composite
def plans(draw: st.DrawFn) -> DevicePlan:
    ranks, engines, tensor = draw(st.integers(1, 12)), draw(st.integers(1, 24)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return plan(max(ranks, tensor), engines, tensor=tensor, placement="colocated")
    own = draw(st.one_of(st.just({}), st.integers(1, engines).map(lambda blocks: {"engine_devices": blocks * tensor})))
    return plan(ranks, engines, tensor=tensor, placement="disaggregated", **own)


@given(plans())
def test_no_device_is_promised_more_than_once(devices):
    used = Counter[int]()
    actors_of_engines = tuple(bundles[0] for bundles in devices.bundles_of_engine)
    for bundles, share in ((devices.bundle_of_rank, devices.rank_share), (actors_of_engines, devices.engine_share)):
        units = int(share * RAY_UNITS)
        assert units > 0, "an actor without a share is placed without regard to devices"
        for bundle in bundles:
            used[bundle] += units
    assert max(used.values()) <= RAY_UNITS


@given(plans())
def test_every_device_that_is_reserved_is_used_and_exists(devices):
    assert {*devices.bundle_of_rank, *chain(*devices.bundles_of_engine)} == set(range(devices.bundles))


@given(plans())
def test_engines_are_spread_evenly(devices):
    crowds = Counter(devices.bundles_of_engine).values()
    assert max(crowds) - min(crowds) <= 1


@given(plans())
def test_an_engines_devices_are_neighbours_and_shared_as_a_whole(devices):
    for bundles in devices.bundles_of_engine:
        assert list(bundles) == list(range(bundles[0], bundles[0] + len(bundles)))
    assert all(one == other or not {*one} & {*other} for one, other in product(devices.bundles_of_engine, repeat=2))


def test_engines_that_somebody_else_runs_have_no_devices():
    for placement in ("colocated", "disaggregated"):
        devices = plan(3, 2, engine="external", placement=placement)
        assert devices.bundles == 3
        assert devices.bundles_of_engine == ((), ())


@given(st.integers(1, 12), st.integers(1, 24))
def test_colocated_engines_share_the_ranks_devices(ranks, engines):
    devices = plan(ranks, engines, placement="colocated")
    assert devices.bundles == ranks
    assert devices.bundle_of_rank == tuple(range(ranks))
    assert len(set(devices.bundles_of_engine)) == min(ranks, engines)


@given(st.integers(1, 12), st.integers(1, 24), st.data())
def test_disaggregated_engines_have_devices_of_their_own(ranks, engines, data):
    own = data.draw(st.integers(1, engines))
    devices = plan(ranks, engines, placement="disaggregated", engine_devices=own)
    assert devices.bundles == ranks + own
    assert devices.bundle_of_rank == tuple(range(ranks))
    assert {*chain(*devices.bundles_of_engine)} == set(range(ranks, ranks + own))


@pytest.mark.parametrize(
    ("ranks", "engines", "tensor", "cluster", "bundles_of_engine", "shares"),
    [
        (2, 1, 1, {}, [(0,)], (0.5, 0.5)),
        (4, 2, 1, {}, [(0,), (2,)], (0.5, 0.5)),
        (2, 4, 1, {}, [(0,), (0,), (1,), (1,)], (0.5, 0.25)),
        (4, 2, 2, {}, [(0, 1), (2, 3)], (0.5, 0.5)),
        (5, 1, 2, {}, [(0, 1)], (0.5, 0.5)),
        (2, 2, 1, {"placement": "disaggregated"}, [(2,), (3,)], (1.0, 1.0)),
        (2, 4, 1, {"placement": "disaggregated", "engine_devices": 2}, [(2,), (2,), (3,), (3,)], (1.0, 0.5)),
        (1, 2, 2, {"placement": "disaggregated"}, [(1, 2), (3, 4)], (1.0, 1.0)),
    ],
)
def test_small_clusters_as_drawn_up_by_hand(ranks, engines, tensor, cluster, bundles_of_engine, shares):
    devices = plan(ranks, engines, tensor=tensor, **cluster)
    assert list(devices.bundles_of_engine) == bundles_of_engine
    assert (devices.rank_share, devices.engine_share) == shares


@pytest.mark.parametrize(("device", "resource"), [("cpu", "CPU"), ("cuda", "GPU")])
def test_a_device_is_what_ray_calls_it(device, resource):
    assert plan(1, 1, device=device).resource == resource
