"""The engines' actors: start, stop, and restart beside engines that sample. Knows no request."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megagrpo.cluster.engines import EngineActor, EngineNodeActor, ask_engine, visible_gpus
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import answer_of, end_actors, wait_for, wait_until_started
from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.engine import EngineSpec
from megagrpo.weights.boxes import Manifest, Place

END_SECONDS = 30.0
CLOSE_SECONDS = 5.0
"""Time for an engine that may be stuck to close its server and remove its files, before it is killed."""


@dataclass
class Restart:
    """The restart of an engine: its old actors close, or are killed at `kill_at`; then its new ones start."""

    closing: list[ray.ObjectRef[None]]
    kill_at: float
    started: ray.ObjectRef[None] | None = None
    late_at: float = 0.0


class EngineActors:
    """One actor per engine, and one for each further node of an engine. The constructor starts them; they are ready
    after `wait_until_ready`. For one thread at a time."""

    def __init__(
        self,
        runtime: Runtime,
        recipe: Recipe,
        model_directory: Path,
        tokenizer_directory: Path,
        *,
        keeps_weights: bool = False,
    ) -> None:
        self._runtime, self._recipe, self._keeps_weights = runtime, recipe, keeps_weights
        self._directories = model_directory, tokenizer_directory
        self._index = {f"engine {index}": index for index in range(recipe.rollout.engines)}
        self.names = tuple(self._index)
        self.by_name: dict[str, Any] = {}
        self._other_nodes: dict[str, list[Any]] = {}
        self._manifests: dict[str, list[Manifest]] = {}
        self._starting = {name: self._start(name) for name in self._index}
        self.restarts: dict[str, Restart] = {}

    def wait_until_ready(self) -> None:
        """Raises EngineError naming the engines that did not start in `cluster.start_timeout_seconds`."""
        seconds = self._recipe.cluster.start_timeout_seconds
        wait_until_started(self._starting, "engines", seconds, self._runtime.watch)

    def restart(self, engine: str) -> None:
        """Closes an engine, even a busy one. `look` then starts its replacement."""
        closing = [actor.close.remote() for actor in self._actors_of(engine)]
        self.restarts[engine] = Restart(closing, time.monotonic() + CLOSE_SECONDS)

    def look(self, *, may_start: bool) -> dict[str, MegagrpoError | None]:
        """Advances all restarts without waiting. Returns those that are over: None if started, or the error."""
        over: dict[str, MegagrpoError | None] = {}
        for engine, restart in self.restarts.items():
            if restart.started is None:
                _, open_ = ray.wait(restart.closing, num_returns=len(restart.closing), timeout=0)
                if may_start and (not open_ or time.monotonic() > restart.kill_at):
                    for actor in self._actors_of(engine):
                        ray.kill(actor)
                    restart.started = self._start(engine)
                    restart.late_at = time.monotonic() + self._recipe.cluster.start_timeout_seconds
            elif ray.wait([restart.started], timeout=0)[0]:
                answer = answer_of(restart.started, engine, "starting", EngineError, None)
                over[engine] = answer if isinstance(answer, MegagrpoError) else None
            elif time.monotonic() > restart.late_at:
                given = f"nothing after {self._recipe.cluster.start_timeout_seconds:g} s"
                fix = "look at its log; cluster.start_timeout_seconds is the longest wait"
                over[engine] = EngineError(Problem(f"starting: no answer from {engine}", given, fix=fix))
        for engine in over:
            del self.restarts[engine]
        return over

    def manifests(self) -> dict[str, list[Manifest]]:
        """Returns the manifests of each engine's ranks. A restarted engine has the same: the recipe is the same."""
        if not self._manifests:
            self._manifests = wait_for(
                {name: ask_engine(actor, "manifests") for name, actor in self.by_name.items()},
                doing="manifests",
                timeout_seconds=self._recipe.cluster.start_timeout_seconds,
                error=EngineError,
                watch=self._runtime.watch,
            )
        return self._manifests

    def places(self) -> tuple[Place, ...]:
        """Returns node and device of every rank of every engine, in the order of `manifests`."""
        found: list[Place] = []
        for name, manifests in self.manifests().items():
            own = self._runtime.places_of_engine(self._index[name])
            found += own or [Place(name)] * len(manifests)
        return tuple(found)

    def give_up(self) -> None:
        """Ends all engines, even those that are busy."""
        self._end(list(self.by_name), CLOSE_SECONDS)

    def close(self) -> None:
        """Ends the engines and the servers that they started: in up to 30 s, or 5 s for engines that still start, and
        for those that failed."""
        _, starting = ray.wait(list(self._starting.values()), num_returns=len(self._starting), timeout=0)
        begun = [name for name, start in self._starting.items() if start in starting]
        self._end([name for name in {*begun, *self.restarts} if name in self.by_name], CLOSE_SECONDS)
        self._end(list(self.by_name), END_SECONDS)

    def _end(self, engines: Sequence[str], patience_seconds: float) -> None:
        """Asks these engines to close, and kills them. They cannot be used afterwards."""
        end_actors([actor for name in engines for actor in self._actors_of(name)], patience_seconds)
        for name in engines:
            del self.by_name[name], self._other_nodes[name]

    def _actors_of(self, engine: str) -> list[Any]:
        return [self.by_name[engine], *self._other_nodes[engine]]

    def _start(self, engine: str) -> ray.ObjectRef[None]:
        index = self._index[engine]
        self.by_name[engine] = self._runtime.start_engine(EngineActor, index)
        nodes = range(1, self._runtime.devices.engine_nodes)
        others = [self._runtime.start_engine(EngineNodeActor, index, node) for node in nodes]
        for node, other in zip(nodes, others, strict=True):
            other.prepare.remote(self._spec(index, node))
        self._other_nodes[engine] = others
        return self.by_name[engine].start.remote(self._spec(index), others)

    def _spec(self, index: int, node: int = 0) -> EngineSpec:
        model, tokenizer = self._directories
        on_nodes = self._runtime.places_of_engine_by_node(index)
        return EngineSpec(
            recipe=self._recipe,
            index=index,
            model_directory=str(model),
            tokenizer_directory=str(tokenizer),
            device=self._runtime.device,
            gpus=visible_gpus(on_nodes[node] if on_nodes else (), self._runtime.places),
            api_key=os.environ.get(self._recipe.rollout.api_key_variable or ""),
            keeps_weights=self._keeps_weights,
        )
