"""Megatron ranks in processes of their own send to engine ranks here, by each transport of exact shards; and faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.errors import MegagrpoError, Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.weights.digest import digests, expected_digests, sent_digests
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.buckets import Peer, destination_peer
from megagrpo.weights.transport.choice import TRANSPORTS, Channel, TransportName, open_receiver, open_sender
from megagrpo.weights.transport.ends import BucketReceiver, BucketSender, Transport
from megagrpo.weights.transport.rendezvous import Rendezvous, RendezvousHost
from megagrpo.weights.transport.shared_memory import DIRECTORY, SharedMemory, remove_left_over
from megagrpo.weights.views import fill_padding
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS
from tests.distributed.parity_ranks import load_model
from tests.rank_group import CALL_SECONDS, RankGroupError, run_ranks
from tests.weight_streams import Case, at_once, empty
from tests.weights_oracle import Tensors, architecture, random_checkpoint

EXACT = [TransportName.SHARED_MEMORY, TransportName.PROCESS_GROUP, TransportName.TWO_HOPS]
BUCKET_BYTES = 20_000


@pytest.mark.parametrize(
    ("family", "name", "engines", "tensor", "expert"),
    [
        ("qwen2", "tensor", 1, 2, 1),
        ("qwen2_tied", "three stages", 2, 1, 1),
        ("qwen3", "tensor, unequal", 1, 2, 1),
        ("qwen3_moe", "expert over tensor", 1, 2, 2),
        ("qwen3_moe", "expert, data", 1, 2, 1),
        ("llama", "unequal, data", 1, 1, 1),
    ],
)
def test_megatron_ranks_fill_engine_ranks_by_each_transport(
    family: str, name: str, engines: int, tensor: int, expert: int, tiny: Tiny
) -> None:
    directory, layout = tiny(family), ROWS[name].of(family)
    case = Case(read_architecture(directory), layout, tensor, engines, expert, one_node=False)
    plans = [of.plan() for of in (case, case, case.on_two_nodes())]  # by transport
    destinations = plans[0].destinations
    host = RendezvousHost("127.0.0.1", CALL_SECONDS)
    arrived = [empty(manifest) for manifest in destinations]
    driver = host.rendezvous.join("driver")
    errors: list[MegagrpoError | None] = []

    def receive() -> None:
        for version, transport in enumerate(EXACT):
            for tensors in arrived:
                for storage in tensors.values():
                    storage.fill_(torch.nan)
            receivers = [
                open_receiver(Channel(transport, host.rendezvous, BUCKET_BYTES), plans[version], index, tensors)
                for index, tensors in enumerate(arrived)
            ]
            host.open(version, range(len(arrived)))
            driver.write(f"go {version}", True)
            errors.extend(at_once([partial(end.receive, version) for end in receivers]))
            for end in receivers:
                end.close()
            for manifest, tensors in zip(destinations, arrived, strict=True):
                expected = empty(manifest)
                load_files(directory, manifest, expected)
                for storage in expected.values():
                    storage.mul_(2.0 ** (version + 1))
                fill_padding(manifest, expected)
                wrong = [name for name in expected if not torch.equal(expected[name], tensors[name])]
                if wrong:
                    errors.append(AssertionError(f"{transport}: {manifest.holder}: {wrong}"))

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    sent = run_ranks(layout.ranks, send_model, directory, layout, plans, host.rendezvous)
    receiving.join(CALL_SECONDS)
    assert [str(error) for error in errors if error is not None] == []
    assert len(errors) == 3 * len(arrived)
    expected = expected_digests(sent)
    for index, manifest in enumerate(destinations):
        assert digests(arrived[index], manifest.placements) == expected[index]


# --- faults -----------------------------------------------------------------------------------------------------------

CASE = Case(architecture(), ParallelLayout(tensor=2), tensor=1)


@pytest.mark.parametrize("transport", EXACT)
def test_a_sender_that_is_killed_ends_all_with_its_name(transport: TransportName) -> None:
    case = CASE.on_two_nodes() if transport is TransportName.TWO_HOPS else CASE
    plan, held = case.plan(), case.held(random_checkpoint(case.arch))
    host = RendezvousHost("127.0.0.1", CALL_SECONDS)
    receiver = open_receiver(Channel(transport, host.rendezvous, 1500), plan, 0, empty(plan.destinations[0]))
    host.open(0, [0])
    ended: list[MegagrpoError | None] = []
    receiving = threading.Thread(target=lambda: ended.extend(at_once([lambda: receiver.receive(0)])), daemon=True)
    receiving.start()
    with pytest.raises(RankGroupError, match="died without a traceback"):
        run_ranks(2, send_and_die, plan, host.rendezvous, transport, held, 1500)
    host.abort([Problem("train rank 1 was killed")])
    receiving.join(CALL_SECONDS / 2)  # long before the deadline
    (error,) = ended
    # It waited for bytes of a bucket whose sender closed the connection, or the rank that forwards the bucket did. The
    # end of a sender may take bytes of the bucket before with it.
    if transport is not TransportName.SHARED_MEMORY:
        assert "bucket 2 of " in str(error) or "bucket 3 of " in str(error)
        assert "from train rank 1 to engine 0 rank 0" in str(error)
    else:
        assert "train rank 1 was killed" in str(error)
    remove_left_over(host.rendezvous.run)
    assert not list(DIRECTORY.glob(f"megagrpo-{host.rendezvous.run}-*"))
    receiver.close()


@pytest.mark.parametrize("transport", EXACT[:2])
def test_an_acknowledgement_that_never_comes_ends_at_the_deadline(transport: TransportName) -> None:
    for seconds in (1, 5, 30):  # a busy machine may not even begin in time
        error = sent_to_one_that_stops(transport, seconds)
        if "bucket 1 of " in error:
            break
    assert "bucket 1 of " in error
    assert "from train rank 0 to engine 0 rank 0" in error
    assert f"no acknowledgement by engine 0 rank 0 within {seconds} s" in error


def sent_to_one_that_stops(transport: TransportName, seconds: float) -> str:
    """Returns the sender's end."""
    case = Case(architecture(), ParallelLayout(), tensor=1)
    plan, held = case.plan(), case.held(random_checkpoint(case.arch))
    host = RendezvousHost("127.0.0.1", seconds)
    sender = open_sender(Channel(transport, host.rendezvous, 1500), plan, 0)
    host.open(0, [0])
    ended: list[MegagrpoError | None] = []
    sending = threading.Thread(target=lambda: ended.extend(at_once([lambda: sender.send(0, held[0])])), daemon=True)
    sending.start()
    with pytest.raises(RankGroupError):
        run_ranks(1, receive_and_stop, plan, host.rendezvous, transport, 1500, timeout=seconds + 1.0)
    sending.join(CALL_SECONDS)
    sender.close()
    (error,) = ended
    return str(error)


# --- on ranks ---------------------------------------------------------------------------------------------------------


def send_model(
    directory: Path, layout: ParallelLayout, plans: list[WeightPlan], rendezvous: Rendezvous
) -> dict[int, dict[str, int]]:
    """Sends the model once by each transport, as version 0, 1, ..., each doubled. The digests of the last."""
    source = torch.distributed.get_rank()
    process.start_parallel(layout, seed=1)
    tensors = load_model(directory, layout).tensors()
    member = rendezvous.join(f"rank {source}")
    for version, transport in enumerate(EXACT):
        member.wait(lambda key=f"go {version}": member.read(key, bool), lambda: Problem("the test does not go on"))
        for tensor in tensors.values():
            tensor.mul_(2)
        sender = open_sender(Channel(transport, rendezvous, BUCKET_BYTES), plans[version], source)
        sender.send(version, tensors)
        sender.close()
    return sent_digests(plans[-1], source, tensors)


def send_and_die(
    plan: WeightPlan, rendezvous: Rendezvous, name: TransportName, held: list[Tensors], bucket_bytes: int
) -> None:
    """Rank 1 is killed with its third bucket; in a process group once it was announced, before any byte has left."""
    source = torch.distributed.get_rank()
    transport = _opened(name, plan, source, rendezvous)
    if source == 1:
        transport = Dying(transport, bucket=2)
    BucketSender(plan, source, rendezvous, bucket_bytes, transport).send(0, held[source])


def receive_and_stop(plan: WeightPlan, rendezvous: Rendezvous, name: TransportName, bucket_bytes: int) -> None:
    """Stops, as if it hung, when its first bucket arrives."""
    transport = Stopping(_opened(name, plan, destination_peer(plan, 0), rendezvous))
    BucketReceiver(plan, 0, empty(plan.destinations[0]), rendezvous, bucket_bytes, transport).receive(0)


def _opened(name: TransportName, plan: WeightPlan, peer: Peer, rendezvous: Rendezvous) -> Any:
    opened = TRANSPORTS[name].opened
    assert opened is not None
    return opened(Channel(name, rendezvous, BUCKET_BYTES), plan, peer)


class Dying:
    """A transport whose process is killed at a bucket."""

    def __init__(self, transport: Transport, bucket: int) -> None:
        self._transport, self._before = transport, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def ticket(self, index: int, receiver: Peer) -> Any:
        if self._before == 0 and isinstance(self._transport, SharedMemory):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._transport.ticket(index, receiver)

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> None:
        if self._before == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._before -= 1
        self._transport.send(index, bucket_bytes, receiver)


class Stopping:
    """A transport whose process is stopped when the first bucket arrives."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(
        self, sender: Peer, bucket_bytes: int, ticket: Any, index: int, label: str
    ) -> Callable[[], torch.Tensor]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return self._transport.receive(sender, bucket_bytes, ticket, index, label)
