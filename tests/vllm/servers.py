"""Real vLLM servers for tests, in an environment that has vLLM."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.client import Endpoint
from megagrpo.rollout.engine import EngineSpec
from megagrpo.rollout.server import Server, members
from megagrpo.rollout.vllm.arguments import start_server
from megagrpo.rollout.vllm.client import VllmClient
from megagrpo.rollout.vllm.engine import VllmEngine
from megagrpo.weights.transport.choice import TransportName
from tests.rollout_engines import model_directory
from tests.sglang.servers import AT_ONCE, START_SECONDS, TOKENS, WAIT_SECONDS, Policy
from tests.tiny_run import recipe_with

VARIABLE = "MEGAGRPO_VLLM_PYTHON"
CHANGES = {"max_position_embeddings": 4096, "hidden_size": 128}
"""Changes of a family's tiny config: vLLM's attention on CPUs wants heads of 32 columns or more."""
OF_FAMILIES = {"qwen3_moe": {"head_dim": 32}}


def python() -> Path | None:
    """Returns the interpreter with vLLM; None if there is none."""
    path = Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python")
    return path if path.exists() else None


class Lent:
    """A server that an engine does not end."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def close(self) -> None:
        """Leaves it running."""


@dataclass(frozen=True)
class Served:
    """A server that tests of a module share, and the directory of its model."""

    server: Server
    family: str
    directory: Path
    layout: EngineLayoutConfig

    def weights(self, seed: int) -> Path:
        """Returns the directory of a model of the same family with other random weights."""
        return tiny_model(self.family, self.directory.parent / f"{self.family}-{seed}", seed=seed)

    @contextmanager
    def engine(self, *overrides: str) -> Iterator[VllmEngine]:
        """An engine over the server, without weights."""
        engine = VllmEngine(spec_of(self.directory, self.layout, *overrides), Lent(self.server))  # type: ignore[arg-type]
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def trained(self, *overrides: str) -> Iterator[tuple[VllmEngine, Policy]]:
        """An engine over the server, and a training rank that has given it the first weights, as version 0."""
        with self.engine(*overrides) as engine:
            trainer = Policy(engine, self, ParallelLayout(), TransportName.SHARED_MEMORY)  # type: ignore[arg-type]
            trainer.sync(0, self.directory)
            yield engine, trainer
            trainer.close()

    @cached_property
    def client(self) -> VllmClient:
        """A client of the server beside the engine's."""
        endpoint = Endpoint(self.server.url, self.server.api_key)
        return VllmClient(endpoint, failure=self.server.problem, timeout_seconds=WAIT_SECONDS)

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(process) for process in members(self.server._process.pid)]


def tiny_model(family: str, directory: Path, **changes: Any) -> Path:
    return model_directory(family, directory, **CHANGES | OF_FAMILIES.get(family, {}) | changes)


def spec_of(directory: Path, layout: EngineLayoutConfig, *overrides: str) -> EngineSpec:
    recipe = recipe_with(
        "rollout.engine=vllm",
        f"rollout.vllm.python={python()}",
        f"rollout.layout={layout.model_dump_json()}",
        f"rollout.requests_at_once={AT_ONCE}",
        *(f"{section}.timeout_seconds={WAIT_SECONDS}" for section in ("rollout", "weights")),
        *overrides,
    )
    return EngineSpec(recipe, 0, str(directory), str(directory), "cpu")


def serve(family: str, tensor: int, root: Path) -> Iterator[Served]:
    """For fixtures: a started server of a tiny model, ended afterwards."""
    directory, layout = tiny_model(family, root / family), EngineLayoutConfig(tensor=tensor)
    spec = replace(spec_of(directory, layout).server, log=root / "server.log", tokens_per_request=TOKENS + 96)
    server = start_server(spec)
    try:
        server.wait_until_ready(START_SECONDS)
        served = Served(server, family, directory, layout)
        yield served
        served.client.close()
    finally:
        server.close()


def wait_until(holds: Any, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
