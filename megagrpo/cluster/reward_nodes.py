"""Reward workers on every node of a run. Calls go out in parts; a node that finishes a part gets the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Event
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayActorError, RayTaskError

from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import end_actors, node_names, on_node
from megagrpo.errors import MegagrpoError, Problem, RewardError
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.reward.asking import Models, Served
from megagrpo.reward.functions import FunctionSpec, Outcome, Task
from megagrpo.reward.scorer import Scorer
from megagrpo.reward.workers import Limits, LoadedFunction, RewardPool, WorkerPool

PARTS_PER_NODE = 4
"""Parts for each node: several, because responses take unequal times."""
CHECK_SECONDS = 0.2
END_SECONDS = 10.0

Calls = Sequence[tuple[int, Task]]


def reward_pool(runtime: Runtime, specs: Sequence[FunctionSpec], workers: int, limits: Limits) -> RewardPool:
    """Returns a pool of `workers` processes on the nodes of the run, the driver's node first."""
    here = ray.get_runtime_context().get_node_id()
    others = sorted({str(place.node) for place in runtime.places} - {here})
    counts = workers_of_nodes(workers, 1 + len(others))
    if len(counts) < 2:
        return WorkerPool(specs, workers, limits)
    return RewardNodes(specs, counts[0], dict(zip(others, counts[1:], strict=False)), limits)


def scorer_maker(
    recipe: Recipe,
    runtime: Runtime,
    served: Mapping[str, Served],
    check: Callable[[], None],
    say: Callable[[str], None],
) -> Callable[..., Scorer]:
    """Returns a function that makes scorers: from a reward section, and from what else `Scorer` takes by name."""
    limit, models = recipe.rollout.response_tokens_max, Models(run_directory(recipe), served)
    workers = partial(reward_pool, runtime)
    return partial(Scorer, response_tokens_max=limit, check=check, say=say, pool_of=workers, models=models)


def workers_of_nodes(workers: int, nodes: int) -> list[int]:
    """Splits workers evenly over the nodes: a count for each node that gets some, the largest first."""
    each, more = divmod(workers, nodes)
    return [count for count in (each + (node < more) for node in range(nodes)) if count]


class RewardNodes:
    """A RewardPool with processes on this node and on others. A lost node costs no outcome: another node scores its
    part."""

    def __init__(
        self, specs: Sequence[FunctionSpec], workers_here: int, workers_there: Mapping[str, int], limits: Limits
    ) -> None:
        """Creates this node's pool. workers_there: processes on each other node, by Ray's id of the node."""
        self._here = WorkerPool(specs, workers_here, limits)
        self._thread = ThreadPoolExecutor(1, "scoring here")
        self._specs, self._limits, self._workers_there = tuple(specs), limits, dict(workers_there)
        self._there: dict[str, Any] = {}

    def start(self, check: Callable[[], None] = lambda: None) -> tuple[LoadedFunction, ...]:
        return self._here.start(check)

    def run(self, calls: Calls, check: Callable[[], None] = lambda: None) -> list[list[Outcome]]:
        if not calls:
            return []
        self._start_there()
        size = -(-len(calls) // (PARTS_PER_NODE * (1 + len(self._workers_there))))
        waiting = deque(range(0, len(calls), size))
        running: dict[Future[list[list[Outcome]]], tuple[str, int]] = {}
        outcomes: dict[int, list[list[Outcome]]] = {}
        ended = Event()

        def give(node: str) -> None:
            if waiting and (node in self._there or node == ""):
                start = waiting.popleft()
                part = calls[start : start + size]
                if node:
                    future = self._there[node].run.remote(part).future()
                else:
                    future = self._thread.submit(self._here.run, part, _check_of(ended))
                running[future] = node, start

        try:
            for node in ("", *self._there):
                give(node)
            while running:
                check()
                done, _ = wait(running, CHECK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    node, start = running.pop(future)
                    answer = self._answer(future, node)
                    if answer is None:
                        waiting.append(start)
                        if not any(busy == "" for busy, _ in running.values()):
                            give("")
                    else:
                        outcomes[start] = answer
                        give(node)
            return [outcome for start in sorted(outcomes) for outcome in outcomes[start]]
        except BaseException:
            ended.set()
            self._end_there()  # their outcomes are not needed
            wait([future for future, (node, _) in running.items() if not node])
            raise

    def close(self) -> None:
        self._end_there()
        self._here.close()
        self._thread.shutdown()

    def _answer(self, future: Future[list[list[Outcome]]], node: str) -> list[list[Outcome]] | None:
        """Returns a part's outcomes; None if its node is lost, which then gets no further part."""
        try:
            return future.result()
        except RayTaskError as failure:
            if isinstance(failure.cause, MegagrpoError):
                raise failure.cause from failure
            raise RewardError(Problem(f"scoring on node {node}", str(failure).strip())) from failure
        except (RayActorError, NodeDiedError):
            del self._there[node]
            return None

    def _start_there(self) -> None:
        """Starts the pools of other nodes that are alive and have none."""
        living = node_names()
        for node, workers in self._workers_there.items():
            if node in living and node not in self._there:
                self._there[node] = on_node(RewardNodeActor, node).remote(self._specs, workers, self._limits)

    def _end_there(self) -> None:
        end_actors(list(self._there.values()), END_SECONDS)
        self._there.clear()


class _EndedError(Exception):
    """An exception that ends the part being scored in this process."""


def _check_of(ended: Event) -> Callable[[], None]:
    """Returns a check that ends the part being scored once `ended` is set."""

    def check() -> None:
        if ended.is_set():
            raise _EndedError

    return check


@ray.remote(num_cpus=0, max_concurrency=2)  # two calls at once: it can be closed while it scores
class RewardNodeActor:
    """The reward workers of a node without the driver."""

    def __init__(self, specs: Sequence[FunctionSpec], workers: int, limits: Limits) -> None:
        self._pool, self._ended = WorkerPool(specs, workers, limits), Event()

    def run(self, calls: Calls) -> list[list[Outcome]]:
        return self._pool.run(calls, _check_of(self._ended))

    def close(self) -> None:
        self._ended.set()
        self._pool.close()
