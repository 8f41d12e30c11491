"""Real servers of every kind of engine that tests share: starting one takes as long as a hundred tests on it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import psutil

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.processes.ports import free_port
from megagrpo.processes.store import LOOPBACK, StoreHost
from megagrpo.recipe.schema import EngineLayoutConfig, SglangConfig, VllmConfig
from megagrpo.rollout.client import Endpoint, EngineClient
from megagrpo.rollout.engine import EngineNode, EngineSpec, ServerSpec
from megagrpo.rollout.kinds import ENGINES
from megagrpo.rollout.server import Server, members
from megagrpo.rollout.sglang.client import SglangClient
from megagrpo.rollout.vllm.client import VllmClient
from megagrpo.types import SamplingParams
from megagrpo.weights.families import read_architecture
from megagrpo.weights.transport.choice import TransportName
from tests.engines.policy import WAIT_SECONDS, Policy
from tests.rollout_engines import model_directory
from tests.tiny_run import recipe_with

START_SECONDS = 600.0
AT_ONCE = 16
CONTEXT = 4096
TOKENS = 4000
PROMPT = (5, 6, 9, 11)


def vllm_python() -> Path | None:
    """Returns the interpreter with vLLM; None if there is none."""
    here = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
    path = Path(os.environ.get("MEGAGRPO_VLLM_PYTHON") or here)
    return path if path.exists() else None


@dataclass(frozen=True)
class Served(ABC):
    """A server that tests share, and the directory of its model."""

    server: Server
    family: str
    directory: Path
    layout: EngineLayoutConfig
    changes: Mapping[str, Any]
    """Changes of the family's tiny config."""

    kind: ClassVar[str]
    client_type: ClassVar[type[EngineClient]]
    paused: ClassVar[tuple[str, Mapping[str, Any]]]
    """The request that stops sampling in the server, whose engine knows nothing of it."""
    continued: ClassVar[str]
    worker: ClassVar[str]
    """Part of the name of a process with a part of the model."""
    ends_while_paused: ClassVar[bool]
    """True if an aborted request is answered while the server is paused."""

    @cached_property
    def engine(self) -> Any:
        """An engine that owns the server."""
        return ENGINES[self.kind].engine(spec_of(self.directory, self.layout), self.server)

    def close(self) -> None:
        if "engine" in vars(self):
            self.engine.close()

    @classmethod
    def changes_of(cls, family: str) -> dict[str, Any]:
        """Returns changes of a family's tiny config, so that the server can compute it and long responses fit."""
        # Latent attention has caches of as many positions as its rotary embedding is scaled to.
        return {} if family == "deepseek_v3" else {"max_position_embeddings": CONTEXT}

    @classmethod
    @abstractmethod
    def values(cls, directory: Path) -> dict[str, Any]:
        """Returns values of the server's spec that are this kind's own."""

    @abstractmethod
    def reset(self) -> None:
        """Lets the server go on for the next test: with its first weights, if engines begin without an update."""

    @abstractmethod
    def endless(self, engine: Any) -> SamplingParams:
        """Returns with what PROMPT is continued without an end by this engine."""

    @abstractmethod
    def requests(self) -> int:
        """Counts the requests that run or wait in the server."""

    @abstractmethod
    def batches(self) -> int:
        """Counts the batches that the server has computed."""

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(process) for process in members(self.server._process.pid)]

    @property
    def last_worker(self) -> psutil.Process:
        """The process with the last part of the model."""
        workers = [one for one in self.processes if self.worker in " ".join(one.cmdline())]
        return max(workers, key=lambda one: one.cmdline())

    def weights(self, seed: int) -> Path:
        """Directory of a model of the same family with other random weights; made when it is first asked for."""
        return model_directory(self.family, self.directory.parent / f"{self.family}-{seed}", seed=seed, **self.changes)

    @contextmanager
    def borrowed(self, *overrides: str, keeps_weights: bool = False) -> Iterator[Any]:
        """An engine over the same server, which it does not end. Afterwards the server is as before."""
        spec = spec_of(self.directory, self.layout, f"rollout.urls=['{self.server.url}']", *overrides)
        spec = replace(spec, api_key=self.server.api_key, keeps_weights=keeps_weights)
        engine: Any = ENGINES[self.kind].engine(spec, None)
        try:
            yield engine
        finally:
            engine.close()
            self.reset()

    @contextmanager
    def trained(self, *overrides: str) -> Iterator[tuple[Any, Policy]]:
        """A borrowed engine, and a training rank that has given it the first weights, as version 0."""
        with self.borrowed(*overrides) as engine:
            trainer = Policy(engine, self, ParallelLayout(), TransportName.SHARED_MEMORY)
            trainer.sync(0, self.directory)
            yield engine, trainer
            trainer.close()

    def get(self, path: str) -> Mapping[str, Any]:
        with client_of(self.server, self.client_type) as client:
            return client.get(path)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """To the server, not the engine, which knows nothing of it."""
        with client_of(self.server, self.client_type) as client:
            client.post(path, body or {})

    def wait_for_requests(self, count: int) -> None:
        """Until `count` requests run or wait in the server."""
        wait_until(lambda: self.requests() == count)

    def wait_for_batches(self, more: int) -> None:
        """Until the server has computed `more` batches."""
        enough = self.batches() + more
        wait_until(lambda: self.batches() >= enough)


class OnSglang(Served):
    """An SGLang server, which has weights as soon as it is started."""

    kind, client_type, worker = "sglang", SglangClient, "sglang::scheduler"
    paused, continued = ("/pause_generation", {"mode": "in_place"}), "/continue_generation"
    ends_while_paused = False

    @classmethod
    def values(cls, directory: Path) -> dict[str, Any]:
        settings = SglangConfig(decode_log_interval=1)  # type: ignore[call-arg]
        return {"settings": settings, "returns_routes": bool(read_architecture(directory).experts)}

    def reset(self) -> None:
        self.post("/pause_generation", {"mode": "abort"})
        self.post("/update_weights_from_disk", {"model_path": str(self.directory), "weight_version": "0"})
        self.post("/continue_generation")

    def endless(self, engine: Any) -> SamplingParams:
        return SamplingParams(TOKENS, temperature=0.0)

    def requests(self) -> int:
        (load,) = self.get("/v1/loads")["loads"]
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    def batches(self) -> int:
        return sum(" batch, " in line for line in self.server.log.read_text().splitlines())


class OnVllm(Served):
    """A vLLM server, whose engine begins with an update."""

    kind, client_type, worker = "vllm", VllmClient, "VLLM::Worker"
    paused, continued = ("/pause?mode=keep&clear_cache=false", {}), "/resume"
    ends_while_paused = True

    @classmethod
    def changes_of(cls, family: str) -> dict[str, Any]:
        """Returns heads of 32 columns: vLLM's attention on CPUs wants them."""
        return super().changes_of(family) | {"hidden_size": 128}

    @classmethod
    def values(cls, directory: Path) -> dict[str, Any]:
        return {"settings": VllmConfig(python=str(vllm_python())), "tokens_per_request": CONTEXT}

    def reset(self) -> None:
        self.post("/resume")

    def endless(self, engine: Any) -> SamplingParams:
        engine._stops = set()
        return SamplingParams(TOKENS)

    def requests(self) -> int:
        return self._metric("num_requests_running") + self._metric("num_requests_waiting")

    def batches(self) -> int:
        return self._metric("iteration_tokens_total_count")

    def _metric(self, name: str) -> int:
        lines = self.get("/metrics")["message"].splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith(f"vllm:{name}{{"))
        return int(float(value))


KINDS: dict[str, type[Served]] = {"sglang": OnSglang, "vllm": OnVllm}


@contextmanager
def client_of(server: Server, client_type: type[EngineClient] = SglangClient) -> Iterator[EngineClient]:
    endpoint = Endpoint(server.url, server.api_key)
    client = client_type(endpoint, failure=server.problem, timeout_seconds=WAIT_SECONDS)
    try:
        yield client
    finally:
        client.close()


def spec_of(directory: Path, layout: EngineLayoutConfig, *overrides: str) -> EngineSpec:
    recipe = recipe_with(
        "rollout.engine=external",
        f"rollout.layout={layout.model_dump_json()}",
        f"rollout.requests_at_once={AT_ONCE}",
        *(f"{field}.timeout_seconds={WAIT_SECONDS}" for field in ("rollout", "weights")),
        *overrides,
    )
    return EngineSpec(recipe, 0, str(directory), str(directory), "cpu")


def server_spec(**values: Any) -> ServerSpec:
    """Returns the spec of a server of one rank on CPUs, unless `values` say otherwise."""
    given: dict[str, Any] = {"name": "engine 0", "log": Path("log"), "settings": SglangConfig(), "dtype": "float32"}
    given |= {"layout": EngineLayoutConfig(), "device": "cpu", "threads": 1, "model_directory": "m"}
    return ServerSpec(**given | {"requests_at_once": 8, "tokens_per_request": 100} | values)


def start_server(
    directory: Path, layout: EngineLayoutConfig, log: Path, kind: str = "sglang", node: EngineNode | None = None
) -> Server:
    """Started, not yet ready: all of a server, or one of its nodes."""
    values: dict[str, Any] = {"log": log, "model_directory": str(directory), "layout": layout, "node": node}
    values |= {"requests_at_once": AT_ONCE, "tokens_per_request": TOKENS, "threads": layout.ranks}
    values |= {"pause_seconds": WAIT_SECONDS, "keeps_weights": True}  # tests sample before an update
    server = ENGINES[kind].server(server_spec(**values | KINDS[kind].values(directory)))
    assert isinstance(server, Server)
    return server


class Servers:
    """The servers that tests of a session share, each started when it is first asked for, and anew if it has ended."""

    def __init__(self, root: Path) -> None:
        self._root, self._ends = root, ExitStack()
        self._served: dict[tuple[str, str, int], Served] = {}
        self._ready: list[Server] = []

    def begin(self, kind: str, family: str, tensor: int) -> Served:
        """Starts a server, unless it runs. It may not be ready yet."""
        key = kind, family, tensor
        if key not in self._served or self._served[key].server._process.poll() is not None:
            changes = KINDS[kind].changes_of(family)
            directory = model_directory(family, self._root / f"{kind}_{tensor}_{len(self._served)}" / family, **changes)
            layout = EngineLayoutConfig(tensor=tensor)
            start = serve(directory, family, layout, kind=kind, ready=False, **changes)
            self._served[key] = self._ends.enter_context(start)
        return self._served[key]

    def get(self, kind: str, family: str, tensor: int) -> Served:
        served = self.begin(kind, family, tensor)
        if served.server not in self._ready:
            served.server.wait_until_ready(START_SECONDS)
            self._ready.append(served.server)
        return served

    def close(self) -> None:
        self._ends.close()


@contextmanager
def serve(
    directory: Path,
    family: str,
    layout: EngineLayoutConfig,
    nodes: int = 1,
    kind: str = "sglang",
    ready: bool = True,
    **changes: Any,
) -> Iterator[Served]:
    """A server of the model in `directory`, ended afterwards. Several nodes are processes of this machine."""
    host, port = StoreHost(LOOPBACK), free_port("", EngineNode.LATER_PORTS)
    of_node = [EngineNode(rank, nodes, host.address, port, (LOOPBACK,) * nodes) for rank in range(nodes)]
    logs = [directory.with_suffix(f".{rank}.log") for rank in range(nodes)]
    servers = [
        start_server(directory, layout, log, kind, node if nodes > 1 else None)
        for log, node in zip(logs, of_node, strict=True)
    ]
    served = KINDS[kind](servers[0], family, directory, layout, changes)
    try:
        if ready:
            servers[0].wait_until_ready(START_SECONDS)
        yield served
        served.close()
    finally:
        for server in servers:
            server.close()


@contextmanager
def until_closed(server: Server) -> Iterator[None]:
    """Waits until a server is ready, and closes it afterwards."""
    try:
        server.wait_until_ready(START_SECONDS)
        yield
    finally:
        server.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
