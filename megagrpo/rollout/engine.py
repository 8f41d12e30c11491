"""What the trainer asks of anything that generates. Knows neither Ray nor HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from megagrpo.errors import EngineError, Problem
from megagrpo.types import Request, Sample
from megagrpo.weights.boxes import Manifest

if TYPE_CHECKING:
    from megagrpo.weights.executors.meeting import Meeting
    from megagrpo.weights.executors.ways import Way
    from megagrpo.weights.plan import WeightPlan


class Engine(Protocol):
    """One holder of the policy that samples from it, on one or several engine ranks.

    Weights come in four steps, and no token is sampled between the first and the last:

        engine.begin_update(version)
        engine.receive(version)                 # while the training ranks send
        arrived = engine.end_update(version)    # compared with the training ranks' digests by the caller
        engine.commit_update(version)           # only if they agree; otherwise begin again

    Every method raises EngineError when called out of turn, or when the engine fails.
    """

    def manifests(self) -> list[Manifest]:
        """What each engine rank holds and where: destinations of a weight plan, in rank order."""
        ...

    def connect(
        self, plan: WeightPlan, destinations: Sequence[int], way: Way, meeting: Meeting, bucket_bytes: int
    ) -> None:
        """Opens the receiving end of every engine rank; `destinations` are the plan's indices of them, in rank order.

        Called once, and again with another plan or after a restart. Raises WeightSyncError if the engine does not hold
        what its manifests say.
        """
        ...

    def begin_update(self, version: int) -> None:
        """Pauses generation and opens an update. Also how an update that failed is begun again, from its start."""
        ...

    def receive(self, version: int) -> None:
        """Writes the weights in place as they arrive. Raises WeightSyncError if they do not."""
        ...

    def end_update(self, version: int) -> list[Mapping[str, int]]:
        """Closes the transfer and returns, by engine rank, the digest of what lies there of every checkpoint tensor."""
        ...

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        """After end_update of a sync to these destinations of the plan, to find the bucket of a wrong tensor: by engine
        rank, "sent" and "arrived" digests by bucket. Empty where weights did not come in buckets of exact shards."""
        ...

    def commit_update(self, version: int) -> None:
        """The digests agree: generation goes on, and tokens sampled from now on carry `version`."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """One sample for each request, in the same order."""
        ...

    def close(self) -> None:
        """Ends the engine and frees its weights. May be called in any state, and twice."""
        ...


class EngineState(Enum):
    """Where an engine stands between weight updates."""

    SERVING = "serving"
    """Its weights are one verified version. The only state in which it generates."""

    RECEIVING = "receiving weights"
    """An update is open: its weights are a mixture of two versions until end_update."""

    UNVERIFIED = "holding unverified weights"
    """Nobody has compared its weights' digests: an update has ended, or the weights were never ours or are gone.
    commit_update says that those of an update agree, begin_update starts over."""

    CLOSED = "closed"
    """Its weights are freed. Nothing but close is possible."""


@dataclass
class UpdateProtocol:
    """The order in which an engine may be called, apart from what it does. Every engine owns one.

    `version` is the newest committed weight version; `incoming` the one being received or awaiting its commit.
    """

    name: str
    state: EngineState = EngineState.SERVING
    version: int = 0
    incoming: int | None = None

    def begin(self, version: int) -> None:
        self._require(self.state is not EngineState.CLOSED, "begin_update", "an engine that is not closed")
        self._require(version >= self.version, f"begin_update({version})", f"version {self.version} or newer")
        self.state, self.incoming = EngineState.RECEIVING, version

    def check_receiving(self) -> None:
        self._require(self.state is EngineState.RECEIVING, "receive", "begin_update first")

    def end(self, version: int) -> None:
        self._require(self.state is EngineState.RECEIVING, f"end_update({version})", "begin_update first")
        self._require(
            version == self.incoming, f"end_update({version})", f"the version being received, {self.incoming}"
        )
        self.state = EngineState.UNVERIFIED

    def check_commit(self, version: int) -> None:
        self._require(self.state is EngineState.UNVERIFIED, f"commit_update({version})", "end_update first")
        self._require(version == self.incoming, f"commit_update({version})", f"the version received, {self.incoming}")

    def commit(self, version: int) -> None:
        self.check_commit(version)
        self.state, self.version, self.incoming = EngineState.SERVING, version, None

    def lose_weights(self) -> None:
        """What it holds is not, or no longer, the version that it last committed."""
        self._require(self.state is not EngineState.CLOSED, "lose_weights", "an engine that is not closed")
        self.state, self.incoming = EngineState.UNVERIFIED, None

    def check_serving(self) -> None:
        self._require(self.state is EngineState.SERVING, "generate", "weights whose update was committed")

    def close(self) -> None:
        self.state, self.incoming = EngineState.CLOSED, None

    def _require(self, condition: bool, called: str, needed: str) -> None:
        if not condition:
            raise EngineError(
                Problem(where=f"{self.name}: {called}", given=f"the engine is {self.state.value}", needed=needed)
            )


def check_prompts(requests: Sequence[Request], engine: str) -> None:
    """Raises EngineError for a prompt without tokens: there is nothing to sample after."""
    if empty := [request for request in requests if not request.tokens]:
        raise EngineError(Problem(f"{engine}: prompt {empty[0].prompt_id}", given="no tokens", needed="at least one"))
