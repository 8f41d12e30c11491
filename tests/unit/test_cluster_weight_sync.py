"""Which way weights travel, and what is said of replicas that disagree."""

from __future__ import annotations

import pytest

from megagrpo.cluster.weight_sync import choose_way, replica_problems
from megagrpo.errors import RecipeError
from megagrpo.recipe.schema import WeightsConfig
from megagrpo.weights.boxes import Box
from megagrpo.weights.executors.ways import Way
from megagrpo.weights.topology import Place, Topology

ONE_NODE = Topology((Place("a", 0), Place("a", 1)), (Place("a", 2),))
TWO_NODES = Topology((Place("a", 0), Place("a", 1)), (Place("b", 0),))


@pytest.mark.parametrize(
    ("topology", "external", "way"),
    [
        (ONE_NODE, False, Way.SHARED_MEMORY),
        (TWO_NODES, False, Way.PROCESS_GROUP),
        (TWO_NODES, True, Way.DISK),
    ],
)
def test_the_way_is_chosen_by_where_everyone_is(topology: Topology, external: bool, way: Way) -> None:
    assert choose_way(WeightsConfig(), topology, external=external) is way


def test_a_way_through_a_nodes_memory_is_refused_between_nodes() -> None:
    for transfer in ("shared_memory", "direct", "tensors"):
        with pytest.raises(RecipeError, match="between 2 nodes"):
            choose_way(WeightsConfig(transfer=transfer), TWO_NODES, external=False)
        assert choose_way(WeightsConfig(transfer=transfer), ONE_NODE, external=False) is Way(transfer)
    assert choose_way(WeightsConfig(transfer="broadcast"), TWO_NODES, external=False) is Way.BROADCAST


def test_replicas_that_drifted_apart_name_their_ranks() -> None:
    shared, own = Box("norm", (0,), (4,)), Box("q", (0, 0), (2, 2))
    assert not replica_problems({"train rank 0": {shared: 7, own: 1}, "train rank 1": {shared: 7}})
    (problem,) = replica_problems(
        {"train rank 0": {shared: 7}, "train rank 1": {shared: 7}, "train rank 2": {shared: 8}}
    )
    assert "train rank 0, train rank 1" in problem.given
    assert "train rank 2" in problem.given
