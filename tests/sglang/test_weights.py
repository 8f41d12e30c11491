"""Weights into real SGLang servers: every layout, every rank, ten syncs while it generates, and faults."""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.errors import WeightSyncError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.rollout.sglang.engine import SglangEngine
from megagrpo.types import SamplingParams
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport import LOAD_FORMAT
from megagrpo.weights.transport.choice import TransportName
from megagrpo.weights.transport.disk import DiskFiles
from megagrpo.weights.transport.loader import read_plan
from megagrpo.weights.transport.sglang import serialize
from tests.engines.policy import WAIT_SECONDS, Policy, check_logprobs
from tests.engines.servers import AT_ONCE, PROMPT, Served
from tests.rollout_engines import generate
from tests.rollout_engines import request as ask
from tests.weight_streams import loaded

EXACT = [TransportName.SHARED_MEMORY, TransportName.PROCESS_GROUP]


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Policy]:
    """Parametrized by (server, layout, transport) or (server, layout, transport, timeout)."""
    server, *settings = request.param
    served = request.getfixturevalue(server)
    with served.borrowed() as engine:
        made = Policy(engine, served, *settings, files=DiskFiles(tmp_path / "versions", served.directory, "float32"))
        yield made
        made.close()
        if engine._update_open:  # the test failed: others need the server
            engine._end_update()


def check_holds(engine: SglangEngine, directory: Path) -> None:
    """/weights_checker says of each tensor of each rank the first 8 bytes of its SHA-256."""
    answer = engine._client.post("/weights_checker", {"action": "checksum"})
    for tensors, rank in zip(loaded(directory, engine.manifests()), answer["ranks"], strict=True):
        hashes = {name: hashlib.sha256(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
        assert rank["checksums"] == {name: found.digest()[:8].hex() for name, found in hashes.items()}


LAYOUTS = {
    "tensor2": ParallelLayout(tensor=2),
    "pipeline2": ParallelLayout(pipeline=2),
    "2x2": ParallelLayout(tensor=2, pipeline=2),
    "data2": ParallelLayout(data=2),
    "expert2": ParallelLayout(data=2, expert=2),
}
LONG, SOAK = [pytest.mark.long], [pytest.mark.soak]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param((server, LAYOUTS[layout], transport), id=f"{server}-{layout}-{transport}", marks=marks)
        for server, layout, transports, marks in [
            ("tied_server", "pipeline2", ["shared_memory"], []),
            ("tied_server", "pipeline2", ["disk"], SOAK),
            ("tied_server", "data2", ["process_group"], []),
            ("split_server", "tensor2", ["process_group"], []),
            ("split_server", "2x2", ["two_hops", "disk"], []),
            ("split_server", "expert2", ["shared_memory"], []),
            ("latent_server", "tensor2", ["shared_memory", "disk"], LONG),
            ("latent_server", "tensor2", ["process_group"], SOAK),
            ("mistral_server", "pipeline2", ["shared_memory"], SOAK),
        ]
        for transport in map(TransportName, transports)
    ],
    indirect=True,
)
def test_every_rank_holds_what_the_training_ranks_sent_and_samples_from_it(policy: Policy) -> None:
    for version in (1, 2):
        directory = policy.served.weights(version)
        policy.sync(version, directory)
        check_holds(policy.engine, directory)
        asked = ask(PROMPT, SamplingParams(24), seed=version)
        (sample,) = generate(policy.engine, [asked])
        assert (sample.versions == version).all()
        check_logprobs([sample], [asked], {version: directory})
        # Again with some of its tokens in the prompt, whose keys and values are cached already.
        longer = ask((*PROMPT, *sample.tokens.tolist()[:12]), SamplingParams(12), seed=version)
        check_logprobs(generate(policy.engine, [longer]), [longer], {version: directory})


@pytest.mark.parametrize(
    "policy",
    [
        ("split_server", LAYOUTS["2x2"], TransportName.SHARED_MEMORY),
        pytest.param(("split_server", LAYOUTS["expert2"], TransportName.PROCESS_GROUP), marks=SOAK),
    ],
    indirect=True,
)
def test_ten_syncs_while_it_generates(policy: Policy) -> None:
    directories = {version: policy.served.weights(1 + version % 4) for version in range(1, 12)}
    policy.sync(1, directories[1])
    asked = [ask((5, 6, 9 + i % 7, 11), SamplingParams(230), seed=i, index=i) for i in range(2 * AT_ONCE)]
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(generate, policy.engine, asked)
        for version in range(2, 12):
            policy.served.wait_for_batches(3)
            policy.sync(version, directories[version])
            check_holds(policy.engine, directories[version])
        policy.engine.give_back(range(len(asked)))
        samples = generating.result(WAIT_SECONDS)
    assert len({version for sample in samples for version in sample.versions.tolist()}) >= 3
    assert any(len(set(sample.versions.tolist())) > 1 for sample in samples)
    assert all((np.diff(sample.versions) >= 0).all() for sample in samples)
    check_logprobs(samples, asked, directories)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_wrong_shapes_and_commands_are_answered_and_the_server_lives(tied_server: Served) -> None:
    with tied_server.borrowed() as engine:
        policy = Policy(engine, tied_server, LAYOUTS["data2"], TransportName.SHARED_MEMORY)
        engine.begin_update(1)
        loader = engine._weights
        misshapen_plan = misshapen(policy.plan)
        loader._manifests = misshapen_plan.destinations  # the driver's own check lets the plan pass
        with pytest.raises(WeightSyncError) as caught:
            loader.connect(misshapen_plan, policy.ranks, policy.channel)
        loader._manifests = policy.plan.destinations
        assert [problem.where for problem in caught.value.problems] == ["engine 0 rank 0: model.norm.weight"]
        with pytest.raises(WeightSyncError, match="no weight plan"):
            loader.receive(1)
        nonsense = {"serialized_named_tensors": [serialize([{"action": "reset"}])], "load_format": LOAD_FORMAT}
        engine._client.post("/update_weights_from_tensor", nonsense | {"flush_cache": False})  # logged, not answered
        loader.connect(policy.plan, policy.ranks, policy.channel)
        assert not policy.move(1, tied_server.weights(1))
        assert not policy.wrong(tied_server.weights(1), engine.end_update(1))
        engine.commit_update(1)
        policy.close()


def misshapen(plan: WeightPlan) -> WeightPlan:
    """Makes the final norm longer than the server's, on the engine's side alone."""
    (manifest,) = plan.destinations
    storages = dict(manifest.storages)
    storages["model.norm.weight"] = replace(storages["model.norm.weight"], shape=(49,))
    return replace(plan, destinations=(replace(manifest, storages=storages),))


def test_a_server_without_our_loader_is_verified_by_its_checksums(split_server: Served, tmp_path: Path) -> None:
    with split_server.borrowed() as engine:
        engine._weights._info = {**engine._weights._info, "custom_weight_loader": []}
        files = DiskFiles(tmp_path / "versions", split_server.directory, "float32")
        policy = Policy(engine, split_server, LAYOUTS["tensor2"], TransportName.DISK, files=files)
        policy.sync(1, split_server.weights(1))
        check_holds(engine, split_server.weights(1))
        engine.begin_update(2)
        assert not policy.move(2, split_server.weights(2))
        engine._client.post("/update_weights_from_disk", {"model_path": str(files.version(1)), "flush_cache": False})
        with pytest.raises(WeightSyncError) as caught:
            engine.end_update(2)
        places = {problem.where for problem in caught.value.problems}
        manifests = engine.manifests()
        assert places == {f"{manifest.holder}: {name}" for manifest in manifests for name in manifest.storages}
        policy.sync(3, split_server.weights(2))
        policy.close()
        with pytest.raises(WeightSyncError, match="a server without megagrpo's weight loader"):
            Policy(engine, split_server, LAYOUTS["tensor2"], TransportName.SHARED_MEMORY)


@pytest.mark.parametrize("policy", [("latent_server", ParallelLayout(), TransportName.DISK)], indirect=True)
@pytest.mark.long
def test_derived_weights_that_stayed_old_are_named(policy: Policy) -> None:
    """SGLang computes latent attention with w_kc and w_vc, which it makes of the kv_b_proj that it loads."""
    engine, derived_from = policy.engine, "model.layers.1.self_attn.kv_b_proj.weight"
    engine.begin_update(1)
    assert not policy.move(1, policy.served.weights(1))
    shape = engine.manifests()[0].storages[derived_from].shape
    payload = base64.b64encode(pickle.dumps([(derived_from, torch.ones(shape))])).decode()
    body = {"serialized_named_tensors": [payload] * 2, "load_format": "direct", "flush_cache": False}
    engine._client.post("/update_weights_from_tensor", body)
    with pytest.raises(WeightSyncError) as caught:
        engine.end_update(1)
    stale = ["model.layers.1.self_attn.w_kc", "model.layers.1.self_attn.w_vc"]
    assert [problem.where for problem in caught.value.problems] == stale * 2  # on both ranks
    policy.sync(1, policy.served.weights(1))


def test_a_plan_that_would_run_code_is_not_read() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    with pytest.raises(pickle.UnpicklingError, match="system is no part of a weight plan"):
        read_plan(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="a weight plan is needed, not list"):
        read_plan(pickle.dumps([]))


def test_a_command_is_what_sglang_unpickles() -> None:
    named = pickle.loads(base64.b64decode(serialize([{"action": "digest"}, {"action": "plan"}])))
    texts = [b'{"action": "digest"}', b'{"action": "plan"}']
    assert [(name, bytes(data.numpy())) for name, data in named] == [("megagrpo command", text) for text in texts]
    assert LOAD_FORMAT.rpartition(".")[0] == serialize.__module__
