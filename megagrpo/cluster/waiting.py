"""Waiting for Ray actors: with a deadline, and an error that names the actors that did not answer.

A wait also ends when the run loses a node, and when the run is told to stop where a stop is allowed: `watch` raises
then. Only the waits that close a run have no watch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from select import select
from threading import Event, Thread
from typing import Any

import psutil
import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megagrpo.errors import MegagrpoError, NodeLostError, Problem
from megagrpo.processes.lifetime import end_after_me
from megagrpo.progress import progress
from megagrpo.timeline import TIMELINE

CHECK_SECONDS = 1.0
"""Interval between two looks at Ray's list of nodes."""
DEATH_SECONDS = 2.0
"""Time from an actor's death until Ray knows that its node died."""
SILENCE_SECONDS = 40.0
"""Time from an unreachable actor until Ray calls its node dead: several answers of the node must be missing."""
CLOSE_SECONDS = 60.0
"""Time for a run that has lost a node to end in order."""
SLICE_SECONDS = 0.2
"""Part of a wait between two looks at its watch."""
CONTINUES = "start the same command again: it continues from the newest checkpoint"


def node_names() -> dict[str, str]:
    """Returns name and address of every living node, by Ray's id."""
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"]
    }


def on_node(remote: Any, node: str) -> Any:
    """Returns this task or actor class of Ray, bound to the node with this id: `remote` of it starts it there."""
    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))


class NodeWatch:
    """A watch that ends waits for actors when the run loses a node, or when `check_stop` raises."""

    def __init__(self, names: Mapping[str, str], check_stop: Callable[[], None] = lambda: None) -> None:
        """Watches the nodes in `names`, by Ray's id, which the run needs. check_stop: raises to end a wait."""
        self.names, self._check_stop = dict(names), check_stop
        self._next_look = 0.0

    def of(self, nodes: Collection[str]) -> NodeWatch:
        """Returns the watch of a run that needs these nodes alone."""
        return NodeWatch({node: name for node, name in self.names.items() if node in nodes}, self._check_stop)

    def check(self) -> None:
        """Raises NodeLostError, naming nodes, or what check_stop raises. Called a few times a second."""
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
        if lost := _lost(self.names):
            raise lost


def _lost(names: Mapping[str, str]) -> NodeLostError | None:
    """Returns an error that names the nodes among these that Ray has lost; None if there are none."""
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    lost = [name for node, name in names.items() if node not in living]
    needed = "every node that the run started on, until its end"
    given = "Ray has lost it: it is down, stopped, or cannot be reached"
    return NodeLostError(Problem(f"node {name}", given, needed, CONTINUES) for name in lost) if lost else None


class RayPulse:
    """A thread that asks Ray every second, because a main thread inside Ray may wait for ever. It ends the process, as
    NodeLostError does, in three cases: Ray's head is silent; this node is lost, without whose raylet the next call of
    Ray would end the process without a word; another lost node has not ended the run in CLOSE_SECONDS."""

    def __init__(self) -> None:
        self.names: Mapping[str, str] = {}  # of the nodes that the run needs, by Ray's id
        context = ray.get_runtime_context()
        self._head, node_id = context.gcs_address, context.get_node_id()
        self._here = {node_id: node_names()[node_id]}
        socket = next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == node_id)
        raylet = psutil.Process(raylet_with(socket))
        self._raylet = os.pidfd_open(raylet.pid)
        # Agents of a raylet that is killed ask the GCS for a minute, which is gone too if this process had started it.
        own_agents = raylet.children() if raylet.ppid() == os.getpid() else []
        self._watched = end_after_me(agent.pid for agent in own_agents)
        self._silent_seconds, self._lost_seconds = 0, 0
        self._lost: NodeLostError | None = None
        self._leaving, self._left = Event(), Event()
        self._asking = Thread(target=self._ask, name="asking Ray", daemon=True)
        self._asking.start()
        Thread(target=self._count, name="Ray's silence", daemon=True).start()

    def shut_down(self) -> None:
        """Calls ray.shutdown, with SILENCE_SECONDS to end."""
        self._leaving.set()
        self._asking.join()
        ray.shutdown()
        self._watched.close()
        self._left.set()

    def _ask(self) -> None:
        while not self._leaving.wait(CHECK_SECONDS):
            with suppress(RayError, RuntimeError):
                if lost := _lost(self._here):
                    end_process(lost)
                self._lost = _lost(self.names)
                self._silent_seconds = 0

    def _count(self) -> None:
        # Seconds are counted, not measured: a process that was itself stopped has not waited for Ray.
        while not self._left.is_set():
            if select([self._raylet], [], [], 1.0)[0]:
                if not self._leaving.is_set():
                    given = "its raylet has ended"
                    end_process(NodeLostError(Problem(f"node {next(iter(self._here.values()))}", given, fix=CONTINUES)))
                time.sleep(1.0)
            self._silent_seconds += 1
            self._lost_seconds = self._lost_seconds + 1 if self._lost else 0
            if self._silent_seconds > SILENCE_SECONDS:
                given = f"no answer for {SILENCE_SECONDS:g} s: its GCS is dead or stopped, or its node is down"
                self._lost = NodeLostError(Problem(f"Ray's head node, {self._head}", given, fix=CONTINUES))
                end_process(self._lost)
            if self._lost and self._lost_seconds > CLOSE_SECONDS:
                end_process(self._lost)


def raylet_with(socket: str) -> int:
    """Returns the process id of the raylet of this node that has this socket."""
    raylets = (raylet for raylet in psutil.process_iter(["name", "cmdline"]) if raylet.info["name"] == "raylet")
    # Another raylet may have just ended: it has no command line then.
    return next(one.pid for one in raylets if any(word.endswith(socket) for word in one.info["cmdline"] or ()))


def end_process(error: MegagrpoError) -> None:
    """Prints the error and ends this process, whose main thread does not return from Ray."""
    print(error, file=sys.stderr, flush=True)
    os._exit(error.exit_code)


@dataclass(frozen=True)
class Wait:
    """A wait for actors: what they do, the deadline, the error of one that fails, and the watch that ends it."""

    doing: str
    timeout_seconds: float
    error: type[MegagrpoError]
    watch: NodeWatch | None

    def for_all(self, results: Mapping[str, ray.ObjectRef[Any]], bar: str = "") -> dict[str, Any]:
        """Returns all results by name, in the order of `results`. bar: text of a bar that counts them.

        Fails as soon as one actor does, before the deadline: a dead rank leaves its peers hanging in a collective.
        A MegagrpoError that an actor raised is raised as it is; any other becomes `error`, naming the actor.
        """
        done: dict[str, Any] = {}
        with progress(bar, len(results)) if bar else nullcontext() as work:
            for name, answer in self._as_they_come(results):
                if isinstance(answer, MegagrpoError):
                    # Others may have noticed the death of an actor, and raised about it, before Ray did.
                    left = {ref: other for other, ref in results.items() if other not in done and other != name}
                    ready = ray.wait([*left], num_returns=len(left), timeout=DEATH_SECONDS)[0] if left else ()
                    others = (self.answer_of(ref, other) for ref, other in left.items() if ref in ready)
                    deaths = (a for a in others if isinstance(a, MegagrpoError) and " died" in a.problems[0].where)
                    raise next(deaths, answer)
                done[name] = answer
                if work is not None:
                    work.advance()
        return {name: done[name] for name in results}  # they came in the order in which the actors answered

    def settle(
        self,
        results: Mapping[str, ray.ObjectRef[Any]],
        grace_seconds: float = 0.0,
        at_first_failure: Callable[[str], None] = lambda text: None,
    ) -> tuple[dict[str, Any], dict[str, MegagrpoError]]:
        """Waits for the answers of all actors: results, and errors, by name. Raises only what `watch` raises.

        After the first failure `at_first_failure` is called with its text, to release the actors that wait for the
        failed one. The others then have `grace_seconds` to answer; a missing answer is an error too.
        """
        done: dict[str, Any] = {}
        failed: dict[str, MegagrpoError] = {}

        def take(refs: Mapping[str, ray.ObjectRef[Any]], seconds: float) -> None:
            for name, answer in replace(self, timeout_seconds=seconds)._as_they_come(refs):
                if isinstance(answer, MegagrpoError):
                    failed[name] = answer
                    return
                done[name] = answer

        take(results, self.timeout_seconds)
        if failed:
            at_first_failure(str(next(iter(failed.values()))))
        deadline = time.monotonic() + grace_seconds
        while len(done) + len(failed) < len(results):
            left = {name: ref for name, ref in results.items() if name not in done and name not in failed}
            take(left, max(0.0, deadline - time.monotonic()))
        return done, failed

    def _as_they_come(self, results: Mapping[str, ray.ObjectRef[Any]]) -> Iterator[tuple[str, Any]]:
        """Yields (name, answer or error) as answers arrive. At the deadline, yields an error for each missing one."""
        began = time.monotonic()
        deadline = began + self.timeout_seconds
        names = {ref: name for name, ref in results.items()}
        while names:
            if self.watch:
                self.watch.check()
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(names), num_returns=1, timeout=min(left, SLICE_SECONDS))
            if not ready and left > SLICE_SECONDS:
                continue
            if not ready:
                late = [name for name in results if name in names.values()]
                given = f"nothing after {self.timeout_seconds:g} s"
                needed = "an answer from every one of " + ", ".join(results)
                fix = "look for the first error in the logs of those named; if they were slow, raise the timeout"
                problem = Problem(f"{self.doing}: no answer from {', '.join(late)}", given, needed, fix)
                yield from ((name, self.error(problem)) for name in late)
                return
            for ref in ready:
                name = names.pop(ref)
                TIMELINE.record(name, self.doing, began, time.monotonic())
                yield name, self.answer_of(ref, name)

    def answer_of(self, ref: ray.ObjectRef[Any], name: str) -> Any:
        """Returns the actor's result, or the error that it raised or died with."""
        try:
            return ray.get(ref, timeout=60.0)
        except RayTaskError as failure:
            if isinstance(failure.cause, MegagrpoError):
                return failure.cause
            raised = self.error(Problem(where=f"{self.doing}: {name} raised", given=str(failure).strip()))
            raised.__cause__ = failure.cause
            return raised
        except (RayActorError, WorkerCrashedError, TaskUnschedulableError, NodeDiedError) as failure:
            if self.watch:
                self.watch.after_failure(failure)
            return self.error(Problem(f"{self.doing}: {name} died", str(failure).strip(), fix=CONTINUES))
        except RayError as failure:
            cause = failure.client_exc if isinstance(failure, RaySystemError) else None
            if isinstance(cause, OSError | MemoryError):  # of this process, while it read the answer
                raise cause from failure
            return self.error(Problem(where=f"{self.doing}: no result from {name}", given=str(failure).strip()))


def end_actors(actors: Sequence[Any], patience_seconds: float) -> None:
    """Asks these actors to close, all at once, and kills them when all have, or after `patience_seconds`."""
    closing = [actor.close.remote() for actor in actors]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=patience_seconds)
    for actor in actors:
        with suppress(RayActorError):
            ray.kill(actor)
