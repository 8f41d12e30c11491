"""Real SGLang servers that tests share: starting one takes as long as a hundred tests on it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.errors import MegagrpoError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.processes.ports import free_port
from megagrpo.processes.store import LOOPBACK, StoreHost
from megagrpo.recipe.schema import EngineLayoutConfig, SglangConfig
from megagrpo.rollout.client import Endpoint
from megagrpo.rollout.engine import EngineNode, EngineSpec, ServerSpec
from megagrpo.rollout.server import Server
from megagrpo.rollout.sglang import arguments
from megagrpo.rollout.sglang.client import SglangClient
from megagrpo.rollout.sglang.engine import SglangEngine
from megagrpo.types import Request, Sample, SamplingParams
from megagrpo.weights.families import read_architecture
from megagrpo.weights.plan import make_plan
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.disk import DiskFiles
from megagrpo.weights.transport.rendezvous import RendezvousHost
from tests.rollout_engines import model_directory
from tests.tiny_models import reference_model
from tests.tiny_run import recipe_with
from tests.weight_streams import loaded, manifests, sync, two_nodes, unlike_sent
from tests.weights_oracle import Tensors

# Deadlines that are only there to end a test that hangs: a busy machine may take fifty times what an idle one takes.
START_SECONDS = 600.0
WAIT_SECONDS = 240.0
AT_ONCE = 16
CONTEXT = 4096
TOKENS = 4000
# tied_server's model continues this prompt without an end when it samples greedily.
ENDLESS = SamplingParams(TOKENS, temperature=0.0)
ENDLESS_PROMPT = (5, 6, 9, 11)
BUCKET_BYTES = 30_000


@dataclass(frozen=True)
class Served:
    """A server that tests share, the directory of its model, and an engine over it that owns it."""

    server: Server
    family: str
    directory: Path
    layout: EngineLayoutConfig
    engine: SglangEngine
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the family's tiny config."""

    def weights(self, seed: int) -> Path:
        """Directory of a model of the same family with other random weights; made when it is first asked for."""
        return model_directory(self.family, self.directory.parent / f"{self.family}-{seed}", seed=seed, **self.changes)

    @contextmanager
    def borrowed(self, *overrides: str, keeps_weights: bool = False) -> Iterator[SglangEngine]:
        """An engine over the same server, which it does not end. Afterwards the server has its first weights again."""
        spec = spec_of(self.directory, self.layout, f"rollout.urls=['{self.server.url}']", *overrides)
        engine = SglangEngine(replace(spec, api_key=self.server.api_key, keeps_weights=keeps_weights))
        try:
            yield engine
        finally:
            engine.close()
            self.reset()

    @contextmanager
    def trained(self, *overrides: str) -> Iterator[tuple[SglangEngine, Policy]]:
        """A borrowed engine, and a training rank that has given it the first weights, as version 0."""
        with self.borrowed(*overrides) as engine:
            trainer = Policy(engine, self, ParallelLayout(), TransportName.SHARED_MEMORY)
            trainer.sync(0, self.directory)
            yield engine, trainer
            trainer.close()

    def reset(self) -> None:
        self.post("/pause_generation", {"mode": "abort"})
        self.post("/update_weights_from_disk", {"model_path": str(self.directory), "weight_version": "0"})
        self.post("/continue_generation", {})

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """To the server, not the engine, which knows nothing of it."""
        with client_of(self.server) as client:
            client.post(path, body)

    def abort_all(self) -> None:
        """Ends the requests in the server with the tokens that they have."""
        self.post("/abort_request", {"abort_all": True})

    def wait_for_requests(self, count: int) -> None:
        """Until `count` requests run or wait in the server."""
        deadline, found = time.monotonic() + WAIT_SECONDS, -1
        with client_of(self.server) as client:
            while found != count:
                assert time.monotonic() < deadline, found
                (load,) = client.get("/v1/loads")["loads"]
                found = load["num_running_reqs"] + load["num_waiting_reqs"]
                time.sleep(0.02)

    def batches(self) -> int:
        """Counts the batches that the server has computed: it logs each."""
        return sum(" batch, " in line for line in self.server.log.read_text().splitlines())

    def wait_for_batches(self, more: int) -> None:
        """Until the server has computed `more` batches."""
        enough, deadline = self.batches() + more, time.monotonic() + WAIT_SECONDS
        while self.batches() < enough:
            assert time.monotonic() < deadline, self.server.log_end()
            time.sleep(0.01)


@contextmanager
def client_of(server: Server) -> Iterator[SglangClient]:
    client = SglangClient(
        Endpoint(server.url, server.api_key),
        failure=lambda asked, given: server.problem(asked, given),
        timeout_seconds=WAIT_SECONDS,
    )
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


def start_server(
    directory: Path,
    layout: EngineLayoutConfig,
    log: Path,
    options: Mapping[str, Any] | None = None,
    node: EngineNode | None = None,
) -> Server:
    """Started, not yet ready: all of a server, or one of its nodes."""
    spec = server_spec(
        log=log,
        settings=SglangConfig(**options or {}),
        model_directory=str(directory),
        layout=layout,
        requests_at_once=AT_ONCE,
        tokens_per_request=TOKENS,
        threads=layout.ranks,
        pause_seconds=WAIT_SECONDS,
        keeps_weights=True,  # tests sample before an update
        returns_routes=bool(read_architecture(directory).experts),
        node=node,
    )
    return arguments.start_server(spec)


def server_spec(**values: Any) -> ServerSpec:
    """Returns the spec of a server of one rank on CPUs, unless `values` say otherwise."""
    given: dict[str, Any] = {"name": "engine 0", "log": Path("log"), "settings": SglangConfig(), "dtype": "float32"}
    given |= {"layout": EngineLayoutConfig(), "device": "cpu", "threads": 1, "model_directory": "m"}
    return ServerSpec(**given | {"requests_at_once": 8, "tokens_per_request": 100} | values)


def serve(family: str, tensor: int, root: Path) -> Iterator[Served]:
    """For fixtures: a started server of a tiny model, ended afterwards."""
    # Latent attention has caches of as many positions as its rotary embedding is scaled to.
    changes = {} if family == "deepseek_v3" else {"max_position_embeddings": CONTEXT}
    yield from serve_directory(model_directory(family, root / family, **changes), family, tensor)


def serve_directory(directory: Path, family: str, tensor: int = 1) -> Iterator[Served]:
    """For fixtures: a started server of the model in `directory`, ended afterwards."""
    yield from serve_layout(directory, family, EngineLayoutConfig(tensor=tensor))


def serve_layout(
    directory: Path, family: str, layout: EngineLayoutConfig, nodes: int = 1, **changes: Any
) -> Iterator[Served]:
    """Serves a layout as serve_directory does. Several nodes are processes of this machine."""
    host, port = StoreHost(LOOPBACK), free_port("", EngineNode.LATER_PORTS)
    of_node = [EngineNode(rank, nodes, host.address, port, (LOOPBACK,) * nodes) for rank in range(nodes)]
    logs = [directory.with_suffix(f".{rank}.log") for rank in range(nodes)]
    servers = [
        start_server(directory, layout, log, {"decode_log_interval": 1}, node if nodes > 1 else None)
        for log, node in zip(logs, of_node, strict=True)
    ]
    try:
        servers[0].wait_until_ready(START_SECONDS)
        engine = SglangEngine(spec_of(directory, layout), servers[0])
        yield Served(servers[0], family, directory, layout, engine, changes)
        engine.close()
    finally:
        for server in servers:
            server.close()


class Policy:
    """Training ranks of a layout, in threads, and one engine that they bring up to date. `files` is for DISK."""

    def __init__(
        self,
        engine: SglangEngine,
        served: Served,
        layout: ParallelLayout,
        transport: TransportName,
        timeout_seconds: float = WAIT_SECONDS,
        files: DiskFiles | None = None,
    ) -> None:
        self.engine, self.layout, self.served = engine, layout, served
        self.arch = read_architecture(served.directory)
        ends = manifests(self.arch, layout), engine.manifests()
        hops = two_nodes(*map(len, ends)) if transport is TransportName.TWO_HOPS else None
        self.plan = make_plan(*ends, hops)
        self.host = RendezvousHost("127.0.0.1", timeout_seconds)
        self.ranks = range(len(self.plan.destinations))
        self.channel = Channel(transport, self.host.rendezvous, BUCKET_BYTES)
        engine.connect(self.plan, self.ranks, self.channel)
        self.senders: list[Any] = [open_sender(self.channel, self.plan, i, files) for i in range(layout.ranks)]

    def held(self, directory: Path) -> list[Tensors]:
        return loaded(directory, manifests(self.arch, self.layout))

    def move(self, version: int, directory: Path) -> list[MegagrpoError]:
        """Between begin_update and end_update. The errors of training ranks, and then the engine's."""
        return sync(self.host, version, self.ranks, self.senders, self.held(directory), [self.engine])

    def wrong(self, directory: Path, arrived: list[dict[str, int]]) -> list[str]:
        return [problem.where for problem in unlike_sent(self.plan, self.held(directory), arrived)]

    def send(self, version: int, directory: Path) -> None:
        """Between begin_update and commit_update: every tensor of `directory` into the engine, and compared."""
        assert [str(error) for error in self.move(version, directory)] == []
        assert self.wrong(directory, self.engine.end_update(version)) == []

    def sync(self, version: int, directory: Path) -> None:
        self.engine.begin_update(version)
        self.send(version, directory)
        self.engine.commit_update(version)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


# --- what transformers says -------------------------------------------------------------------------------------------


@cache
def model_of(directory: Path) -> torch.nn.Module:
    return reference_model(directory)


@torch.no_grad()
def logits_of(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], before each token of a response, in float32."""
    return model_of(directory)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def difference(directory: Path, asked: Request, sample: Sample) -> np.ndarray:
    """[tokens], of the engine's logprobs from those that transformers gives with the weights in `directory`."""
    tokens = sample.tokens.tolist()
    logits = logits_of(directory, asked.tokens, tokens) / (asked.sampling.temperature or 1.0)
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].numpy()
    return np.abs(sample.logprobs - expected)
