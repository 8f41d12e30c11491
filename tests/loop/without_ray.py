"""`megagrpo` in one process without Ray: its actors are objects, and their calls run in threads. For one training rank.

Each command runs in a process of its own, forked from one that has imported everything, so that two steps take seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

import megagrpo.commands.train
import megagrpo.megatron.rank
import megagrpo.plan.show.terminal
import megagrpo.preflight.preflight
import megagrpo.rollout.transformers_engine
import megagrpo.trainer.one_half
import megagrpo.weights.transport.shared_memory  # noqa: F401  seconds, once for all commands
from megagrpo import cli
from megagrpo.checkpoint.store import damage
from megagrpo.cluster import actors, lost_ranks, runtime, waiting
from megagrpo.weights.boxes import Place

HERE = "here"
TRACEBACK = 99
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
SECONDS_MAX = 120.0
"""Limit of a command, which only ends one that hangs."""


class Actor:
    """An object whose calls run one after the other in a thread for each of its concurrency groups."""

    def __init__(self, actor_class: Any, *arguments: Any) -> None:
        described = actor_class.__ray_metadata__
        self.object, self.dead = described.modified_class(*arguments), False
        names = [None, *(described.concurrency_groups or {})]
        self.threads = {name: ThreadPoolExecutor(1, f"{described.class_name} {name or ''}") for name in names}

    def __getattr__(self, name: str) -> Any:
        return Remote(partial(self._call, getattr(self.object, name)))

    def _call(self, method: Any, *arguments: Any, num_returns: int = 1, concurrency_group: str | None = None) -> Any:
        returns = getattr(method, "__ray_num_returns__", num_returns)
        threads = self.threads[getattr(method, "__ray_concurrency_group__", concurrency_group)]
        found = [Ref() for _ in range(returns)]

        def run() -> None:
            try:
                answer = method(*map(get, arguments))
                parts = answer if returns > 1 else [answer]
                for one, part in zip(found, parts, strict=True):
                    one.set_result(part)
            except BaseException as error:  # noqa: BLE001  as Ray's, which raises it where it is read
                for one in found:
                    one.set_exception(RayActorError() if self.dead else error)

        threads.submit(run)
        return found if returns > 1 else found[0]


class Ref(Future):
    """The result of a call."""

    def __await__(self) -> Any:
        return asyncio.wrap_future(self).__await__()


@dataclass(frozen=True)
class Remote:
    """An object with `.remote`."""

    remote: Callable[..., Any]

    def options(self, **given: Any) -> Remote:
        of_call = {name: given[name] for name in ("num_returns", "concurrency_group") if name in given}
        return Remote(partial(self.remote, **of_call))


def get(ref: Any, timeout: float | None = None) -> Any:
    """Returns what is not a future as it is. Raises RayTaskError."""
    if isinstance(ref, list):
        return [get(one, timeout) for one in ref]
    if not isinstance(ref, Future):
        return ref
    try:
        return ref.result(timeout)
    except RayActorError:
        raise
    except BaseException as error:
        raise RayTaskError("call", "".join(traceback.format_exception(error)), error) from error


def wait_for_some(refs: Sequence[Future[Any]], num_returns: int = 1, timeout: float | None = None) -> Any:
    done: set[Future[Any]] = set()
    left = set(refs)
    while left and len(done) < num_returns:
        ready, left = wait(left, timeout, FIRST_COMPLETED)
        if not ready:
            break
        done |= ready
    return [one for one in refs if one in done], [one for one in refs if one not in done]


def kill(actor: Actor) -> None:
    actor.dead = True


class OneProcess(runtime.Runtime):
    """A Ray whose actors are all of this process."""

    def start(self, actor_class: Any, bundles: Sequence[int], share: float, *arguments: Any) -> Any:
        return Actor(actor_class, *arguments)


class NoPulse:
    def __init__(self) -> None:
        self.names: dict[str, str] = {}


def start(recipe: Any, check_stop: Any = lambda: None, *, devices_of: Callable[..., Any]) -> runtime.Runtime:
    """Takes the place of runtime.start."""
    devices = devices_of(recipe, "cpu")
    assert len(devices.bundle_of_rank) == 1, "Megatron keeps the layout of a process in globals"
    watch = waiting.NodeWatch({HERE: HERE}, check_stop)
    places = tuple(Place(HERE, None) for _ in range(devices.bundles))
    return OneProcess("cpu", devices, None, places, watch, NoPulse())  # type: ignore[arg-type]


def replace_ray() -> None:
    ray.put, ray.get, ray.wait, ray.kill = (lambda value: value), get, wait_for_some, kill
    ray.nodes = lambda: [{"NodeID": HERE, "Alive": True, "NodeManagerHostname": HERE, "NodeManagerAddress": HERE}]
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    ray.get_runtime_context = lambda: type("Context", (), {"get_node_id": staticmethod(lambda: HERE)})
    runtime.start, runtime.stop = start, lambda started: None
    runtime.damage_on_nodes = lambda started, seconds, root: damage(root)
    lost_ranks.begin_log = lambda log: lost_ranks.ProcessAt(os.getpid(), 0.0, HERE, log)
    lost_ranks.blamed_ranks = lambda ranks, nodes: []
    actors.end_with_parent = lambda: None


def run(words: Sequence[str], output: Path) -> None:
    """Does a command, and ends this process with its exit code. All that it prints is in `output`."""
    os.setsid()
    os.chdir(output.parent)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    replace_ray()
    code = TRACEBACK
    try:
        code = cli.main(words)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command(words: Sequence[str], output: Path) -> int:
    """The exit code of a command in a forked process; what it printed is in `output`."""
    process = FORKS.Process(target=run, args=(words, output))
    process.start()
    process.join(SECONDS_MAX)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode
