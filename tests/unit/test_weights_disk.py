"""Weights through a checkpoint on disk, both ends in threads, and servers without our loader that are verified."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.errors import EngineError, MegagrpoError, Problem, WeightSyncError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.digest import digests
from megagrpo.weights.families import architecture_of
from megagrpo.weights.transport import LOAD_FORMAT
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.disk import MARKER, DiskFiles, DiskReceiver, remove_all, remove_older
from megagrpo.weights.transport.rendezvous import RendezvousHost
from megagrpo.weights.transport.sglang import check_verifiable, checked_digests, checksum
from tests.small_disk import small_disk
from tests.tiny_run import CONFIG, EXPERTS
from tests.weight_streams import Case, StandstillClock, empty
from tests.weight_streams import sync as sync_once
from tests.weights_oracle import Tensors, random_checkpoint

WITH_EXPERTS = CONFIG | EXPERTS
SPLIT = ParallelLayout(tensor=2, data=2, expert=2, expert_tensor=2)
DENSE = Case(architecture_of(CONFIG), ParallelLayout(tensor=2, pipeline=2), tensor=2, engines=2)
MOE = Case(architecture_of(WITH_EXPERTS), SPLIT, tensor=2, dtype="bfloat16")


@pytest.fixture
def host() -> RendezvousHost:
    return RendezvousHost("127.0.0.1", timeout_seconds=200.0)


class FakeServer:
    """One SGLang server's endpoints. `parameters` are its ranks' own; `loaded` is what it has read from disk."""

    def __init__(self, manifests: Sequence[Manifest], fails: bool = False) -> None:
        self.parameters = [empty(manifest) for manifest in manifests]
        self.loaded: dict[str, torch.Tensor] = {}
        self.fails = fails

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        assert path == "/weights_checker"
        ranks = [{name: checksum(tensor) for name, tensor in own.items()} for own in self.parameters]
        return {"ranks": [{"checksums": checksums} for checksums in ranks]}

    def load(self, directory: Path) -> None:
        if self.fails:
            raise EngineError(Problem("engine 0", "the connection broke"))
        self.loaded = {}
        for file in directory.glob("*.safetensors"):
            self.loaded |= load_file(file)

    def holds(self, case: Case, checkpoint: Tensors) -> bool:
        dtype = getattr(torch, case.dtype)
        assert self.loaded.keys() == checkpoint.keys()
        return all(torch.equal(self.loaded[name], checkpoint[name].to(dtype)) for name in checkpoint)


class Sync:
    """Training ranks that write, and engines with servers of their own."""

    def __init__(self, case: Case, host: RendezvousHost, files: DiskFiles) -> None:
        self.case, self.host, self.files, self.plan = case, host, files, case.plan()
        self.senders: list[Any] = [
            open_sender(Channel(TransportName.DISK, host.rendezvous, 0), self.plan, source, files)
            for source in range(case.layout.ranks)
        ]
        self.servers = [FakeServer(self.plan.destinations[: case.tensor]) for _ in range(case.engines)]
        self.receivers = [self.receiver(engine) for engine in range(case.engines)]

    def receiver(self, engine: int) -> DiskReceiver:
        ranks = range(engine * self.case.tensor, (engine + 1) * self.case.tensor)
        return DiskReceiver(ranks, self.host.rendezvous, self.servers[engine].load, f"engine {engine}")

    def run(self, version: int, checkpoint: Tensors, engines: list[int] | None = None) -> list[MegagrpoError]:
        """The errors of all ends."""
        engines = list(range(self.case.engines)) if engines is None else engines
        ranks = [engine * self.case.tensor + rank for engine in engines for rank in range(self.case.tensor)]
        receivers = [self.receivers[engine] for engine in engines]
        return sync_once(self.host, version, ranks, self.senders, self.case.held(checkpoint), receivers)


@pytest.fixture
def sync(request: pytest.FixtureRequest, host: RendezvousHost, tmp_path: Path) -> Sync:
    """DENSE, or the case that the test is parametrized by."""
    case = getattr(request, "param", DENSE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG if case is DENSE else WITH_EXPERTS))
    return Sync(case, host, DiskFiles(tmp_path / "versions", tmp_path / "model", case.dtype))


both = pytest.mark.parametrize("sync", [DENSE, MOE], ids=["dense", "experts"], indirect=True)


@both
def test_every_engine_loads_the_training_ranks_weights_sync_after_sync(sync: Sync) -> None:
    everyone = list(range(sync.case.engines))
    for version, engines in enumerate([everyone, everyone, everyone[-1:], everyone]):  # one alone: after a restart
        checkpoint = random_checkpoint(sync.case.arch, seed=version)
        assert sync.run(version, checkpoint, engines) == []
        assert all(sync.servers[engine].holds(sync.case, checkpoint) for engine in engines)


def test_a_server_that_dies_is_named_and_the_next_attempt_brings_it_up_to_date(sync: Sync) -> None:
    sync.servers[0].fails = True
    errors = sync.run(0, random_checkpoint(sync.case.arch))
    assert errors
    assert all("engine 0" in str(error) and "the connection broke" in str(error) for error in errors)
    sync.servers[0].fails = False
    sync.receivers[0] = sync.receiver(0)
    checkpoint = random_checkpoint(sync.case.arch, seed=9)
    assert sync.run(0, checkpoint) == []
    assert all(server.holds(sync.case, checkpoint) for server in sync.servers)


def test_a_training_rank_that_never_comes_is_named(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def send(self, version: int, tensors: object) -> None:
            pass

    StandstillClock(monkeypatch, sync.host, peers=len(sync.senders) - 1 + len(sync.receivers))
    sync.senders[1] = Absent()
    errors = sync.run(0, random_checkpoint(sync.case.arch))
    assert errors
    assert all("train rank 1" in str(error) and "within 200 s" in str(error) for error in errors)


def test_a_full_disk_is_named_and_the_version_before_stays(sync: Sync) -> None:
    files, everyone = sync.files, sync.case.layout.ranks + sync.case.engines
    checkpoint = random_checkpoint(sync.case.arch)
    assert sync.run(1, checkpoint) == []
    with small_disk(8192):
        errors = sync.run(2, checkpoint)
    assert len(errors) == everyone
    assert all(str(files.directory) in str(error) and "File too large" in str(error) for error in errors)
    assert [entry.name for entry in files.directory.iterdir()] == ["version_1"]
    assert sync.run(2, checkpoint) == []


def test_only_checkpoints_of_older_weights_are_removed(tmp_path: Path) -> None:
    ours = ("version_1", ".version_3.partial", "version_2", "version_10", "other_version_1", "version_1_notes")
    for name in (*ours, "version_0"):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "parts" / "model.safetensors").touch()
    for name in ours:
        (tmp_path / name / MARKER).touch()
    remove_older(tmp_path, 2)
    kept = ["other_version_1", "version_0", "version_10", "version_1_notes", "version_2"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == kept
    assert (tmp_path / "version_0" / "parts" / "model.safetensors").exists()


def test_a_run_removes_what_it_wrote_and_no_other_directory(sync: Sync) -> None:
    files, everyone = sync.files, sync.case.layout.ranks + sync.case.engines
    foreign = files.directory / "version_2"
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_bytes(b"mine")
    checkpoint = random_checkpoint(sync.case.arch)
    assert sync.run(1, checkpoint) == []
    assert sync.run(1, checkpoint) == []
    errors = sync.run(2, checkpoint)
    assert len(errors) == everyone
    assert all(str(foreign) in str(error) and MARKER in str(error) for error in errors)
    remove_all(files.directory)
    assert [path.name for path in files.directory.rglob("*")] == ["version_2", "model.safetensors"]
    (foreign / "model.safetensors").unlink()
    foreign.rmdir()
    assert sync.run(2, checkpoint) == []
    remove_all(files.directory)
    assert not files.directory.exists()
    remove_all(files.directory)


# --- servers that others manage ---------------------------------------------------------------------------------------


@both
def test_checksums_prove_digests_and_name_what_differs(sync: Sync) -> None:
    case, server, directory = sync.case, sync.servers[0], sync.files.model_directory
    manifests = sync.plan.destinations[: case.tensor]
    checkpoint = random_checkpoint(case.arch, dtype=getattr(torch, case.dtype))
    save_file(checkpoint, directory / "model.safetensors")
    for rank, parameters in enumerate(server.parameters):
        wanted = case.served(checkpoint, rank)
        for name, tensor in parameters.items():
            tensor.copy_(wanted[name])
    found = checked_digests(server.post, directory, manifests, 4000)
    assert found == [
        digests(parameters, manifest.placements)
        for parameters, manifest in zip(server.parameters, manifests, strict=True)
    ]
    server.parameters[1]["model.norm.weight"][3] += 1
    del server.parameters[0]["model.embed_tokens.weight"]
    server.parameters[0]["model.rotary"] = torch.ones(1)
    with pytest.raises(WeightSyncError) as raised:
        checked_digests(server.post, directory, manifests, 4000)
    places = [problem.where for problem in raised.value.problems]
    assert places == [
        "engine 0 rank 0: model.rotary",
        "engine 0 rank 0: model.embed_tokens.weight",
        "engine 0 rank 1: model.norm.weight",
    ]


def test_a_server_whose_weights_could_not_be_verified_is_refused() -> None:
    check_verifiable({"device": "cpu", "custom_weight_loader": []}, "engine 0", TransportName.DISK)
    check_verifiable({"device": "cuda", "custom_weight_loader": [LOAD_FORMAT]}, "engine 0", TransportName.DISK)
    for device, transport in (("cuda", TransportName.DISK), ("cpu", TransportName.PROCESS_GROUP)):
        with pytest.raises(WeightSyncError, match="engine 0") as raised:
            check_verifiable({"device": device, "custom_weight_loader": None}, "engine 0", transport)
        assert LOAD_FORMAT in str(raised.value)
