"""Reward workers on every node of a run. Calls go out in parts; a node that finishes a part gets the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayActorError, RayTaskError

from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import end_actors, node_names, on_node
from megagrpo.errors import MegagrpoError, Problem, RewardError
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import Recipe, RewardConfig
from megagrpo.reward.executors import CHECK_SECONDS, Asking, Calls, Executor, Outcomes, Served, Specs, fail
from megagrpo.reward.functions import Outcome, with_source
from megagrpo.reward.scorer import EXECUTORS, Executors, Scorer
from megagrpo.reward.workers import Limits, WorkerPool, limits_of

PARTS_PER_NODE = 4
"""Parts for each node: several, because responses take unequal times."""
END_SECONDS = 10.0


def reward_pool(runtime: Runtime, specs: Specs, reward: RewardConfig) -> Executor:
    """Returns an executor of reward.workers processes on the nodes of the run, the driver's node first."""
    driver_node = ray.get_runtime_context().get_node_id()
    others = sorted({str(place.node) for place in runtime.places} - {driver_node})
    counts = workers_of_nodes(reward.workers, 1 + len(others))
    if len(counts) < 2:
        return WorkerPool.of(specs, reward)
    of_others = dict(zip(others, counts[1:], strict=False))
    with_sources = {number: with_source(spec) for number, spec in specs.items()}
    return RewardNodes(with_sources, counts[0], of_others, limits_of(reward))


def scorer_maker(
    recipe: Recipe,
    runtime: Runtime,
    served: Mapping[str, Served],
    check: Callable[[], None],
    say: Callable[[str], None],
) -> Callable[..., Scorer]:
    """Returns a function that makes scorers: from a reward section, and from what else `Scorer` takes by name."""
    asking = partial(Asking, directory=run_directory(recipe), served=served)
    executors: Executors = {**EXECUTORS, "workers": partial(reward_pool, runtime), "asking": asking}
    limit = recipe.rollout.response_tokens_max
    return partial(Scorer, response_tokens_max=limit, check=check, say=say, executors=executors)


def workers_of_nodes(workers: int, nodes: int) -> list[int]:
    """Splits workers evenly over the nodes: a count for each node that gets some, the largest first."""
    share, more = divmod(workers, nodes)
    return [count for count in (share + (node < more) for node in range(nodes)) if count]


class RewardNodes(Executor):
    """Processes on this node and on others. A lost node costs no outcome: another node scores its part.

    A thread of its own gives the calls of one `submit` after the other to the nodes.
    """

    def __init__(self, specs: Specs, workers_here: int, workers_there: Mapping[str, int], limits: Limits) -> None:
        """Creates this node's pool. workers_there: processes on each other node, by Ray's id of the node."""
        self._here = WorkerPool(specs, workers_here, limits)
        self._thread = ThreadPoolExecutor(1, "scoring on nodes")
        self._specs, self._limits, self._workers_there = dict(specs), limits, dict(workers_there)
        self._there: dict[str, Any] = {}

    def by_group(self, check: Callable[[], None] = lambda: None) -> dict[int, bool]:
        return self._here.by_group(check)

    def submit(self, calls: Calls) -> list[Outcomes]:
        futures = [Outcomes() for _ in calls]
        if calls:
            self._thread.submit(self._run, calls, futures)
        return futures

    def close(self) -> None:
        self._thread.submit(self._end_there).result()
        self._here.close()

    def _run(self, calls: Calls, futures: Sequence[Outcomes]) -> None:
        running: dict[Future[Any], tuple[str, slice]] = {}
        try:
            living = node_names()
            for node, workers in self._workers_there.items():
                if node in living and node not in self._there:
                    self._there[node] = on_node(RewardNodeActor, node).remote(self._specs, workers, self._limits)
            size = -(-len(calls) // (PARTS_PER_NODE * (1 + len(self._workers_there))))
            waiting = deque(slice(start, start + size) for start in range(0, len(calls), size))

            def give(node: str) -> None:
                if waiting and (node in self._there or node == ""):
                    part = waiting.popleft()
                    if node:
                        running[self._there[node].run.remote(calls[part]).future()] = node, part
                    else:
                        running[self._here.run(calls[part], futures[part])] = node, part

            for node in ("", *self._there):
                give(node)
            while running:
                ended, _ = wait(running, CHECK_SECONDS, FIRST_COMPLETED)
                for future in ended:
                    node, part = running.pop(future)
                    if node == "" or self._answered(future, node, futures[part]):
                        give(node)
                        continue
                    waiting.append(part)
                    if not any(busy == "" for busy, _ in running.values()):
                        give("")
                if any(future.cancelled() for _, part in running.values() for future in futures[part]):
                    raise CancelledError
        except BaseException as error:  # noqa: BLE001
            self._end_there()  # their outcomes are not needed
            on_driver = {future for node, part in running.values() if not node for future in futures[part]}
            fail((future for future in futures if future not in on_driver), error)
            for future in on_driver:
                future.cancel()

    def _answered(self, answer: Future[list[list[Outcome]]], node: str, futures: Sequence[Outcomes]) -> bool:
        """Gives a part's outcomes to its futures. Returns False if its node is lost; it then gets no further part."""
        try:
            outcomes = answer.result()
        except RayTaskError as failure:
            if isinstance(failure.cause, MegagrpoError):
                raise failure.cause from failure
            raise RewardError(Problem(f"scoring on node {node}", str(failure).strip())) from failure
        except (RayActorError, NodeDiedError):
            del self._there[node]
            return False
        for future, of_call in zip(futures, outcomes, strict=True):
            if not future.set_running_or_notify_cancel():
                raise CancelledError
            future.set_result(of_call)
        return True

    def _end_there(self) -> None:
        end_actors(list(self._there.values()), END_SECONDS)
        self._there.clear()


@ray.remote(num_cpus=0, max_concurrency=2)  # two calls at once: it can be closed while it scores
class RewardNodeActor:
    """The reward workers of a node without the driver."""

    def __init__(self, specs: Specs, workers: int, limits: Limits) -> None:
        self._pool = WorkerPool(specs, workers, limits)
        self._futures: list[Outcomes] = []

    def run(self, calls: Calls) -> list[list[Outcome]]:
        self._futures = self._pool.submit(calls)
        return [future.result() for future in self._futures]

    def close(self) -> None:
        for future in self._futures:
            future.cancel()
        self._pool.close()
