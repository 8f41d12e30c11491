"""Devices of a run on the nodes of a cluster: engines whole, tensor ranks neighbours, as few nodes as can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.cluster.placement import nodes_of_devices
from megagrpo.recipe.defaults import DevicePlan


def plan(ranks: int, engines: tuple[tuple[int, ...], ...] = ()) -> DevicePlan:
    last = max((device for engine in engines for device in engine), default=-1)
    return DevicePlan("GPU", max(ranks, last + 1), tuple(range(ranks)), engines, 1.0, 1.0)


def test_the_largest_nodes_are_filled_first_and_the_others_are_left_alone() -> None:
    assert nodes_of_devices(plan(4), 1, {"a": 2, "b": 8, "c": 2}) == ("b",) * 4
    assert nodes_of_devices(plan(16), 8, {"a": 8, "b": 8, "c": 8}) == ("a",) * 8 + ("b",) * 8


def test_an_engine_is_not_split_where_a_node_has_room_for_half_of_it() -> None:
    engines = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert nodes_of_devices(plan(8, engines), 1, {"a": 6, "b": 5}) == ("a",) * 4 + ("b",) * 4
    assert nodes_of_devices(plan(8, engines), 1, {"a": 6, "b": 3}) is None


def test_tensor_ranks_are_split_only_if_there_is_no_other_way() -> None:
    assert nodes_of_devices(plan(4), 2, {"a": 3, "b": 2}) == ("a", "a", "b", "b")
    assert nodes_of_devices(plan(2), 2, {"a": 1, "b": 1}) == ("a", "b")


@given(
    groups=st.integers(1, 8),
    tensor=st.sampled_from([1, 2, 4]),
    each=st.sampled_from([1, 2, 4, 8]),
    engines=st.integers(0, 4),
    free=st.lists(st.integers(0, 8), max_size=6),
)
def test_engines_are_whole_and_no_node_has_more_than_its_room(
    groups: int, tensor: int, each: int, engines: int, free: list[int]
) -> None:
    ranks = groups * tensor
    room = {f"n{index}": size for index, size in enumerate(free)}
    starts = range(ranks, ranks + engines * each, each)
    devices = plan(ranks, tuple(tuple(range(start, start + each)) for start in starts))
    found = nodes_of_devices(devices, tensor, room)
    if each == 1:
        assert (found is not None) == (sum(free) >= devices.bundles)
    if found is None:
        return
    assert len(found) == devices.bundles
    assert all(len({found[device] for device in engine}) == 1 for engine in devices.bundles_of_engine)
    assert all(count <= room[node] for node, count in Counter(found).items())


@pytest.mark.parametrize("free", [{}, {"a": 0}])
def test_a_cluster_without_free_devices_has_no_place(free: dict[str, int]) -> None:
    assert nodes_of_devices(plan(1), 1, free) is None
