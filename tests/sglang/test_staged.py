"""Weights through SGLang's own endpoints into real servers, from real Megatron ranks; and what goes wrong there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.errors import MegagrpoError, Problem, WeightSyncError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.sglang.engine import SglangEngine
from megagrpo.rollout.sglang.server import kill_group
from megagrpo.types import SamplingParams
from megagrpo.weights.executors.disk import DiskFiles
from megagrpo.weights.executors.meeting import MeetingHost
from megagrpo.weights.executors.sglang_ways import WAYS, open_sender
from megagrpo.weights.executors.ways import Way
from megagrpo.weights.families import read_architecture
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from megagrpo.weights.verification import expected_digests
from tests.rank_group import run_ranks
from tests.rollout_engines import model_directory
from tests.rollout_engines import request as ask
from tests.sglang.servers import START_SECONDS, WAIT_SECONDS, Served, settings, start_server
from tests.sglang.staged_ranks import Sending
from tests.sglang.test_shards import BUCKET_BYTES, LAYOUTS, PROMPT, SERVERS, Policy, check_holds, check_logprobs

Weights = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Directories of models of a family by seed, made when they are first asked for."""
    root = tmp_path_factory.mktemp("weights")
    return lambda family, seed: model_directory(family, root / f"{family}-{seed}", seed=seed)


def plan_from(layout: ParallelLayout, engine: SglangEngine, directory: Path) -> WeightPlan:
    arch = read_architecture(directory)
    sources = [LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
    return make_plan(sources, engine.manifests())


@pytest.mark.parametrize(
    ("server", "layout"),
    [
        pytest.param(
            server,
            LAYOUTS[layout],
            id=f"{server}-{layout}",
            marks=[pytest.mark.long] if server == "latent_server" else [],
        )
        for server, layouts in {
            "tied_server": ["pipeline2", "data2"],
            "split_server": ["tensor2", "2x2"],
            "moe_server": ["2x2", "expert2"],
            "latent_server": ["tensor2"],
        }.items()
        for layout in layouts
    ],
)
def test_every_way_brings_megatrons_weights_into_the_server(
    server: str, layout: ParallelLayout, weights: Weights, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    served: Served = request.getfixturevalue(server)
    host = MeetingHost("127.0.0.1", WAIT_SECONDS)
    test = host.meeting.join("the test")
    sendings = [
        Sending(way, tuple((2 * i + k, weights(SERVERS[server], (2 * i + k) % 3)) for k in (1, 2)))
        for i, way in enumerate(WAYS)
    ]

    def wait_for_all(key: str) -> None:
        test.start_clock()
        test.wait(lambda: test.add(key, 0) == layout.ranks or None, lambda: Problem(f"{key}: not all ranks"))

    with served.borrowed() as engine, ThreadPoolExecutor(1) as pool:
        plan = plan_from(layout, engine, served.directory)
        ranks = range(len(plan.destinations))
        files = DiskFiles(tmp_path / "versions", served.directory, "float32")
        sending_ranks = pool.submit(
            run_ranks,
            layout.ranks,
            "tests.sglang.staged_ranks:send_all",
            *(layout, plan, sendings, host.meeting, BUCKET_BYTES, len(ranks), files),
        )
        arrived = {}
        for sending in sendings:
            wait_for_all(f"ready {sending.way}")
            engine.connect(plan, ranks, sending.way, host.meeting, BUCKET_BYTES)
            for version, directory in sending.versions:
                engine.begin_update(version)
                host.open(version, ranks)
                test.say(f"open {version}", True)
                engine.receive(version)
                wait_for_all(f"sent {version}")
                arrived[version] = engine.end_update(version)
                engine.commit_update(version)
                check_holds(engine, directory)
            samples = engine.generate([ask(PROMPT, SamplingParams(24), seed=version)])
            assert (samples[0].versions == version).all()
            check_logprobs(samples, [PROMPT], {version: directory})
        sent = sending_ranks.result(WAIT_SECONDS)
    for version, digests in arrived.items():
        expected = expected_digests(of_rank[version] for of_rank in sent)
        assert digests == [expected[rank] for rank in ranks]


class StagedPolicy(Policy):
    """Training ranks of a layout, in threads, that send through SGLang's own endpoints."""

    def __init__(
        self, engine: SglangEngine, directory: Path, layout: ParallelLayout, way: Way, files: DiskFiles | None = None
    ) -> None:
        self.engine, self.layout, self.arch = engine, layout, read_architecture(directory)
        self.plan = plan_from(layout, engine, directory)
        self.host = MeetingHost("127.0.0.1", WAIT_SECONDS)
        self.ranks = range(len(self.plan.destinations))
        engine.connect(self.plan, self.ranks, way, self.host.meeting, BUCKET_BYTES)
        self.senders = [
            open_sender(
                way,
                self.plan,
                source,
                self.host.meeting,
                BUCKET_BYTES,
                ranks_per_engine=len(self.ranks),
                device=torch.device("cpu"),
                files=files,
            )
            for source in range(layout.ranks)
        ]


def test_payloads_given_to_the_wrong_rank_are_found_and_the_next_sync_mends_it(
    split_server: Served, weights: Weights
) -> None:
    with split_server.borrowed() as engine:
        policy = StagedPolicy(engine, split_server.directory, LAYOUTS["tensor2"], Way.DIRECT)
        staging: Any = engine._weights._receiver._staging  # type: ignore[union-attr]
        in_order = staging.shared
        staging.shared = lambda rank, number: in_order(1 - rank, number)
        engine.begin_update(1)
        assert not policy.move(1, weights("qwen3", 1))
        wrong = policy.wrong(weights("qwen3", 1), engine.end_update(1))
        assert any("q_proj.weight on engine 0 rank 0" in where for where in wrong)
        assert any("down_proj.weight on engine 0 rank 1" in where for where in wrong)
        assert not any("layernorm" in where for where in wrong)  # the same on both ranks
        staging.shared = in_order
        policy.sync(2, weights("qwen3", 1))
        check_holds(engine, weights("qwen3", 1))
        policy.close()


def test_a_shape_that_the_server_has_not_is_refused_before_anything_is_sent(tied_server: Served) -> None:
    with tied_server.borrowed() as engine:
        policy = StagedPolicy(engine, tied_server.directory, LAYOUTS["data2"], Way.DIRECT)
        receiver: Any = engine._weights._receiver
        (manifest,) = receiver._manifests
        name = "model.norm.weight"
        wrong = dict(manifest.storages) | {name: replace(manifest.storages[name], shape=(49,))}
        receiver._manifests = [replace(manifest, storages=wrong)]
        engine.begin_update(1)
        errors = policy.move(1, tied_server.directory)
        assert len(errors) == 3
        assert all(f"engine 0 rank 0: {name}" in str(error) and "[49]" in str(error) for error in errors)
        engine.end_update(1)
        policy.close()
    with tied_server.borrowed() as engine:
        check_holds(engine, tied_server.directory)  # it lives, with what it had


def test_a_server_without_our_loader_is_verified_by_its_checksums(
    split_server: Served, weights: Weights, tmp_path: Path
) -> None:
    with split_server.borrowed() as engine:
        assert isinstance(engine._weights._info, Mapping)
        engine._weights._info = {**engine._weights._info, "custom_weight_loader": []}
        files = DiskFiles(tmp_path / "versions", split_server.directory, "float32")
        policy = StagedPolicy(engine, split_server.directory, LAYOUTS["tensor2"], Way.DISK, files)
        policy.sync(1, weights("qwen3", 1))
        check_holds(engine, weights("qwen3", 1))
        engine.begin_update(2)
        assert not policy.move(2, weights("qwen3", 2))
        engine._client.post("/update_weights_from_disk", {"model_path": str(files.version(1)), "flush_cache": False})
        with pytest.raises(WeightSyncError) as caught:
            engine.end_update(2)
        places = {problem.where for problem in caught.value.problems}
        manifests = engine.manifests()
        assert places == {f"{manifest.holder}: {name}" for manifest in manifests for name in manifest.storages}
        policy.sync(3, weights("qwen3", 2))
        policy.close()
        with pytest.raises(WeightSyncError, match="a server without megagrpo's weight loader"):
            StagedPolicy(engine, split_server.directory, LAYOUTS["tensor2"], Way.DIRECT)


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[tuple[SglangEngine, int, Path]]:
    """An engine of its own, the process group of its server, and its model."""
    directory = model_directory("qwen2_tied", tmp_path / "model")
    server = start_server(directory, EngineLayoutConfig(), tmp_path / "doomed.log")
    try:
        server.wait_until_ready(START_SECONDS)
        engine = SglangEngine(server, **settings(directory, EngineLayoutConfig()))
        yield engine, server._process.pid, directory
        engine.close()
    finally:
        server.close()


@pytest.mark.long
def test_a_server_killed_in_the_middle_is_named(doomed: tuple[SglangEngine, int, Path]) -> None:
    engine, group, directory = doomed
    policy = StagedPolicy(engine, directory, LAYOUTS["data2"], Way.DIRECT)
    receiver: Any = engine._weights._receiver
    post, posts = receiver._post, []

    def post_and_kill(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        posts.append(path)
        if len(posts) == 4:  # after its parameters were described
            kill_group(group)
        return partial(post, path)(body)

    receiver._post = post_and_kill
    engine.begin_update(1)
    errors: list[MegagrpoError] = policy.move(1, directory)
    assert len(errors) == 3  # both training ranks and the engine
    assert all("bucket 4 of" in str(error) and "engine 0" in str(error) for error in errors)
    policy.close()
