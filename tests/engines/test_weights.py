"""Faults while weights come to real servers: a wrong byte, and a rank that stops answering."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.rollout import server as server_module
from megagrpo.weights.transport.buckets import bucket_problems
from megagrpo.weights.transport.choice import TransportName
from megagrpo.weights.transport.ends import BucketSender
from tests.engines.conftest import EACH
from tests.engines.policy import BUCKET_BYTES, WAIT_SECONDS, Policy
from tests.engines.servers import Served
from tests.unit.test_weights_transport import Corrupting

_, ON_VLLM = EACH


def check_wrong_byte_is_named(policy: Policy, weights: Any) -> None:
    """In the update to version 1, which is left as it is. weights: the engine's end of the transfer."""
    directory, rendezvous = policy.served.weights(1), policy.host.rendezvous
    good, corrupting = policy.senders[1], Corrupting(rendezvous.run, nth=2)
    policy.senders[1] = BucketSender(policy.plan, 1, rendezvous, BUCKET_BYTES, corrupting)
    policy.engine.begin_update(1)
    assert not policy.move(1, directory)
    (wrong,) = policy.wrong(directory, weights.digests())
    tensor, _, holder = wrong.removesuffix(" after the sync").partition(" on ")
    active, held = frozenset(policy.ranks), policy.held(directory)
    sent: dict[str, int] = {}
    for source in range(2):
        sent |= policy.senders[source].bucket_digests(held[source], tensor, active)
    arrived = weights.bucket_digests(tensor, policy.ranks)
    (found,) = [problem for of_rank in arrived for problem in bucket_problems(tensor, sent, of_rank["arrived"])]
    assert f"from train rank 1 to {holder}" in found.where
    policy.senders[1].close()
    policy.senders[1] = good


@pytest.mark.parametrize("served", ["split", ON_VLLM], indirect=True)
def test_a_bucket_that_changes_on_the_way_is_named_and_the_next_sync_mends_it(served: Served) -> None:
    with served.borrowed() as engine:
        policy = Policy(engine, served, ParallelLayout(tensor=2), TransportName.SHARED_MEMORY)
        check_wrong_byte_is_named(policy, engine._weights)
        policy.sync(2, served.weights(1))
        policy.close()


@pytest.mark.parametrize(
    ("served", "transport"),
    [
        ("split", TransportName.SHARED_MEMORY),
        ("split", TransportName.PROCESS_GROUP),
        pytest.param("vllm", TransportName.SHARED_MEMORY, marks=pytest.mark.needs("vllm")),
    ],
    indirect=["served"],
)
def test_a_rank_that_stops_answering_is_named_at_the_deadline_and_syncs_again_when_it_lives(
    served: Served, transport: TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.borrowed() as engine:
        policy = Policy(engine, served, ParallelLayout(tensor=2), transport, timeout_seconds=2.0)
        directory = served.weights(1)
        sync_in_time(policy, 1, directory)
        engine.begin_update(2)
        given_up = threading.Semaphore(0)
        monkeypatch.setattr(server_module, "STOPPED_SECONDS", 600)  # a busy machine may give up later than after 10 s
        for sender in policy.senders:
            monkeypatch.setattr(sender, "send", partial(then_release, sender.send, given_up))
        worker = served.last_worker
        worker.send_signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as pool:
                moving = pool.submit(policy.move, 2, directory)
                assert all(given_up.acquire(timeout=WAIT_SECONDS) for _ in policy.senders)
                time.sleep(1.0)  # the engine's other rank began to wait no later than this
                worker.send_signal(signal.SIGCONT)
                errors = moving.result(WAIT_SECONDS)
        finally:
            worker.send_signal(signal.SIGCONT)
        assert len(errors) == 3  # both training ranks and the engine
        # The other rank of the engine may wait for the stopped one inside the server, and is then as late.
        assert all("no acknowledgement by engine 0 rank " in str(error) for error in errors)
        assert all(" within 2 s" in str(error) for error in errors)
        sync_in_time(policy, 2, served.weights(2))
        policy.close()


def sync_in_time(policy: Policy, version: int, directory: Path) -> None:
    """Again if a busy machine misses a short deadline."""
    for _ in range(10):
        policy.engine.begin_update(version)
        if not (errors := policy.move(version, directory)):
            break
    assert not errors
    assert not policy.wrong(directory, policy.engine.end_update(version))
    policy.engine.commit_update(version)


def then_release(send: Callable[..., None], semaphore: threading.Semaphore, *arguments: Any) -> None:
    try:
        send(*arguments)
    finally:
        semaphore.release()
