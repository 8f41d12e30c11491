"""Waiting for Ray actors: with a deadline, and an error that names the actors that did not answer.

A wait also ends when the run loses a node, and when the run is told to stop where a stop is allowed: `watch` raises
then. Only the waits that close a run have no watch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from megagrpo.errors import MegagrpoError, NodeLostError, Problem

CHECK_SECONDS = 1.0
"""Between two looks at Ray's list of nodes."""
DEATH_SECONDS = 2.0
"""From an actor's death until Ray knows that its node died."""
SILENCE_SECONDS = 40.0
"""From an actor out of reach until Ray calls its node dead: several answers of the node must be missing."""
SLICE_SECONDS = 0.2
"""Part of a wait between two looks at its watch."""


def node_names() -> dict[str, str]:
    """Name and address of every living node, by Ray's id."""
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"]
    }


class NodeWatch:
    """Ends waits for actors: when the run loses a node, or when `check_stop` raises."""

    def __init__(self, names: Mapping[str, str], check_stop: Callable[[], None] = lambda: None) -> None:
        """names: of the nodes that the run needs, by Ray's id. check_stop: raises to end a wait."""
        self._names, self._check_stop = dict(names), check_stop
        self._next_look = 0.0

    def check(self) -> None:
        """Called a few times a second. Raises NodeLostError, naming nodes, or what check_stop raises."""
        self._check_stop()
        if time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + CHECK_SECONDS

    def after_failure(self, failure: RayError) -> None:
        """Raises NodeLostError if an actor or a task failed because its node died, which Ray may notice late."""
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


def wait_for(
    results: Mapping[str, ray.ObjectRef[Any]],
    *,
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
    watch: NodeWatch,
) -> dict[str, Any]:
    """Results by name, in the order of `results`, once all are there.

    Fails as soon as one actor does, before the deadline: a dead rank leaves its peers hanging in a collective.
    A MegagrpoError that an actor raised is raised as it is; any other becomes `error`, naming the actor.
    """
    done: dict[str, Any] = {}
    for name, answer in _as_they_come(results, doing, timeout_seconds, error, watch):
        if isinstance(answer, MegagrpoError):
            raise answer
        done[name] = answer
    return {name: done[name] for name in results}  # they came in the order in which the actors answered


def settle(
    results: Mapping[str, ray.ObjectRef[Any]],
    *,
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
    watch: NodeWatch | None,
    at_first_failure: Callable[[str], None] = lambda text: None,
    grace_seconds: float = 0.0,
) -> tuple[dict[str, Any], dict[str, MegagrpoError]]:
    """The answers of all actors: results, and errors, by name. Raises only what `watch` raises.

    After the first failure `at_first_failure` is called with its text, to release the actors that wait for the failed
    one. The others then have `grace_seconds` to answer; a missing answer is an error too.
    """
    done: dict[str, Any] = {}
    failed: dict[str, MegagrpoError] = {}

    def take(refs: Mapping[str, ray.ObjectRef[Any]], seconds: float) -> None:
        for name, answer in _as_they_come(refs, doing, seconds, error, watch):
            if isinstance(answer, MegagrpoError):
                failed[name] = answer
                return
            done[name] = answer

    take(results, timeout_seconds)
    if failed:
        at_first_failure(str(next(iter(failed.values()))))
    deadline = time.monotonic() + grace_seconds
    while len(done) + len(failed) < len(results):
        left = {name: ref for name, ref in results.items() if name not in done and name not in failed}
        take(left, max(0.0, deadline - time.monotonic()))
    return done, failed


def _as_they_come(
    results: Mapping[str, ray.ObjectRef[Any]],
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
    watch: NodeWatch | None,
) -> Iterator[tuple[str, Any]]:
    """(name, answer or error), one after another. At the deadline, an error for each missing answer."""
    deadline = time.monotonic() + timeout_seconds
    names = {ref: name for name, ref in results.items()}
    while names:
        if watch:
            watch.check()
        left = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(names), num_returns=1, timeout=min(left, SLICE_SECONDS))
        if not ready and left > SLICE_SECONDS:
            continue
        if not ready:
            late = [name for name in results if name in names.values()]
            given = f"nothing after {timeout_seconds:g} s"
            needed = "an answer from every one of " + ", ".join(results)
            fix = "look for the first error in the logs of those named; if they were slow, raise the timeout"
            problem = Problem(f"{doing}: no answer from {', '.join(late)}", given, needed, fix)
            yield from ((name, error(problem)) for name in late)
            return
        for ref in ready:
            name = names.pop(ref)
            yield name, _answer(ref, name, doing, error, watch)


def _answer(ref: ray.ObjectRef[Any], name: str, doing: str, error: type[MegagrpoError], watch: NodeWatch | None) -> Any:
    """What the actor returned, or the error that it raised or died with."""
    try:
        return ray.get(ref, timeout=60.0)
    except RayTaskError as failure:
        if isinstance(failure.cause, MegagrpoError):
            return failure.cause
        return error(Problem(where=f"{doing}: {name} raised", given=str(failure).strip()))
    except (RayActorError, WorkerCrashedError, TaskUnschedulableError, NodeDiedError) as failure:
        if watch:
            watch.after_failure(failure)
        fix = "start the same command again: it continues from the newest checkpoint"
        return error(Problem(f"{doing}: {name} died", str(failure).strip(), fix=fix))
    except (GetTimeoutError, RayError) as failure:
        return error(Problem(where=f"{doing}: no result from {name}", given=str(failure).strip()))
