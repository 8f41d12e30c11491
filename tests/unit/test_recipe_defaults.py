"""Values that follow from a recipe: the device of each rank and engine, and the number of steps."""

from __future__ import annotations

from collections import Counter
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.recipe.defaults import DevicePlan, plan_devices, plan_engines, total_steps
from megagrpo.recipe.schema import Recipe
from tests import plans
from tests.tiny_run import recipe

RAY_UNITS = 10_000
"""Ray counts resources in ten-thousandths of a device and drops what is smaller."""
SEPARATE = {"placement": "disaggregated"}


def recipe_of(ranks: int, engines: int, *, engine: str = "sglang", tensor: int = 1, **cluster: str | int) -> Recipe:
    values = recipe(Path("tiny"))
    values["train"]["layout"] = {"data": ranks}
    values["rollout"] |= {"engine": engine, "engines": engines, "layout": {"tensor": tensor}}
    return Recipe.model_validate(values | {"cluster": cluster})


def plan(ranks: int, engines: int, *, device: str = "cpu", **other: Any) -> DevicePlan:
    return plan_devices(recipe_of(ranks, engines, **other), device)


@st.composite
def device_plans(draw: st.DrawFn) -> DevicePlan:
    ranks, engines, tensor = draw(st.integers(1, 12)), draw(st.integers(1, 24)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return plan(max(ranks, tensor), engines, tensor=tensor, placement="colocated")
    own = draw(st.one_of(st.just({}), st.integers(1, engines).map(lambda blocks: {"engine_devices": blocks * tensor})))
    return plan(ranks, engines, tensor=tensor, **SEPARATE, **own)


@given(device_plans())
def test_ray_can_start_all_ranks_and_engines_at_once_on_the_devices_that_are_reserved(devices):
    used = Counter[int]()
    actors_of_engines = tuple(bundles[0] for bundles in devices.bundles_of_engine)
    for bundles, share in ((devices.bundle_of_rank, devices.rank_share), (actors_of_engines, devices.engine_share)):
        units = int(share * RAY_UNITS)
        assert units > 0, "an actor without a share is placed without regard to devices"
        for bundle in bundles:
            used[bundle] += units
    assert max(used.values()) <= RAY_UNITS
    assert devices.bundle_of_rank == tuple(range(len(devices.bundle_of_rank)))
    assert {*devices.bundle_of_rank, *chain(*devices.bundles_of_engine)} == set(range(devices.bundles))


def test_a_run_without_its_engines_reserves_the_devices_of_its_ranks_alone():
    values = recipe(Path("tiny")) | {"cluster": SEPARATE}
    values["rollout"] |= {"engines": 3}
    alone = plan_devices(Recipe.model_validate(values), "cuda", engines_too=False)
    assert (alone.bundles, alone.bundle_of_rank, alone.bundles_of_engine, alone.rank_share) == (1, (0,), (), 1.0)


@given(st.integers(1, 12), st.integers(1, 24), st.integers(1, 4), st.sampled_from(["colocated", "disaggregated"]))
def test_engines_without_ranks_have_as_many_devices_as_beside_them(ranks, engines, tensor, placement):
    asked = recipe_of(max(ranks, tensor), engines, tensor=tensor, placement=placement)
    beside, alone = plan_devices(asked, "cuda"), plan_engines(asked, "cuda")
    assert (alone.bundle_of_rank, len(alone.bundles_of_engine)) == ((), engines)
    assert {*chain(*alone.bundles_of_engine)} == set(range(alone.bundles))
    assert Counter(map(Counter(beside.bundles_of_engine).get, beside.bundles_of_engine)) == Counter(
        map(Counter(alone.bundles_of_engine).get, alone.bundles_of_engine)
    )
    fullest = max(Counter(own[0] for own in alone.bundles_of_engine).values())
    assert fullest * alone.engine_share == pytest.approx(1), "they have the devices to themselves"


def test_an_evaluation_on_a_running_server_reserves_one_device_for_nobody():
    alone = plan_engines(recipe_of(8, 1, engine="external"), "cpu")
    assert (alone.bundles, alone.bundles_of_engine) == (1, ((),))


@given(device_plans())
def test_engines_are_spread_evenly_over_blocks_of_neighbouring_devices(devices):
    crowds = Counter(devices.bundles_of_engine).values()
    assert max(crowds) - min(crowds) <= 1
    for bundles in devices.bundles_of_engine:
        assert list(bundles) == list(range(bundles[0], bundles[0] + len(bundles)))
    assert all(one == other or not {*one} & {*other} for one, other in product(devices.bundles_of_engine, repeat=2))


@pytest.mark.parametrize(
    ("ranks", "engines", "tensor", "cluster", "bundles_of_engine", "shares"),
    [
        (2, 1, 1, {}, [(0,)], (0.5, 0.5)),
        (4, 2, 1, {}, [(0,), (2,)], (0.5, 0.5)),
        (2, 4, 1, {}, [(0,), (0,), (1,), (1,)], (0.5, 0.25)),
        (4, 2, 2, {}, [(0, 1), (2, 3)], (0.5, 0.5)),
        (5, 1, 2, {}, [(0, 1)], (0.5, 0.5)),
        (2, 2, 1, SEPARATE, [(2,), (3,)], (1.0, 1.0)),
        (2, 4, 1, SEPARATE | {"engine_devices": 2}, [(2,), (2,), (3,), (3,)], (1.0, 0.5)),
        (1, 2, 2, SEPARATE, [(1, 2), (3, 4)], (1.0, 1.0)),
    ],
)
def test_small_clusters_as_drawn_up_by_hand(ranks, engines, tensor, cluster, bundles_of_engine, shares):
    devices = plan(ranks, engines, tensor=tensor, **cluster)
    assert list(devices.bundles_of_engine) == bundles_of_engine
    assert (devices.rank_share, devices.engine_share) == shares


@pytest.mark.parametrize(("device", "resource"), [("cpu", "CPU"), ("cuda", "GPU")])
def test_engines_that_a_user_runs_have_no_devices(device, resource):
    for placement in ("colocated", "disaggregated"):
        devices = plan(3, 2, engine="external", device=device, placement=placement)
        assert (devices.resource, devices.bundles, devices.bundles_of_engine) == (resource, 3, ((), ()))


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"train__total_steps": 7}, 7),
        ({"train__total_steps": None, "train__total_epochs": 3}, 12),  # 3 x 1,000 prompts, 256 in a step
        ({"train__total_steps": None, "train__total_episodes": 2049}, 2),  # 2,048 responses in a step
    ],
)
def test_steps_are_rounded_up(length, steps):
    assert total_steps(plans.recipe(**length), 1000) == steps


def test_steps_of_fine_tuning_count_examples():
    assert total_steps(plans.sft_recipe(examples=32, total_epochs=2), 100) == 7
