"""Which transport carries the weights, and what is said of replicas that disagree."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagrpo.cluster.weight_sync import replica_problems
from megagrpo.errors import RecipeError
from megagrpo.recipe.load import load
from megagrpo.recipe.schema.run import WeightsConfig
from megagrpo.weights.boxes import Box, Place, Topology
from megagrpo.weights.transport.choice import TransportName, choose_transport
from tests.tiny_run import make_run

ONE_NODE = Topology((Place("a", 0), Place("a", 1)), (Place("a", 2),))
TWO_NODES = Topology((Place("a", 0), Place("a", 1)), (Place("b", 0),))


@pytest.mark.parametrize(
    ("topology", "external", "chosen"),
    [
        (ONE_NODE, False, TransportName.SHARED_MEMORY),
        (TWO_NODES, False, TransportName.PROCESS_GROUP),
        (TWO_NODES, True, TransportName.DISK),
    ],
)
def test_auto_chooses_by_the_places_of_ranks_and_engines(
    topology: Topology, external: bool, chosen: TransportName
) -> None:
    assert choose_transport(WeightsConfig().transfer_to(external=external), topology) is chosen


def test_shared_memory_is_refused_between_nodes_and_taken_within_one() -> None:
    with pytest.raises(RecipeError, match="between 2 nodes"):
        choose_transport("shared_memory", TWO_NODES)
    assert choose_transport("shared_memory", ONE_NODE) is TransportName.SHARED_MEMORY
    assert choose_transport("process_group", TWO_NODES) is TransportName.PROCESS_GROUP


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("weights.transfer=direct", "shared_memory"),
        ("weights.transfer=tensors", "shared_memory"),
        ("weights.transfer=broadcast", "process_group"),
        ("weights.pause=abort", "retract"),
    ],
)
def test_values_of_earlier_versions_are_refused_with_the_new_spelling(
    override: str, instead: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        load(make_run(tmp_path), [override])
    (problem,) = raised.value.problems
    assert override.partition("=")[0] in problem.where
    assert instead in problem.fix


def test_replicas_that_drifted_apart_name_their_ranks() -> None:
    shared, own = Box("norm", (0,), (4,)), Box("q", (0, 0), (2, 2))
    assert not replica_problems({"train rank 0": {shared: 7, own: 1}, "train rank 1": {shared: 7}})
    (problem,) = replica_problems(
        {"train rank 0": {shared: 7}, "train rank 1": {shared: 7}, "train rank 2": {shared: 8}}
    )
    assert "train rank 0, train rank 1" in problem.given
    assert "train rank 2" in problem.given
