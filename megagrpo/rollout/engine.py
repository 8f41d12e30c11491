"""The interface of an engine to the trainer, in any process and by any protocol."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.recipe.defaults import dtype_name, replayed_routes, run_directory
from megagrpo.types import KeptSets, Request, Sample
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import read_architecture

if TYPE_CHECKING:
    from megagrpo.processes.store import StoreAddress  # imports torch, too early for an actor
    from megagrpo.recipe.schema import EngineLayoutConfig, Recipe
    from megagrpo.routes import RouteSizes
    from megagrpo.weights.plan import WeightPlan
    from megagrpo.weights.transport.choice import Channel

MemoryTag = Literal["weights", "kv_cache"]
Done = Callable[[int, "Sample | MegagrpoError"], None]
"""Takes a ticket and its request's sample or error, in any thread."""


@dataclass(frozen=True)
class SoFar:
    """All tokens that an engine has sampled of running requests, in arrays of all of them: few objects, however many
    requests there are."""

    tickets: np.ndarray  # int64 [requests]
    ends: np.ndarray  # int64 [requests], where each request's tokens end in the arrays of tokens
    tokens: np.ndarray  # int32 [t]
    logprobs: np.ndarray  # float32 [t]
    versions: np.ndarray  # int32 [t]
    kept: KeptSets  # [t]

    @classmethod
    def of(cls, samples: Mapping[int, Sample]) -> SoFar:
        """Joins samples, by ticket. Drops the last token of an ended one: an engine that resumes it samples that."""
        counts = {ticket: len(one.tokens) - (one.finish != "abort") for ticket, one in samples.items()}
        parts = [(samples[ticket], count) for ticket, count in counts.items() if count > 0]
        return cls(
            np.array([ticket for ticket, count in counts.items() if count > 0], np.int64),
            np.cumsum([count for _, count in parts], dtype=np.int64),
            np.concatenate([np.empty(0, np.int32), *(one.tokens[:count] for one, count in parts)]),
            np.concatenate([np.empty(0, np.float32), *(one.logprobs[:count] for one, count in parts)]),
            np.concatenate([np.empty(0, np.int32), *(one.versions[:count] for one, count in parts)]),
            KeptSets.joined((one.kept and one.kept.part(0, count), count) for one, count in parts),
        )

    def counts(self) -> dict[int, int]:
        """Returns the number of tokens by ticket."""
        return dict(zip(self.tickets.tolist(), np.diff(self.ends, prepend=0).tolist(), strict=True))

    def samples(self, requests: Mapping[int, Request]) -> dict[int, Sample]:
        """Returns, by ticket, the samples of these requests that have tokens. They have no text."""
        samples = {}
        for ticket, (start, end) in zip(self.tickets.tolist(), pairwise([0, *self.ends.tolist()]), strict=True):
            if (at := requests.get(ticket)) is not None:
                tokens, logprobs, versions = (array[start:end] for array in (self.tokens, self.logprobs, self.versions))
                kept = self.kept.part(start, end) if at.sampling.kept_sets else None
                samples[ticket] = Sample(at.prompt_id, at.index, tokens, logprobs, versions, "abort", "", kept=kept)
        return samples


@dataclass(frozen=True)
class EngineNode:
    """One of the `nodes` of an engine. Its ranks meet in a store on the first one; `port` is free there, and so are
    those LATER_PORTS after it. `addresses` are those of all its nodes."""

    LATER_PORTS = range(1, 16)

    rank: int
    nodes: int
    meeting: StoreAddress
    port: int
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class ServerSpec:
    """All from which a kind starts a server, or its process on `node`: one of an engine, or of a reward model.

    `settings`: its section of the recipe. `tokens_per_request`: the longest prompt with its response. `threads`: of all
    its ranks on CPUs; servers with another `index` get other cores. `pause_seconds`: the longest weight update. With
    `keeps_weights` it loads those of the model directory, and gets no update. With `chat_model` it is asked by
    conversations with a model of that name, not by token ids. With `top_ids` it is asked for the logprobs of given
    tokens, each with those of as many most likely ids. `returns_routes`: it can send the experts of tokens that it
    reads.
    """

    name: str
    log: Path
    settings: Any
    model_directory: str
    layout: EngineLayoutConfig
    dtype: str
    device: str
    requests_at_once: int
    tokens_per_request: int
    threads: int
    index: int = 0
    pause_seconds: float = 0.0
    deterministic: bool = False
    quantization: str | None = None
    keeps_weights: bool = False
    chat_model: str = ""
    top_ids: int | None = None
    returns_routes: bool = False
    node: EngineNode | None = None


@dataclass(frozen=True)
class EngineSpec:
    """All that travels from the driver to the process of engine `index` of a recipe, which makes the engine from it.

    `gpus` are the GPUs that its process on one node sees, as the node names them; empty on CPUs. `api_key` is that of a
    server that runs already. With `keeps_weights` the engine samples from the weights of the model directory, or of
    that server, and gets no update. `node`: of the process, if the engine is on several nodes.
    """

    recipe: Recipe
    index: int
    model_directory: str
    tokenizer_directory: str
    device: str
    gpus: tuple[int | str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    keeps_weights: bool = False
    node: EngineNode | None = None

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def dtype(self) -> str:
        return dtype_name(self.recipe, self.device)

    @property
    def quantization(self) -> str | None:
        """Returns the recipe's quantization; None for weights of the model directory, which are not quantised."""
        return None if self.keeps_weights else self.recipe.rollout.quantization

    @property
    def routes(self) -> RouteSizes | None:
        """Returns the sizes of the routes that its samples can have; None if no routes are replayed. An engine with
        `keeps_weights` samples for evaluations."""
        return None if self.keeps_weights else replayed_routes(self.recipe, read_architecture(self.model_directory))

    @property
    def server(self) -> ServerSpec:
        """Returns the spec of its server, or of the process on `node`."""
        recipe, rollout, name = self.recipe, self.recipe.rollout, self.name
        if self.node is not None and self.node.rank:
            name = f"{name} node {self.node.rank}"
        of_sets = (one.response_tokens_max or 0 for one in recipe.eval.of_sets().values())
        return ServerSpec(
            name=name,
            log=(run_directory(recipe) / "logs" / f"{name.replace(' ', '_')}.log").absolute(),
            settings=getattr(rollout, rollout.kind.settings or "", None),
            model_directory=self.model_directory,
            layout=rollout.layout,
            dtype=self.dtype,
            device=self.device,
            requests_at_once=rollout.requests_at_once,
            tokens_per_request=max(recipe.sequence_tokens_max, recipe.data.prompt_tokens_max + max(of_sets, default=0)),
            threads=self.threads,
            index=self.index,
            pause_seconds=recipe.weights.timeout_seconds,
            deterministic=bool(recipe.deterministic),
            quantization=self.quantization,
            keeps_weights=self.keeps_weights,
            returns_routes=self.routes is not None,
            node=self.node,
        )

    @property
    def threads(self) -> int:
        """Returns this engine's share of the node's cores, as if all engines of the run were on this node."""
        return max(1, (os.cpu_count() or 1) // self.recipe.rollout.engines)


class EngineState(Enum):
    """The state of an engine between weight updates."""

    SERVING = "serving"
    """Its weights are one verified version. The only state in which it generates."""

    RECEIVING = "receiving weights"
    """An update is open: its weights are a mixture of two versions until end_update."""

    UNVERIFIED = "holding unverified weights"
    """Its weights' digests are not compared: an update has ended, or the weights never came from this run, or are gone.
    commit_update follows if the digests of an update agree, begin_update if not."""

    CLOSED = "closed"
    """Its weights are freed. Nothing but close is possible."""


class Engine(ABC):
    """An engine: it holds the policy on one or several engine ranks, and samples from it.

    Samples: `begin` hands requests over, each with a ticket, and returns. The engine calls `done` once for each, when
    its sample is ready. A request that begins while the weights are not verified waits for them.

    An update of the weights has four steps, and no token is sampled between the first and the last:

        engine.begin_update(version)
        engine.receive(version)                 # while the training ranks send
        arrived = engine.end_update(version)    # compared with the training ranks' digests by the caller
        engine.commit_update(version)           # only if they agree; otherwise begin again

    The order of calls is checked here. A kind of engine implements the steps: `pause`, `open_update`,
    `receive_weights`, `close_update`, `label_weights` and `resume`. An update that failed is begun again in the same
    way. Every method raises EngineError when called out of turn, or when the engine fails.

    `version` is the newest committed weight version; `incoming` the one being received or awaiting its commit.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = EngineState.SERVING
        self.version = 0
        self.incoming: int | None = None
        self.oldest = 0
        """No update brings an older version. `connect` sets it to 0: training may have gone back to a checkpoint."""

    # --- an update, in order of its calls -----------------------------------------------------------------------------

    @abstractmethod
    def manifests(self) -> list[Manifest]:
        """Returns what each engine rank holds and where: destinations of a weight plan, in rank order."""

    @abstractmethod
    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        """Opens the receiving end of every engine rank; `destinations` are their indices in the plan, in rank order.

        Called once, and again with another plan or after a restart. Raises WeightSyncError if the engine does not hold
        what its manifests say.
        """

    def update(self, version: int) -> list[Mapping[str, int]]:
        """Receives a whole update. Returns as end_update."""
        self.begin_update(version)
        self.receive(version)
        return self.end_update(version)

    def begin_update(self, version: int) -> None:
        """Pauses generation and opens an update."""
        self._begin_and_pause(version)
        self.open_update()

    def receive(self, version: int) -> None:
        """Writes the weights in place as they arrive. Raises WeightSyncError if some do not arrive."""
        self._check_receiving("receive")
        self.receive_weights(version)

    def end_update(self, version: int) -> list[Mapping[str, int]]:
        """Closes the transfer and returns, by engine rank, the digest of every checkpoint tensor that it holds."""
        called = f"end_update({version})"
        self._check_receiving(called)
        self._require(version == self.incoming, called, f"the version being received, {self.incoming}")
        arrived = self.close_update()
        self._check_receiving(called)  # it may have been closed meanwhile
        self.state = EngineState.UNVERIFIED
        return arrived

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        """Returns, by engine rank, the "sent" and "arrived" digests of a tensor's buckets, to find the wrong bucket.

        Called after end_update of a sync to these destinations of the plan. Empty if weights do not come in buckets.
        """
        return []

    def commit_update(self, version: int) -> None:
        """Resumes generation, as the digests agree. Tokens sampled from now on carry `version`."""
        called = f"commit_update({version})"
        self._require(self.state is EngineState.UNVERIFIED, called, "end_update first")
        self._require(version == self.incoming, called, f"the version received, {self.incoming}")
        self.label_weights(version)
        self._require((self.state, self.incoming) == (EngineState.UNVERIFIED, version), called, "no call meanwhile")
        self.version, self.oldest, self.incoming = version, version, None
        self.state = EngineState.SERVING  # last: a thread that samples reads the version once it is serving
        self.resume()

    def keep_weights(self, version: int) -> None:
        """Labels the weights that it serves as `version`: an update that brings nothing. Raises EngineError if it
        holds no verified weights."""
        self._require(self.state is EngineState.SERVING, "keep_weights", "an engine with verified weights")
        self._begin_and_pause(version)
        self.state = EngineState.UNVERIFIED
        self.commit_update(version)

    def lose_weights(self) -> None:
        """Marks the weights as unverified: they are not, or no longer, the version last committed."""
        self._require(self.state is not EngineState.CLOSED, "lose_weights", "an engine that is not closed")
        self.state, self.incoming = EngineState.UNVERIFIED, None

    # --- the steps of an update, which a kind implements --------------------------------------------------------------

    @abstractmethod
    def pause(self) -> None:
        """Stops sampling, as the recipe's `pause` says, and returns once no step of the model uses the weights."""

    def open_update(self) -> None:  # noqa: B027  some have room already
        """Makes room for the weights."""

    @abstractmethod
    def receive_weights(self, version: int) -> None:
        """Writes the weights in place as they arrive."""

    @abstractmethod
    def close_update(self) -> list[Mapping[str, int]]:
        """Ends the transfer. Returns the digests of `end_update`."""

    def label_weights(self, version: int) -> None:  # noqa: B027  some read `version`
        """Labels the weights that arrived as `version`."""

    @abstractmethod
    def resume(self) -> None:
        """Samples again."""

    # --- samples ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, requests: Mapping[int, Request], done: Done) -> None:
        """Starts to sample these requests, by ticket. Raises EngineError for a prompt without tokens."""

    @abstractmethod
    def give_back(self, tickets: Collection[int]) -> None:
        """Ends these requests soon: their samples have the tokens so far, and finish "abort"."""

    @abstractmethod
    def so_far(self) -> SoFar:
        """Returns the tokens of running requests, as far as the engine knows them. Any thread may call it."""

    @abstractmethod
    def rests(self) -> bool:
        """Returns whether no token is due: nothing runs, weights are on their way, or the engine cannot tell."""

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:  # noqa: B027  some cannot
        """Frees device memory, if the engine can. No request may be running.

        After "weights" an update, which takes their memory back, must come before the next request. The cache takes its
        memory back at the next request.
        """

    def close(self) -> None:
        """Ends the engine and frees its weights. May be called in any state, and twice."""
        self.state, self.incoming = EngineState.CLOSED, None

    def check_requests(self, requests: Collection[Request]) -> None:
        """Raises EngineError if the engine is closed, or for a prompt without tokens: there is nothing to sample
        after."""
        self._require(self.state is not EngineState.CLOSED, "begin", "an engine that is not closed")
        if empty := [request.prompt_id for request in requests if not request.tokens]:
            raise EngineError(Problem(f"{self.name}: prompt {empty[0]}", given="no tokens", needed="at least one"))

    def _begin_and_pause(self, version: int) -> None:
        self._require(self.state is not EngineState.CLOSED, "begin_update", "an engine that is not closed")
        self._require(version >= self.oldest, f"begin_update({version})", f"version {self.oldest} or newer")
        self.state, self.incoming = EngineState.RECEIVING, version
        self.pause()

    def _check_receiving(self, called: str) -> None:
        self._require(self.state is EngineState.RECEIVING, called, "begin_update first")

    def _require(self, condition: bool, called: str, needed: str) -> None:
        if not condition:
            raise EngineError(Problem(f"{self.name}: {called}", f"the engine is {self.state.value}", needed))
