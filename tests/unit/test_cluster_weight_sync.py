"""The transport of the weights, the GPUs that engines see, and the report on replicas that disagree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import assume, given, settings

from megagrpo.cluster.actors import allocator_environment, nccl_environment
from megagrpo.cluster.engines import visible_gpus
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import NodeWatch, Wait
from megagrpo.cluster.weight_sync import WeightSync, replica_problems, with_transport
from megagrpo.errors import EngineError, Problem, RecipeError, WeightSyncError
from megagrpo.recipe.defaults import DevicePlan
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.boxes import Box, Place, Topology
from megagrpo.weights.transport.buckets import incoming
from megagrpo.weights.transport.choice import TransportName, choose_transport
from megagrpo.weights.transport.shared_memory import require_named_gpus
from tests import plans
from tests.tiny_run import make_run, recipe_with
from tests.unit.test_weights_plan_topology import clusters
from tests.weight_streams import Case

ONE_NODE = Topology((Place("a", 0), Place("a", 1)), (Place("a", 2),))
APART = Topology((Place("a", 0), Place("a", 1)), (Place("b", 0),))
BESIDE = Topology((Place("a", 0), Place("b", 0)), (Place("b", 0), Place("a", 0)))
ON_CPUS = Topology((Place("a"), Place("b")), (Place("b"), Place("b")))
SOME_BESIDE = Topology((Place("a", 0), Place("a", 1)), (Place("a", 1), Place("b", 0)))
ENGINES_SHARE = Topology((Place("a", 0), Place("a", 1)), (Place("b", 0), Place("b", 0)))


@pytest.mark.parametrize(
    ("topology", "engine", "chosen"),
    [
        (ONE_NODE, "sglang", TransportName.SHARED_MEMORY),
        (APART, "sglang", TransportName.PROCESS_GROUP),
        (APART, "external", TransportName.DISK),
        (BESIDE, "sglang", TransportName.TWO_HOPS),
        (ON_CPUS, "sglang", TransportName.TWO_HOPS),
    ],
)
def test_auto_chooses_by_the_places_of_ranks_and_engines(
    topology: Topology, engine: str, chosen: TransportName
) -> None:
    assert choose_transport(recipe_with(f"rollout.engine={engine}").transfer, topology) is chosen


@pytest.mark.parametrize(
    ("wanted", "topology", "why"),
    [
        ("shared_memory", APART, "between 2 nodes"),
        ("two_hops", APART, "a training rank beside every engine rank"),
        ("process_group", BESIDE, "several processes on one GPU"),
        ("process_group", SOME_BESIDE, "several processes on one GPU"),
        ("auto", SOME_BESIDE, "several processes on one GPU"),
        ("auto", ENGINES_SHARE, "several processes on one GPU"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(wanted: str, topology: Topology, why: str) -> None:
    """NCCL allows no two ranks on one GPU."""
    with pytest.raises(RecipeError, match=why):
        choose_transport(wanted, topology)


def test_a_transport_that_works_is_taken() -> None:
    assert choose_transport("shared_memory", ONE_NODE) is TransportName.SHARED_MEMORY
    assert choose_transport("process_group", APART) is TransportName.PROCESS_GROUP
    assert choose_transport("process_group", ON_CPUS) is TransportName.PROCESS_GROUP
    assert choose_transport("two_hops", ON_CPUS) is TransportName.TWO_HOPS


def test_ranks_know_before_they_start_what_auto_means_on_their_devices() -> None:
    """Each rank on a GPU of node a, and an engine of one GPU."""

    def resolved(engine: Place) -> Recipe:
        recipe = plans.recipe({"cluster.placement": "disaggregated"})
        devices = DevicePlan("GPU", 3, (0, 1), ((2,),), 1.0, 1.0)
        places = (Place("a", 0), Place("a", 1), engine)
        return with_transport(recipe, Runtime("cuda", devices, None, places, NodeWatch({}), None))  # type: ignore[arg-type]

    assert resolved(Place("b", 0)).weights.transfer == "process_group"
    assert "PYTORCH_CUDA_ALLOC_CONF" in allocator_environment(resolved(Place("b", 0)))
    assert resolved(Place("a", 2)).weights.transfer == "shared_memory"
    assert allocator_environment(resolved(Place("a", 2))) == {}


@settings(max_examples=25)
@given(case=clusters())
def test_each_engine_sees_the_gpus_of_its_node_from_which_weights_come_its_own_first(case: Case) -> None:
    """Training ranks and engines on the same devices, on others, or both; against every bucket of the plan."""
    assert case.topology is not None
    topology = replace(case.topology, two_hops=None not in case.topology.local_sources)
    plan = replace(case, topology=topology).plan()
    run = (*topology.sources, *topology.destinations)
    own_places = [
        topology.destinations[at : at + case.tensor] for at in range(0, len(topology.destinations), case.tensor)
    ]
    assume(all(len({place.node for place in own}) == 1 for own in own_places))
    visible = [visible_gpus(own, run) for own in own_places for _ in own]
    active, sources = frozenset(range(len(plan.destinations))), len(plan.sources)
    for index, place in enumerate(topology.destinations):
        own = [place.device for place in own_places[index // case.tensor]]
        assert list(visible[index][: len(own)]) == own
        assert len(set(visible[index])) == len(visible[index])
        for bucket in incoming(plan, sources + index, active, 1 << 20):
            peer = bucket.before(sources + index)
            sender = run[peer]
            if sender.node == place.node:
                assert sender.device in visible[index]


def test_an_engine_without_gpus_names_none() -> None:
    assert visible_gpus([Place("a")], [Place("a"), Place("b")]) == ()


def test_a_process_that_sees_fewer_gpus_than_it_was_told_of_is_refused() -> None:
    require_named_gpus("engine 0 rank 0", "3,0,1", 3)
    require_named_gpus("engine 0 rank 0", None, 1)
    with pytest.raises(WeightSyncError, match=r"1 of CUDA_VISIBLE_DEVICES 3,0,1"):
        require_named_gpus("engine 0 rank 0", "3,0,1", 1)


@pytest.mark.parametrize(
    ("overrides", "alike"),
    [
        ([], {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}),
        (["rollout.sglang.enable_nccl_nvls=true"], {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}),
        (["rollout.sglang.enable_symm_mem=true"], {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}),
        (["cluster.placement=colocated"], {}),
        (["rollout.engine=transformers"], {}),
    ],
)
def test_training_ranks_and_servers_that_nccl_joins_have_its_settings_alike(
    overrides: list[str], alike: dict[str, str], tmp_path: Path
) -> None:
    apart = ["rollout.engine=sglang", "cluster.placement=disaggregated"]
    assert nccl_environment(load(make_run(tmp_path), [*apart, *overrides]).recipe) == alike


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


@pytest.mark.parametrize(("lost", "failing", "brought"), [(False, [], []), (True, [], [4]), (False, ["engine 1"], [4])])
def test_weights_that_have_not_changed_are_sent_only_where_an_engine_lacks_them(
    lost: bool, failing: list[str], brought: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, called, actors = dict[str, Any](), list[int](), {f"engine {at}": MagicMock() for at in range(2)}
    up = {**actors, "engine 0": MagicMock()} if lost else actors
    sync = WeightSync.__new__(WeightSync)
    vars(sync).update(
        _policy=MagicMock(), _recipe=MagicMock(), _rollouts=MagicMock(wait_for_engines=lambda: up, serve=served.update),
        _verified=actors, _bytes=8, _bring=called.append, transport=TransportName.SHARED_MEMORY, version=3,
        verified_versions={3},
    )  # fmt: skip
    failed = {name: EngineError(Problem(name)) for name in failing}
    monkeypatch.setattr(Wait, "settle", lambda *given, **how: ({}, failed))
    sync.sync(4, changed=False)
    assert (called, sync.version, sync.received_bytes) == (brought, 4, 8 if brought else 0)
    assert sync.verified_versions == ({3} if brought else {3, 4}), "_bring adds what it has verified"
    assert list(served) == ([] if lost else [name for name in actors if name not in failing])
    sync.sync(5)
    assert called == [*brought, 5]
