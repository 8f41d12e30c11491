"""Exact shards in buckets: both ends of each transport in threads, and all that can go wrong."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagrpo import cli
from megagrpo.errors import ModelError, Problem, WeightSyncError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.processes.ports import own_address
from megagrpo.processes.store import StoreAddress
from megagrpo.weights.digest import digests
from megagrpo.weights.transport import process_group, rendezvous, sglang, shared_memory
from megagrpo.weights.transport.buckets import bucket_problems, label_of, outgoing
from megagrpo.weights.transport.choice import Channel, Sender, TransportName, open_receiver, open_sender
from megagrpo.weights.transport.ends import BucketReceiver, BucketSender, Message
from megagrpo.weights.transport.rendezvous import Rendezvous, RendezvousHost
from megagrpo.weights.transport.shared_memory import DIRECTORY, FileArea, SharedMemory, remove_left_over
from tests.weight_streams import Case, StandstillClock, at_once, empty, sync, unlike_sent
from tests.weights_oracle import Tensors, architecture, moe_architecture, random_checkpoint

EXACT = [TransportName.SHARED_MEMORY, TransportName.PROCESS_GROUP, TransportName.TWO_HOPS]
SMALL = Case(architecture(), ParallelLayout(tensor=2, pipeline=2), tensor=2, engines=2)
CAST = Case(moe_architecture(), ParallelLayout(tensor=2, data=2, expert=2), 2, 1, 2, "bfloat16")


@pytest.fixture
def host() -> RendezvousHost:
    return RendezvousHost("127.0.0.1", timeout_seconds=200.0)


# --- the rendezvous ---------------------------------------------------------------------------------------------------


def test_an_abort_ends_every_wait_with_its_reason(host: RendezvousHost) -> None:
    host.open(1, [0])
    one, other = host.rendezvous.join("one"), host.rendezvous.join("other")
    waits = threading.Event()

    def wait() -> None:
        with one.attend(1):
            one.wait(lambda: waits.set() or one.pop("1", Any), lambda: Problem("too late"))

    def fail() -> None:
        with other.attend(1):
            waits.wait()
            raise WeightSyncError(Problem("other: its disk is full"))

    waited, failed = at_once([wait, fail])
    assert "its disk is full" in str(waited)
    assert "its disk is full" in str(failed)


def test_a_deadline_says_what_was_awaited_and_is_kept(host: RendezvousHost, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    host.open(1, [0])
    member = host.rendezvous.join("one")
    with pytest.raises(WeightSyncError, match="nothing came"), member.attend(1):
        member.wait(lambda: member.pop("1", Any), lambda: Problem("nothing came"))
    assert sum(slept) == pytest.approx(200.0)


def test_messages_of_a_failed_attempt_are_not_seen_in_the_next(host: RendezvousHost) -> None:
    member = host.rendezvous.join("one")
    first = host.open(1, [0])
    with member.attend(1):
        member.push("1", ["sent", 0])
    host.abort([Problem("engine 0 died")])
    second = host.open(1, [0])
    assert (second.attempt, second.generation) == (first.attempt + 1, first.generation + 1)
    with member.attend(1):
        assert member.pop("1", Any) is None


def test_a_generation_lasts_until_an_end_fails_or_is_replaced(host: RendezvousHost) -> None:
    generations = [host.open(version, [0, 1]).generation for version in (1, 2, 3)]
    host.rendezvous.join("engine 0 rank 1").announce()
    generations.append(host.open(4, [0, 1]).generation)
    host.abort([Problem("failed")])
    generations.append(host.open(5, [0, 1]).generation)
    generations.append(host.open(5, [1]).generation)
    assert [after - before for before, after in pairwise(generations)] == [0, 0, 1, 1, 1]


def test_another_version_than_the_open_one_is_refused_for_all(host: RendezvousHost) -> None:
    host.open(7, [0])
    one, other = host.rendezvous.join("one"), host.rendezvous.join("other")
    with pytest.raises(WeightSyncError, match="version 7"), one.attend(6):
        pass
    with pytest.raises(WeightSyncError, match="version 7"), other.attend(7):
        other.wait(lambda: other.pop("1", Any), lambda: Problem("too late"))


def test_a_driver_that_is_gone_is_named() -> None:
    nowhere = Rendezvous(StoreAddress("127.0.0.1", 9, None, "secret"), "run", 0.5)
    with pytest.raises(WeightSyncError, match=r"train rank 3: the driver's rendezvous at 127\.0\.0\.1:9"):
        nowhere.join("train rank 3")


@pytest.mark.parametrize(
    "written",
    ["x", "[1]", '["sent", 0]', '["sent", [0, 1, "0"], 0, 0]', '["received", null]', '{"a": 1}', "[" * 9999, "\xff"],
)
def test_a_message_of_another_shape_is_an_error_that_names_its_queue(host: RendezvousHost, written: str) -> None:
    attempt, member = host.open(1, [0]).attempt, host.rendezvous.join("engine 0 rank 0")
    member.store.queue_push(f"queue/{attempt}/1", written)
    with pytest.raises(WeightSyncError, match=f"engine 0 rank 0: .*: queue/{attempt}/1"), member.attend(1):
        member.pop("1", Message)


@pytest.mark.parametrize("key", ["sync", "abort/1", "value/answer"])
def test_values_of_another_shape_are_errors_that_name_their_key(host: RendezvousHost, key: str) -> None:
    host.open(1, [0])
    member = host.rendezvous.join("engine 0 rank 0")
    member.store.set(key, '[[1, "x"]]')
    with pytest.raises(WeightSyncError, match=f"engine 0 rank 0: .*: {key}"), member.attend(1):
        member.wait(lambda: member.read("answer", sglang.Answer), lambda: Problem("too late"))


def test_a_value_beyond_the_bound_is_refused_unread(host: RendezvousHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BYTES_MAX", 100)
    member = host.rendezvous.join("one")
    member.write("long", "x" * 99)
    with pytest.raises(WeightSyncError, match="101 bytes"):
        member.read("long", str)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"\xff", b'{"action": "receive"}', b'{"action": "x", "name": 1}', b"[" * 9999]
)
def test_a_command_of_another_shape_ends_no_server(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    sglang.load(torch.nn.Module(), [("x", torch.tensor(list(data), dtype=torch.uint8))])
    assert "no command of megagrpo" in caplog.text


# --- both transports, both ends ---------------------------------------------------------------------------------------


class Ends:
    """Senders and receivers of a case, and what the engine ranks hold."""

    def __init__(self, case: Case, transport: TransportName, host: RendezvousHost) -> None:
        self.case, self.host, self.channel = case, host, Channel(transport, host.rendezvous, bucket_bytes=1500)
        self.plan = case.plan()
        self.arrived = [empty(manifest) for manifest in self.plan.destinations]
        self.senders: list[Any] = [self.sender(source) for source in range(len(self.plan.sources))]
        self.receivers: list[BucketReceiver] = [self.receiver(index) for index in range(len(self.arrived))]

    def sender(self, source: int) -> Sender:
        return open_sender(self.channel, self.plan, source)

    def receiver(self, index: int) -> BucketReceiver:
        return open_receiver(self.channel, self.plan, index, self.arrived[index])

    def sync(self, version: int, checkpoint: Tensors, destinations: list[int] | None = None) -> list[Any]:
        return self.sync_held(version, self.case.held(checkpoint), destinations)

    def sync_held(self, version: int, held: list[Tensors], destinations: list[int] | None = None) -> list[Any]:
        taking_part = list(range(len(self.receivers))) if destinations is None else destinations
        receivers = [self.receivers[index] for index in taking_part]
        return sync(self.host, version, taking_part, self.senders, held, receivers)

    def wrong(self, checkpoint: Tensors) -> list[Problem]:
        """Returns the verification of every engine rank."""
        of_ranks = zip(self.arrived, self.plan.destinations, strict=True)
        arrived = [digests(tensors, manifest.placements) for tensors, manifest in of_ranks]
        return unlike_sent(self.plan, self.case.held(checkpoint), arrived)

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()


@pytest.fixture
def ends(request: pytest.FixtureRequest, host: RendezvousHost) -> Iterator[Ends]:
    """Parametrized by (transport, case)."""
    transport, case = request.param
    made = Ends(case.on_two_nodes() if transport is TransportName.TWO_HOPS else case, transport, host)
    yield made
    made.close()


each_transport = pytest.mark.parametrize("ends", [(name, SMALL) for name in EXACT], ids=EXACT, indirect=True)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param((transport, case), id=f"{transport}-{name}")
        for transport in EXACT
        for name, case in (("relays", SMALL), ("experts_cast", CAST))
    ],
    indirect=True,
)
def test_sync_after_sync_leaves_what_each_rank_must_hold(ends: Ends) -> None:
    assert ends.case.engines == 1 or any(ends.plan.passed_on(index) for index in range(4))
    for version in range(4):
        checkpoint = random_checkpoint(ends.case.arch, seed=version)
        assert not ends.sync(version, checkpoint)
        assert not ends.wrong(checkpoint)
    assert ends.wrong(random_checkpoint(ends.case.arch, seed=8))
    assert not any(tensor.isnan().any() for tensors in ends.arrived for tensor in tensors.values())


@each_transport
def test_a_replaced_engine_rank_is_brought_up_to_date_alone_and_then_takes_part(ends: Ends) -> None:
    arch = ends.case.arch
    checkpoint = random_checkpoint(arch, seed=1)
    assert not ends.sync(1, checkpoint)
    for index in (2, 3):
        ends.arrived[index] = empty(ends.plan.destinations[index])
        ends.receivers[index].close()
        ends.receivers[index] = ends.receiver(index)
    assert not ends.sync(1, checkpoint, destinations=[2, 3])
    assert not ends.wrong(checkpoint)
    assert not ends.sync(2, random_checkpoint(arch, seed=2))
    assert not ends.wrong(random_checkpoint(arch, seed=2))


@each_transport
def test_after_an_aborted_sync_the_same_ends_go_on(ends: Ends) -> None:
    checkpoint = random_checkpoint(ends.case.arch)
    held = ends.case.held(checkpoint)
    held[1] = {**held[1], "chunk0.embedding.word_embeddings.weight": torch.zeros(1, 1)}
    errors = ends.sync_held(1, held)
    assert len(errors) == 8  # one raised, all others hear of it
    assert all("train rank 1: chunk0.embedding.word_embeddings.weight" in str(error) for error in errors)
    assert not ends.sync(1, checkpoint)
    assert not ends.wrong(checkpoint)


@pytest.mark.parametrize("transport", EXACT[:2])
def test_a_missing_peer_is_named_with_the_bucket(
    transport: TransportName, host: RendezvousHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(architecture(), ParallelLayout(tensor=2), tensor=1)
    ends = Ends(case, transport, host)
    held = case.held(random_checkpoint(case.arch))
    host.open(1, [0])
    with monkeypatch.context() as patch:
        StandstillClock(patch, host, peers=1)
        (without_receiver,) = at_once([lambda: ends.senders[0].send(1, held[0])])
    host.open(2, [0])
    receives = [lambda: ends.senders[0].send(2, held[0]), lambda: ends.receivers[0].receive(2)]
    with monkeypatch.context() as patch:
        StandstillClock(patch, host, peers=2)
        without_sender = at_once(receives)[1]
    ends.close()
    if transport is TransportName.PROCESS_GROUP:
        assert "train rank 1 did not join within 200 s" in str(without_receiver)
        assert "train rank 1 did not join within 200 s" in str(without_sender)
    else:
        for words in ("no acknowledgement by engine 0 rank 0 within 200 s", "bucket 1 of ", "(lm_head.weight)"):
            assert words in str(without_receiver)
        for words in ("from train rank 1 to engine 0 rank 0", "nothing came from train rank 1"):
            assert words in str(without_sender)


@pytest.fixture
def alone(host: RendezvousHost) -> Iterator[Callable[[], None]]:
    """Sends to an engine rank that answered the roll call of a process group and has ended since."""
    case = Case(architecture(), ParallelLayout())
    sender = open_sender(Channel(TransportName.PROCESS_GROUP, host.rendezvous, 1500), case.plan(), 0)
    opened = host.open(1, [0])
    host.rendezvous.join("engine 0 rank 0").write(f"group/{opened.generation}/1", True)
    yield partial(sender.send, 1, case.held(random_checkpoint(case.arch))[0])
    sender.close()


def test_a_peer_that_ends_between_the_roll_call_and_connecting_keeps_no_process_past_an_abort(
    host: RendezvousHost, alone: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    connects = threading.Event()
    monkeypatch.setattr(process_group, "own_address", lambda peer: connects.set() or own_address(peer))

    def notice() -> None:
        connects.wait()
        host.abort([Problem("engine 0 was killed")])

    error, _ = at_once([alone, notice])
    assert "engine 0 was killed" in str(error)


@pytest.mark.parametrize("raised", [OSError("no such network"), ValueError("no such device")])
def test_an_error_while_a_group_is_made_ends_the_sync(
    raised: Exception, alone: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(peer: str) -> str:
        raise raised

    monkeypatch.setattr(process_group, "own_address", fail)
    with pytest.raises((WeightSyncError, ValueError), match=str(raised)):
        alone()


def test_a_tensor_that_is_not_in_the_plan_is_refused_before_anything_moves(host: RendezvousHost) -> None:
    plan = SMALL.plan()
    tensors = empty(plan.destinations[1]) | {"extra.weight": torch.zeros(3)}
    with pytest.raises(ModelError, match=r"engine 0 rank 1: extra\.weight"):
        open_receiver(Channel(TransportName.SHARED_MEMORY, host.rendezvous, 1000), plan, 1, tensors)


# --- shared memory ----------------------------------------------------------------------------------------------------


class Corrupting(SharedMemory):
    """Flips one bit of the `nth` bucket that it sends, where it lies in the file."""

    def __init__(self, run: str, nth: int) -> None:
        super().__init__(run)
        self._before = nth

    def ticket(self, index: int, receiver: int) -> Any:
        name, begin = super().ticket(index, receiver)
        if self._before == 0:
            with (DIRECTORY / name).open("r+b") as file:
                file.seek(begin + 200)
                byte = file.read(1)[0]
                file.seek(begin + 200)
                file.write(bytes([byte ^ 4]))
        self._before -= 1
        return [name, begin]


def test_a_byte_that_changes_in_shared_memory_is_found_and_its_bucket_named(host: RendezvousHost) -> None:
    case = Case(architecture(), ParallelLayout(tensor=2), tensor=2, dtype="bfloat16")
    ends = Ends(case, TransportName.SHARED_MEMORY, host)
    plan, active = ends.plan, frozenset({0, 1})
    ends.senders[1] = BucketSender(plan, 1, host.rendezvous, 1500, Corrupting(host.rendezvous.run, nth=3))
    checkpoint = random_checkpoint(case.arch)
    assert not ends.sync(1, checkpoint)
    (problem,) = ends.wrong(checkpoint)
    tensor, rank = problem.where.split(" on ")[0], int("rank 1 after" in problem.where)
    held = case.held(checkpoint)
    sent: dict[str, int] = {}
    for source in range(2):
        sent |= ends.senders[source].bucket_digests(held[source], tensor, active)
    arrived = ends.receivers[rank].bucket_digests(tensor, active)["arrived"]
    (found,) = bucket_problems(tensor, sent, arrived)
    fourth = list(outgoing(plan, 1, active, 1500))[3]
    assert found.where == f"{tensor}: {label_of(plan, fourth)}"
    ends.close()


def test_files_are_private_reused_and_removed(host: RendezvousHost) -> None:
    case = Case(architecture(), ParallelLayout(tensor=2), tensor=2, one_node=False)
    ends = Ends(case, TransportName.SHARED_MEMORY, host)
    seen = []
    for version in range(3):
        assert not ends.sync(version, random_checkpoint(case.arch, seed=version))
        seen.append(sorted(DIRECTORY.glob(f"megagrpo-{host.rendezvous.run}-*")))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2  # one for each sender
    assert {stat.S_IMODE(file.stat().st_mode) for file in seen[0]} == {0o600}
    assert {file.stat().st_size for file in seen[0]} == {2 * shared_memory.mmap.PAGESIZE}
    ends.senders[0].close()
    assert not seen[0][0].exists() or not seen[0][1].exists()
    remove_left_over(host.rendezvous.run)
    assert not any(file.exists() for file in seen[0])
    ends.close()


def test_a_full_shared_memory_is_named_and_nothing_is_left(host: RendezvousHost) -> None:
    room = os.statvfs(DIRECTORY)
    with pytest.raises(WeightSyncError, match=r"No space left on device") as caught:
        FileArea(f"megagrpo-{host.rendezvous.run}-full", room.f_blocks * room.f_frsize + (1 << 20))
    assert "weights.bucket_bytes" in str(caught.value)
    assert not list(DIRECTORY.glob(f"megagrpo-{host.rendezvous.run}-*"))


def test_the_next_file_on_a_node_removes_those_of_killed_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps the files of an owner that lives, and of one too young to be locked."""
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    stem = "megagrpo-0"
    left, young, watched = (tmp_path / f"{stem}-{name}" for name in ("left", "young", "watched"))
    owner_code = (
        "import os, pathlib, sys, time; from megagrpo.weights.transport import shared_memory; "
        "shared_memory.DIRECTORY = pathlib.Path(sys.argv[1]); "
        "watched = shared_memory.FileArea(sys.argv[3], 4096); "
        "shared_memory.remove_after_me = lambda path: open(os.devnull, 'wb'); "
        "left = shared_memory.FileArea(sys.argv[2], 4096); print(flush=True); time.sleep(1000)"
    )
    command = [sys.executable, "-c", owner_code, str(tmp_path), left.name, watched.name]
    with subprocess.Popen(command, stdout=-1) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"\n"
            assert watched.exists()
            young.touch()
            os.utime(young, (2**32, 2**32))  # stays young
            os.utime(left, (0, 0))
            FileArea(f"{stem}-one", 4096).close()
            assert left.exists()
        finally:
            owner.kill()
    deadline = time.monotonic() + 20
    while watched.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not watched.exists(), "a shell that outlives its owner removes it"
    assert left.exists()
    FileArea(f"{stem}-two", 4096).close()
    assert not left.exists()
    assert young.exists()
    os.utime(young, (0, 0))
    assert cli.main(["doctor", "--clean"]) == 0
    assert f"removed {young}" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_only_files_of_the_run_are_mapped(host: RendezvousHost) -> None:
    stem = f"megagrpo-{host.rendezvous.run}-"
    with pytest.raises(WeightSyncError, match="a file of this run"):
        shared_memory.map_file(stem, "../etc/passwd", "bucket 1")
    with pytest.raises(WeightSyncError, match="No such file"):
        shared_memory.map_file(stem, f"{stem}gone", "bucket 1")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([["sent", [99, 1, 0], 0, 0]], "bucket 1 from peer 99"),
        ([["received", 5]], "an acknowledgement of slot 5"),
        ([["sent", [0, 1, 0], 0, 3]], "a ticket 3"),
        ([["sent", [0, 1, 0], 0, ["{name}", 4000]]], "bytes from 4000 on of 4096"),
        ([["sent", [0, 1, 0], 0, ["{name}", 0]]] * 2, r"bucket 1 from train rank 0\n.*it came twice"),
    ],
)
def test_messages_that_fit_no_bucket_are_errors(host: RendezvousHost, messages: list[list[Any]], said: str) -> None:
    plan = Case(architecture(), ParallelLayout(), tensor=1).plan()
    tensors = empty(plan.destinations[0])
    receiver = BucketReceiver(plan, 0, tensors, host.rendezvous, 1500, SharedMemory(host.rendezvous.run))
    area, stranger = FileArea(f"megagrpo-{host.rendezvous.run}-here", 4096), host.rendezvous.join("stranger")
    host.open(1, [0])
    with stranger.attend(1):
        for message in messages:
            if isinstance(message[-1], list):
                message[-1][0] = area.ticket(0)
            stranger.push("1", message)
    with pytest.raises(WeightSyncError, match=said):
        receiver.receive(1)
    area.close()
