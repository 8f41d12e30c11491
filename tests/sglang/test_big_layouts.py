"""Engines as big models need them, as real servers: a pipeline, attention data parallelism, two nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.types import SamplingParams
from megagrpo.weights.transport.choice import TransportName
from megagrpo.weights.transport.disk import DiskFiles
from tests.engines.policy import WAIT_SECONDS, Policy, check_logprobs
from tests.engines.servers import CONTEXT, Served, serve
from tests.rollout_engines import generate, model_directory
from tests.rollout_engines import request as ask

LAYOUTS = {
    "pipeline": ("qwen2_tied", {"pipeline": 2}, 1),
    "attention_data": ("qwen3", {"tensor": 2, "attention_data": 2}, 1),
    "latent_attention_data": ("deepseek_v3", {"tensor": 2, "attention_data": 2}, 1),
    "two_nodes": ("qwen3", {"tensor": 2}, 2),
}
# Latent attention is tested without attention data parallelism in test_weights.py, and the third transport too.
OFTEN = {
    *(("pipeline", "disk"), ("attention_data", "shared_memory")),
}
PROMPTS = [(5, 6, 9, 11), (5, 6, 7), (8, 9, 10, 11, 12), (40, 3)]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, sizes, nodes = LAYOUTS[request.param]
    changes = {} if family == "deepseek_v3" else {"max_position_embeddings": CONTEXT}
    directory = model_directory(family, tmp_path_factory.mktemp(request.param) / family, **changes)
    with serve(directory, family, EngineLayoutConfig(**sizes), nodes) as served:
        yield served


def rows(*columns: Iterable[str]) -> list[ParameterSet]:
    """Every combination, with the mark of those for `make test-soak`."""
    return [pytest.param(*row, marks=[] if row in OFTEN else pytest.mark.soak) for row in product(*columns)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("served", "transport"),
    rows(LAYOUTS, ("shared_memory", "process_group", "disk")),
    indirect=["served"],
)
def test_every_rank_is_synced_and_verified_and_samples_from_what_came(
    served: Served, transport: str, tmp_path: Path
) -> None:
    with served.borrowed() as engine:
        files = DiskFiles(tmp_path / "versions", served.directory, "float32")
        policy = Policy(engine, served, ParallelLayout(tensor=2), TransportName(transport), files=files)
        for version in (1, 2):
            directory = served.weights(version)
            policy.sync(version, directory)
            asked = [ask(prompt, SamplingParams(24), seed=i) for i, prompt in enumerate(PROMPTS)]
            samples = generate(engine, asked)
            assert all((sample.versions == version).all() for sample in samples)
            check_logprobs(samples, asked, {version: directory})
        policy.close()


@pytest.mark.long
@pytest.mark.parametrize("served", rows(LAYOUTS), indirect=True)
def test_a_sync_while_it_samples_leaves_no_token_without_its_version(served: Served) -> None:
    with served.trained() as (engine, trainer), ThreadPoolExecutor(1) as pool:
        new = served.weights(1)
        asked = [ask(prompt, SamplingParams(200), seed=i) for i, prompt in enumerate(PROMPTS)]
        generating = pool.submit(generate, engine, asked)
        served.wait_for_batches(3)
        trainer.sync(1, new)
        samples = generating.result(WAIT_SECONDS) + generate(engine, asked)
        check_logprobs(samples, asked * 2, {0: served.directory, 1: new})
