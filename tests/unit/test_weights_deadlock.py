"""No schedule of a sync deadlocks on communicators that block as NCCL's do, and every byte arrives once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weight_traffic import topology_of
from megagrpo.errors import Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.boxes import Place, Topology
from megagrpo.weights.transport import choice, process_group, shared_memory
from megagrpo.weights.transport.buckets import Bucket
from megagrpo.weights.transport.choice import Channel, TransportName, choose_transport, open_receiver, open_sender
from megagrpo.weights.transport.ends import SLOTS, Part, _Flow
from megagrpo.weights.transport.process_group import ProcessGroup
from megagrpo.weights.transport.rendezvous import Sync
from tests.blocking_carrier import BlockingCluster, BlockingMember, BlockingProcessGroup, DeadlockError, Memory
from tests.unit.test_weights_plan import layouts
from tests.weight_streams import Case, empty
from tests.weights_oracle import architecture, moe_architecture, random_checkpoint

CASES = 30
LONG_CASES = 470
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _within_one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "ProcessGroup", BlockingProcessGroup)
        patch.setattr(process_group, "ProcessGroup", BlockingProcessGroup)
        patch.setattr(shared_memory, "FileArea", Memory)
        patch.setattr(shared_memory, "map_file", Memory.map)
        yield


@st.composite
def placements(draw: st.DrawFn) -> Case:
    """Training ranks and engines on one to eight nodes, on the same devices or on others."""
    layout = draw(layouts())
    arch = moe_architecture() if draw(st.booleans()) else architecture()
    each = draw(st.sampled_from([size for size in (1, 2, 4) if size <= layout.ranks]))
    colocated = draw(st.booleans())
    engines = draw(st.integers(1, layout.ranks // each if colocated else 4))
    first = 0 if colocated else layout.ranks
    on_node = -(-max(layout.ranks, first + engines * each) // draw(st.integers(1, 8)))
    case = Case(arch, layout, each, engines, device="cuda")
    topology = topology_of(range(layout.ranks), range(first, first + engines * each), on_node)
    if draw(st.booleans()):  # CPUs
        sources, destinations = (
            tuple(Place(place.node) for place in of) for of in (topology.sources, topology.destinations)
        )
        topology = Topology(sources, destinations)
    transport = choose_transport("auto", topology)
    return replace(case, topology=replace(topology, two_hops=transport is TransportName.TWO_HOPS))


def sync(case: Case, active: frozenset[int], bucket_bytes: int) -> BlockingCluster:
    """Raises DeadlockError. Compares what the active engine ranks then hold."""
    assert case.topology is not None
    transport, plan = choose_transport("auto", case.topology), case.plan()
    checkpoint, cluster = random_checkpoint(case.arch), BlockingCluster(Sync(1, 1, 1, active))
    rendezvous: Any = BlockingMember(cluster)
    channel = Channel(transport, rendezvous, bucket_bytes)
    arrived = {index: empty(plan.destinations[index]) for index in sorted(active)}
    senders = [open_sender(channel, plan, source) for source in range(len(plan.sources))]
    receivers = [open_receiver(channel, plan, index, tensors) for index, tensors in arrived.items()]
    written: Counter[int] = Counter()
    unpack = Bucket.unpack

    def counted(bucket: Bucket, storages: Any, flat: torch.Tensor) -> None:
        written[bucket.receiver - len(plan.sources)] += sum(piece.end - piece.begin for piece in bucket.pieces)
        unpack(bucket, storages, flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "unpack", counted)
        ends = zip(senders, case.held(checkpoint), strict=True)
        work: list[Callable[[], None]] = [partial(sender.send, 1, tensors) for sender, tensors in ends]
        cluster.run(work + [partial(receiver.receive, 1) for receiver in receivers])
    for index, tensors in arrived.items():
        for name, expected in case.served(checkpoint, index % case.tensor).items():
            assert torch.equal(tensors[name], expected), (index, name)
        assert written[index] == 4 * sum(place.box.elements for place in plan.destinations[index].placements)
    for end in (*senders, *receivers):
        end.close()
    return cluster


@st.composite
def syncs(draw: st.DrawFn) -> tuple[Case, frozenset[int], int]:
    """A case, the ranks of the engines that take part, and bytes of a bucket."""
    case = draw(placements())
    engines = draw(st.sets(st.integers(0, case.engines - 1), min_size=1))
    active = frozenset(engine * case.tensor + rank for engine in engines for rank in range(case.tensor))
    return case, active, draw(st.sampled_from([1000, 6000]))


@settings(max_examples=CASES)
@given(drawn=syncs())
def test_no_schedule_deadlocks_and_every_byte_arrives_once(drawn: tuple[Case, frozenset[int], int]) -> None:
    sync(*drawn)


@pytest.mark.soak
@settings(max_examples=LONG_CASES)
@given(drawn=syncs())
def test_no_schedule_of_many_deadlocks(drawn: tuple[Case, frozenset[int], int]) -> None:
    sync(*drawn)


# --- controls: what blocked, blocks here ------------------------------------------------------------------------------

APART = replace(
    Case(architecture(), ParallelLayout(), device="cuda"), topology=Topology((Place("a", 0),), (Place("b", 0),))
)
BESIDE = replace(
    Case(architecture(), ParallelLayout(tensor=2), engines=2, device="cuda"),
    topology=replace(topology_of(range(2), range(2), 1), two_hops=True),
)
"""Two nodes of one GPU, which send to each other."""


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators are made by the first bucket of their pair."""
    monkeypatch.setattr(ProcessGroup, "_greet", lambda group, groups, part: None)


@pytest.mark.usefixtures("lazily")
def test_a_receiver_that_is_told_after_the_sender_blocked_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls before: the bucket first, then the message."""

    def hand_over(flow: Any, bucket: Bucket, index: int) -> None:
        receiver = bucket.after(flow._peer)
        flow._unacknowledged[index] = bucket
        ticket = flow._transport.ticket(index, receiver)
        flow._transport.send(index, bucket.bytes, receiver)
        flow._member.push(str(receiver), ["sent", bucket.key, index, ticket])

    sync(APART, frozenset({0}), 1000)
    monkeypatch.setattr(_Flow, "_hand_over", hand_over)
    with pytest.raises(DeadlockError):
        sync(APART, frozenset({0}), 1000)


def test_pairs_that_connect_when_they_first_send_deadlock_if_they_send_to_each_other(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    cluster = sync(BESIDE, frozenset({0, 1}), 1000)
    assert cluster.sent.keys() == {(0, 1), (1, 0)}
    request.getfixturevalue("lazily")
    with pytest.raises(DeadlockError):
        sync(BESIDE, frozenset({0, 1}), 1000)


@pytest.mark.parametrize(("at_once", "ends"), [(1, True), (2, False)])
def test_a_circle_deadlocks_if_a_bucket_lies_behind_another(*, at_once: int, ends: bool) -> None:
    """Each of three ranks sends to the next before it receives. may_send allows one bucket at a time."""
    cluster = BlockingCluster(Sync(1, 1, 1, frozenset()))
    ranks, byte = range(3), torch.zeros(1, dtype=torch.uint8)

    def run(rank: int) -> None:
        member: Any = BlockingMember(cluster)
        after, before = (rank + 1) % 3, (rank - 1) % 3
        group = BlockingProcessGroup(rank, lambda index: byte)
        group.connect(cluster.sync, member, Part(dict.fromkeys(ranks, ""), ((rank, after), (before, rank)), 1, 1), CPU)
        for index in range(at_once):
            assert group.may_send(after) == (index == 0)
            group.send(index, 1, after)
        member.push(str(after), ["sent"])
        member.wait(lambda: member.pop(str(rank), tuple), lambda: Problem("no message"))
        for index in range(at_once):
            group.receive(before, 1, index, SLOTS + index, "")()
        for index in range(at_once):
            group.sent(index, "")
        assert group.may_send(after)

    work = [partial(run, rank) for rank in ranks]
    if ends:
        cluster.run(work)
    else:
        with pytest.raises(DeadlockError):
            cluster.run(work)
