"""Megatron ranks in processes of their own send to engine ranks here, by each transport of exact shards; and faults."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megagrpo.errors import MegagrpoError, Problem
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.digest import digests, expected_digests
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from megagrpo.weights.transport.choice import Channel, TransportName, open_receiver, open_sender
from megagrpo.weights.transport.rendezvous import RendezvousHost
from megagrpo.weights.transport.shared_memory import DIRECTORY, remove_left_over
from megagrpo.weights.views import fill_padding
from tests.distributed import weight_ranks
from tests.rank_group import CALL_SECONDS, RankGroupError, run_ranks
from tests.tiny_models import make_model
from tests.weight_streams import Case, at_once, empty
from tests.weights_oracle import architecture, random_checkpoint

TRANSPORTS = [TransportName.SHARED_MEMORY, TransportName.PROCESS_GROUP]
BUCKET_BYTES = 20_000


@pytest.mark.parametrize(
    ("family", "layout", "engines", "tensor", "expert"),
    [
        ("qwen2", ParallelLayout(tensor=2), 1, 2, 1),
        ("qwen2_tied", ParallelLayout(pipeline=2), 2, 1, 1),
        ("qwen3", ParallelLayout(tensor=2, pipeline=2), 1, 2, 1),
        ("qwen3_moe", ParallelLayout(tensor=2, expert=2), 1, 2, 2),
        ("qwen3_moe", ParallelLayout(data=2, expert=2), 1, 2, 1),
        ("llama", ParallelLayout(data=2), 1, 1, 1),
    ],
    ids=["tensor2", "pipeline2_tied", "2x2", "tensor2_expert2", "data2_expert2", "data2"],
)
def test_megatron_ranks_fill_engine_ranks_by_each_transport(
    family: str, layout: ParallelLayout, engines: int, tensor: int, expert: int, tmp_path: Path
) -> None:
    directory = make_model(family, tmp_path)
    arch = read_architecture(directory)
    sources = [LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
    sizes = SimpleNamespace(tensor=tensor, expert=expert)
    destinations = [
        sglang.manifest(arch, sizes, rank, "float32", "cpu", engine)
        for engine in range(engines)
        for rank in range(tensor)
    ]
    plan = make_plan(sources, destinations)
    host = RendezvousHost("127.0.0.1", CALL_SECONDS)
    arrived = [empty(manifest) for manifest in destinations]
    driver = host.rendezvous.join("driver")
    errors: list[MegagrpoError | None] = []

    def receive() -> None:
        for version, transport in enumerate(TRANSPORTS):
            for tensors in arrived:
                for storage in tensors.values():
                    storage.fill_(torch.nan)
            receivers = [
                open_receiver(Channel(transport, host.rendezvous, BUCKET_BYTES), plan, index, tensors)
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
    sent = run_ranks(
        layout.ranks, weight_ranks.send_model, directory, layout, plan, host.rendezvous, TRANSPORTS, BUCKET_BYTES
    )
    receiving.join(CALL_SECONDS)
    assert [str(error) for error in errors if error is not None] == []
    assert len(errors) == 2 * len(arrived)
    expected = expected_digests(sent)
    for index, manifest in enumerate(destinations):
        assert digests(arrived[index], manifest.placements) == expected[index]


# --- faults -----------------------------------------------------------------------------------------------------------

CASE = Case(architecture(), ParallelLayout(tensor=2), tensor=1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_that_is_killed_ends_all_with_its_name(transport: TransportName) -> None:
    plan, held = CASE.plan(), CASE.held(random_checkpoint(CASE.arch))
    host = RendezvousHost("127.0.0.1", CALL_SECONDS)
    receiver = open_receiver(Channel(transport, host.rendezvous, 1500), plan, 0, empty(plan.destinations[0]))
    host.open(0, [0])
    ended: list[MegagrpoError | None] = []
    receiving = threading.Thread(target=lambda: ended.extend(at_once([lambda: receiver.receive(0)])), daemon=True)
    receiving.start()
    with pytest.raises(RankGroupError, match="died without a traceback"):
        run_ranks(2, weight_ranks.send_and_die, plan, host.rendezvous, transport, held, 1500)
    host.abort([Problem("train rank 1 was killed")])
    receiving.join(CALL_SECONDS / 2)  # long before the deadline
    (error,) = ended
    if (
        transport is TransportName.PROCESS_GROUP
    ):  # it was waiting for bytes of a bucket whose sender closed the connection
        assert "bucket 3 of " in str(error)
        assert "from train rank 1 to engine 0 rank 0" in str(error)
    else:
        assert "train rank 1 was killed" in str(error)
        assert list(DIRECTORY.glob(f"megagrpo-{host.rendezvous.run}-*"))
    remove_left_over(host.rendezvous.run)
    assert not list(DIRECTORY.glob(f"megagrpo-{host.rendezvous.run}-*"))
    receiver.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_acknowledgement_that_never_comes_ends_at_the_deadline(transport: TransportName) -> None:
    for seconds in (3, 30):  # a busy machine may not even begin in time
        error = sent_to_one_that_stops(transport, seconds)
        if "bucket 1 of " in error:
            break
    assert "bucket 1 of " in error
    assert "from train rank 0 to engine 0 rank 0" in error
    assert f"no acknowledgement by engine 0 rank 0 within {seconds} s" in error


def sent_to_one_that_stops(transport: TransportName, seconds: float) -> str:
    """How the sender ends."""
    case = Case(architecture(), ParallelLayout(), tensor=1)
    plan, held = case.plan(), case.held(random_checkpoint(case.arch))
    host = RendezvousHost("127.0.0.1", seconds)
    sender = open_sender(Channel(transport, host.rendezvous, 1500), plan, 0)
    host.open(0, [0])
    ended: list[MegagrpoError | None] = []
    sending = threading.Thread(target=lambda: ended.extend(at_once([lambda: sender.send(0, held[0])])), daemon=True)
    sending.start()
    with pytest.raises(RankGroupError):
        run_ranks(1, weight_ranks.receive_and_stop, plan, host.rendezvous, transport, 1500, timeout=seconds + 1.0)
    sending.join(CALL_SECONDS)
    sender.close()
    (error,) = ended
    return str(error)
