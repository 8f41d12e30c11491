"""The nodes of a run: what they are called, and whether they live."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import ray
from ray.exceptions import ActorUnavailableError, RayError

from megagrpo.errors import NodeLostError, Problem

CHECK_SECONDS = 1.0
"""Between two looks at Ray's list of nodes."""
DEATH_SECONDS = 2.0
"""From an actor's death until Ray knows that the node went with it."""
SILENCE_SECONDS = 40.0
"""The same for an actor that cannot be reached: Ray calls a node dead after missing several answers of it."""


def node_names() -> dict[str, str]:
    """Name and address of every living node, by Ray's id of it."""
    return {node["NodeID"]: _name(node) for node in ray.nodes() if node["Alive"]}


class NodeWatch:
    """Watches the nodes of a run, and whatever else may end its waits. Every wait for an actor calls it."""

    def __init__(self, names: Mapping[str, str], check_stop: Callable[[], None] = lambda: None) -> None:
        """names: of the nodes that the run cannot do without, by Ray's id. check_stop: raises to end a wait."""
        self._names, self._check_stop = dict(names), check_stop
        self._next_look = 0.0

    def check(self) -> None:
        """To be called a few times a second. Raises NodeLostError, naming nodes, or what check_stop raises."""
        self._check_stop()
        if time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + CHECK_SECONDS

    def after_failure(self, failure: RayError) -> None:
        """Raises NodeLostError if an actor or a task failed because of its node, which Ray may notice late."""
        limit = SILENCE_SECONDS if isinstance(failure, ActorUnavailableError) else DEATH_SECONDS
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            self._check_stop()
            self._look()
            time.sleep(0.1)

    def _look(self) -> None:
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if lost := [name for node, name in self._names.items() if node not in living]:
            raise NodeLostError(
                Problem(
                    where=f"node {name}",
                    given="Ray has lost it: it is down, or cannot be reached",
                    needed="every node that the run started on, until its end",
                    fix="start the same command again: it continues from the newest checkpoint",
                )
                for name in lost
            )


def _name(node: Mapping[str, str]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
