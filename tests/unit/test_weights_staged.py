"""Weights through SGLang's own endpoints, both ends in threads and a server of their own kind in this process."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megagrpo.errors import WeightSyncError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.boxes import Storage
from megagrpo.weights.digest import digests
from megagrpo.weights.executors import whole_tensors
from megagrpo.weights.executors.broadcast import BroadcastReceiver
from megagrpo.weights.executors.direct import DirectReceiver
from megagrpo.weights.executors.disk import MARKER, DiskFiles, DiskReceiver, remove_all, remove_older
from megagrpo.weights.executors.meeting import MeetingHost
from megagrpo.weights.executors.sglang_ways import WAYS, open_sender
from megagrpo.weights.executors.staged_buckets import staged_buckets, storage_bytes
from megagrpo.weights.executors.tensors import TensorsReceiver
from megagrpo.weights.executors.ways import Receiver, Sender, Way
from megagrpo.weights.executors.weights_checker import check_verifiable, checked_digests
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan
from tests.fake_sglang import FakeServer
from tests.weight_streams import Case, StandstillClock, at_once
from tests.weights_oracle import Tensors, architecture, engine_tensors, moe_architecture, random_checkpoint

CPU = torch.device("cpu")
DENSE = Case(architecture(tied_embeddings=True), ParallelLayout(tensor=2, pipeline=2), tensor=2, engines=2)
MOE = Case(moe_architecture(), ParallelLayout(tensor=2, data=2, expert=2, expert_tensor=2), tensor=2, dtype="bfloat16")
BUCKET_BYTES = 4000
"""Several buckets, and tensors larger than one."""


@pytest.fixture
def host() -> MeetingHost:
    return MeetingHost("127.0.0.1", timeout_seconds=200.0)


class Sync:
    """Both ends of one way: training ranks, and engines with servers of their own."""

    def __init__(
        self, case: Case, way: Way, host: MeetingHost, servers: list[FakeServer], files: DiskFiles | None = None
    ) -> None:
        self.case, self.host, self.servers, self.plan = case, host, servers, case.plan()
        self.senders: list[Sender] = [
            open_sender(
                way,
                self.plan,
                source,
                host.meeting,
                BUCKET_BYTES,
                ranks_per_engine=case.tensor,
                device=CPU,
                files=files,
            )
            for source in range(case.layout.ranks)
        ]
        self.receivers = [self.receiver(way, engine) for engine in range(case.engines)]

    def receiver(self, way: Way, engine: int) -> Receiver:
        ranks, meeting, post, name = self.case.tensor, self.host.meeting, self.servers[engine].post, f"engine {engine}"
        destinations = range(engine * ranks, (engine + 1) * ranks)
        match way:
            case Way.DIRECT:
                describe = self.servers[engine].describe
                return DirectReceiver(
                    self.plan, destinations, meeting, BUCKET_BYTES, post, name, describe, [CPU] * ranks
                )
            case Way.TENSORS:
                whole = whole_tensors.plan_for_engines(self.plan.sources, self.plan.destinations, ranks)
                return TensorsReceiver(whole, engine, meeting, BUCKET_BYTES, post, name, ranks, CPU)
            case Way.BROADCAST:
                return BroadcastReceiver(engine, destinations, meeting, post, name, "gloo")
            case _:
                return DiskReceiver(engine, meeting, post, name)

    def run(self, version: int, checkpoint: Tensors, engines: list[int] | None = None) -> list[WeightSyncError]:
        """The errors of all ends."""
        engines = list(range(self.case.engines)) if engines is None else engines
        ranks = self.case.tensor
        self.host.open(version, [engine * ranks + rank for engine in engines for rank in range(ranks)])
        work: list[Callable[[], None]] = [
            partial(sender.send, version, tensors)
            for sender, tensors in zip(self.senders, self.case.held(checkpoint), strict=True)
        ]
        work += [partial(self.receivers[engine].receive, version) for engine in engines]
        return [error for error in at_once(work) if isinstance(error, WeightSyncError)]

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()
            end.close()


def servers_of(plan: WeightPlan, case: Case) -> list[FakeServer]:
    return [
        FakeServer(plan.destinations[engine * case.tensor : (engine + 1) * case.tensor])
        for engine in range(case.engines)
    ]


def check_held(case: Case, way: Way, server: FakeServer, checkpoint: Tensors) -> None:
    """What a server holds, bit for bit: its ranks' parameters, or the tensors that its loader was given."""
    if way is Way.DIRECT:
        for rank, held in enumerate(server.parameters):
            wanted = engine_tensors(case.arch, case.tensor, case.expert, rank, "cpu", checkpoint)
            assert held.keys() == wanted.keys()
            assert all(torch.equal(held[name], wanted[name].to(held[name].dtype)) for name in wanted)
        return
    assert server.loaded.keys() == checkpoint.keys()
    dtype = getattr(torch, case.dtype)
    assert all(torch.equal(server.loaded[name], checkpoint[name].to(dtype)) for name in checkpoint)


def model_directory(arch: Architecture, directory: Path) -> Path:
    """A directory with the config.json of this architecture, and no weights."""
    config = {
        "model_type": arch.family, "hidden_size": arch.hidden, "intermediate_size": arch.ffn,
        "num_hidden_layers": arch.layers, "num_attention_heads": arch.heads, "num_key_value_heads": arch.query_groups,
        "head_dim": arch.head_dim, "vocab_size": arch.vocab, "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": arch.norm_epsilon, "tie_word_embeddings": arch.tied_embeddings, "rope_theta": arch.rope.theta,
    }  # fmt: skip
    if arch.experts is not None:
        config |= {
            "num_experts": arch.experts.count, "num_experts_per_tok": arch.experts.per_token,
            "moe_intermediate_size": arch.experts.ffn, "norm_topk_prob": arch.experts.normalize_top_k,
        }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    assert read_architecture(directory) == arch
    return directory


@pytest.fixture
def files(case: Case, tmp_path: Path) -> DiskFiles:
    return DiskFiles(tmp_path / "versions", model_directory(case.arch, tmp_path / "model"), case.dtype)


both = pytest.mark.parametrize("case", [DENSE, MOE], ids=["dense", "experts"])
dense = pytest.mark.parametrize("case", [DENSE], ids=["dense"])
every_way = pytest.mark.parametrize("way", WAYS)


@both
@every_way
def test_every_engine_holds_the_training_ranks_weights_sync_after_sync(
    way: Way, case: Case, host: MeetingHost, files: DiskFiles
) -> None:
    servers = servers_of(case.plan(), case)
    sync = Sync(case, way, host, servers, files)
    for version in range(3):
        checkpoint = random_checkpoint(case.arch, seed=version)
        assert sync.run(version, checkpoint) == []
        for server in servers:
            check_held(case, way, server, checkpoint)
            server.loaded.clear()
    if case.engines > 1:  # one of them alone, as after a restart, and then both again
        for version, engines in ((3, [1]), (4, [0, 1])):
            checkpoint = random_checkpoint(case.arch, seed=version)
            assert sync.run(version, checkpoint, engines) == []
            for engine in engines:
                check_held(case, way, servers[engine], checkpoint)
    assert all("weight_version" not in body for server in servers for _, body in server.calls)
    sync.close()
    assert not list(Path("/dev/shm").glob(f"*{host.meeting.run}*"))


@dense
@every_way
def test_a_server_that_dies_is_named_with_the_bucket_and_ends_the_sync_for_all(
    way: Way, case: Case, host: MeetingHost, files: DiskFiles
) -> None:
    servers = servers_of(case.plan(), case)
    at = {Way.DISK: [0], Way.BROADCAST: [1, 3]}.get(way, [0, 2])  # broadcast: requests after it joined the group
    for version, fails_at in enumerate(at):
        servers[0] = FakeServer(case.plan().destinations[:2], fails_at)
        sync = Sync(case, way, host, servers, files)
        errors = sync.run(version, random_checkpoint(case.arch))
        assert len(errors) >= 1 if way is Way.DISK else len(errors) >= 3
        assert all("engine 0" in str(error) for error in errors)
        broken = ("the connection broke", "Connection") if way is Way.BROADCAST else ("the connection broke",)
        assert all(any(text in str(error) for text in broken) for error in errors)
        if way in (Way.DIRECT, Way.TENSORS):
            assert all(f"bucket {fails_at + 1} of" in str(error) for error in errors)
        servers[0] = FakeServer(case.plan().destinations[:2])
        sync.servers[0], sync.receivers[0] = servers[0], sync.receiver(way, 0)
        checkpoint = random_checkpoint(case.arch, seed=9)
        assert sync.run(version, checkpoint) == []  # and the next attempt brings everybody up to date
        for server in servers:
            check_held(case, way, server, checkpoint)
        sync.close()


@dense
@every_way
def test_a_training_rank_that_never_comes_is_named(
    way: Way, case: Case, host: MeetingHost, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = servers_of(case.plan(), case)
    sync = Sync(case, way, host, servers, files)
    StandstillClock(monkeypatch, host, parties=len(sync.senders) - 1 + len(sync.receivers))
    sync.senders[1] = _Absent()
    errors = sync.run(0, random_checkpoint(case.arch))
    assert errors
    assert all("train rank 1" in str(error) for error in errors)
    assert all("within 200 s" in str(error) for error in errors)


class _Absent:
    def send(self, version: int, tensors: object) -> None:
        pass

    def close(self) -> None:
        pass


# --- direct -----------------------------------------------------------------------------------------------------------


@dense
@pytest.mark.parametrize("change", ["shape", "missing", "more", "dtype"])
def test_parameters_that_the_server_has_otherwise_are_named_before_anything_is_sent(
    case: Case, change: str, host: MeetingHost
) -> None:
    servers = servers_of(case.plan(), case)
    name = "model.layers.1.mlp.down_proj.weight"
    described = [dict(of_rank) for of_rank in servers[0].describe()]
    storage = described[1].pop(name)
    if change == "shape":
        described[1][name] = replace(storage, shape=storage.shape[::-1])
    elif change == "dtype":
        described[1][name] = replace(storage, dtype="bfloat16")
    elif change == "more":
        described[1] |= {name: storage, "model.extra.weight": storage}
        name = "model.extra.weight"
    servers[0].describe = lambda: described  # type: ignore[method-assign]
    sync = Sync(case, Way.DIRECT, host, servers)
    errors = sync.run(0, random_checkpoint(case.arch))
    assert all(f"engine 0 rank 1: {name}" in str(error) for error in errors)
    assert len(errors) == 1 + case.layout.ranks + 1  # both engines and all training ranks
    assert servers[0].calls == []
    sync.close()


# --- buckets ----------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=20),
    dtypes=st.data(),
    bucket_bytes=st.integers(1, 600),
    pairs=st.booleans(),
    alignment=st.sampled_from([1, 16]),
)
def test_buckets_hold_every_tensor_whole_in_order_without_overlap(
    shapes: list[tuple[int, ...]], dtypes: st.DataObject, bucket_bytes: int, pairs: bool, alignment: int
) -> None:
    storages = [
        Storage(f"t{index}", shape, dtypes.draw(st.sampled_from(["float32", "bfloat16"])))
        for index, shape in enumerate(shapes)
    ]

    def together(name: str) -> str:
        return str(int(name[1:]) // 2) if pairs else name

    buckets = staged_buckets(storages, bucket_bytes, together, alignment)
    assert [name for bucket in buckets for name in bucket.begins] == [storage.name for storage in storages]
    size = {storage.name: storage_bytes(storage) for storage in storages}
    for bucket in buckets:
        spans = [(begin, begin + size[name]) for name, begin in bucket.begins.items()]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % alignment == 0 for begin, _ in spans)
        assert spans[-1][1] <= bucket.bytes
        assert bucket.bytes <= bucket_bytes or len({together(name) for name in bucket.begins}) == 1
    bucket_of = {name: number for number, bucket in enumerate(buckets) for name in bucket.begins}
    if pairs:
        assert all(bucket_of[f"t{index}"] == bucket_of[f"t{index - 1}"] for index in range(1, len(storages), 2))


def test_what_sglang_fuses_while_loading_stays_in_one_bucket() -> None:
    names = ["x.q_a_proj.weight", "x.kv_a_proj_with_mqa.weight", "x.o_proj.weight", "y.q_a_proj.weight"]
    buckets = staged_buckets([Storage(name, (8,), "float32") for name in names], 32, whole_tensors.loaded_together)
    assert [list(bucket.begins) for bucket in buckets] == [names[:2], names[2:3], names[3:]]


# --- disk -------------------------------------------------------------------------------------------------------------


@dense
def test_a_full_disk_is_named_and_the_version_before_stays(case: Case, host: MeetingHost, files: DiskFiles) -> None:
    servers = servers_of(case.plan(), case)
    sync = Sync(case, Way.DISK, host, servers, files)
    checkpoint = random_checkpoint(case.arch)
    assert sync.run(1, checkpoint) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        errors = sync.run(2, checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(errors) == case.layout.ranks + case.engines
    assert all(str(files.directory) in str(error) and "File too large" in str(error) for error in errors)
    assert [entry.name for entry in files.directory.iterdir()] == ["version_1"]
    assert sync.run(2, checkpoint) == []
    assert sorted(entry.name for entry in files.directory.iterdir()) == ["version_1", "version_2"]
    remove_older(files.directory, 2)
    assert [entry.name for entry in files.directory.iterdir()] == ["version_2"]


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


@dense
def test_a_run_takes_with_it_what_it_wrote_and_no_directory_of_others(
    case: Case, host: MeetingHost, files: DiskFiles
) -> None:
    foreign = files.directory / "version_2"
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_bytes(b"mine")
    sync = Sync(case, Way.DISK, host, servers_of(case.plan(), case), files)
    checkpoint = random_checkpoint(case.arch)
    assert sync.run(1, checkpoint) == []
    assert sync.run(1, checkpoint) == []
    errors = sync.run(2, checkpoint)
    assert len(errors) == case.layout.ranks + case.engines
    assert all(str(foreign) in str(error) and "it is not of a weight sync" in str(error) for error in errors)
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
def test_checksums_prove_digests_and_name_what_differs(case: Case, files: DiskFiles) -> None:
    plan = case.plan()
    [server, *_] = servers_of(plan, case)
    manifests = plan.destinations[: case.tensor]
    checkpoint = random_checkpoint(case.arch, dtype=getattr(torch, case.dtype))
    save_file(checkpoint, files.model_directory / "model.safetensors")
    for rank, parameters in enumerate(server.parameters):
        wanted = engine_tensors(case.arch, case.tensor, case.expert, rank, "cpu", checkpoint)
        for name, tensor in parameters.items():
            tensor.copy_(wanted[name])
    found = checked_digests(server.post, files.model_directory, manifests, BUCKET_BYTES)
    assert found == [
        digests(parameters, manifest.placements)
        for parameters, manifest in zip(server.parameters, manifests, strict=True)
    ]
    server.parameters[1]["model.norm.weight"][3] += 1
    del server.parameters[0]["model.embed_tokens.weight"]
    server.parameters[0]["model.rotary"] = torch.ones(1)
    with pytest.raises(WeightSyncError) as raised:
        checked_digests(server.post, files.model_directory, manifests, BUCKET_BYTES)
    places = [problem.where for problem in raised.value.problems]
    assert places == [
        "engine 0 rank 0: model.rotary",
        "engine 0 rank 0: model.embed_tokens.weight",
        "engine 0 rank 1: model.norm.weight",
    ]


def test_a_gpu_server_without_our_loader_is_refused() -> None:
    loader = "megagrpo.weights.executors.sglang_loader.load"
    check_verifiable({"device": "cpu", "custom_weight_loader": []}, "engine 0")
    check_verifiable({"device": "cuda", "custom_weight_loader": [loader]}, "engine 0")
    with pytest.raises(WeightSyncError, match="engine 0: its weights could not be verified"):
        check_verifiable({"device": "cuda", "custom_weight_loader": None}, "engine 0")
