"""The Ray cluster of a run: joined or started here, with one placement group for all its devices."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megagrpo.cluster.nodes import NodeWatch, node_names
from megagrpo.cluster.placement import nodes_of_devices
from megagrpo.cluster.waiting import SLICE_SECONDS, wait_for
from megagrpo.errors import Problem, RankError
from megagrpo.recipe.defaults import DevicePlan, plan_devices
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.topology import Place

NODE_LABEL = "ray.io/node-id"
LOOK_SECONDS = 1.0
RESERVE_SECONDS = 30.0
"""For Ray to reserve devices that were free just before."""


@dataclass(frozen=True)
class Runtime:
    """A connected Ray with this run's devices reserved. `device` is cpu or cuda, for every rank and engine."""

    device: str
    devices: DevicePlan
    group: PlacementGroup
    places: tuple[Place, ...]
    """Node and GPU of each bundle of the group."""
    watch: NodeWatch
    """Ends waits when a node of `places` is lost, or when the run is told to stop."""

    def start_rank(self, actor_class: Any, rank: int) -> Any:
        """Handle of a new actor on the device of a training rank. `actor_class` is decorated by ray.remote."""
        return self._start(actor_class, self.devices.bundle_of_rank[rank], self.devices.rank_share)

    def start_engine(self, actor_class: Any, engine: int) -> Any:
        """Handle of a new actor on the first device of an engine; anywhere, for one that somebody else runs."""
        bundles = self.devices.bundles_of_engine[engine]
        if not bundles:
            return actor_class.options(num_cpus=0).remote()
        return self._start(actor_class, bundles[0], self.devices.engine_share)

    def _start(self, actor_class: Any, bundle: int, share: float) -> Any:
        resources = {"num_gpus": share, "num_cpus": 0} if self.devices.resource == "GPU" else {"num_cpus": share}
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return actor_class.options(**resources, scheduling_strategy=place).remote()

    @property
    def shares_gpus(self) -> bool:
        """Whether ranks and engines are on the same GPUs, and take turns with their memory."""
        of_ranks = set(self.devices.bundle_of_rank)
        return self.devices.resource == "GPU" and any(of_ranks & set(own) for own in self.devices.bundles_of_engine)

    def place_of_rank(self, rank: int) -> Place:
        return self.places[self.devices.bundle_of_rank[rank]]

    def places_of_engine(self, engine: int) -> tuple[Place, ...]:
        """Of each of its ranks. Empty for an engine that somebody else runs."""
        return tuple(self.places[bundle] for bundle in self.devices.bundles_of_engine[engine])


def start(recipe: AnyRecipe, check_stop: Callable[[], None] = lambda: None) -> Runtime:
    """Joins `cluster.address` (or RAY_ADDRESS), or starts Ray on this machine, and reserves the run's devices.

    `check_stop` is called a few times a second in every wait for actors; what it raises ends the wait. Ray is left
    again, or ended, if anything is raised here.
    Raises RankError if there is no such cluster, or if the devices cannot be had in `cluster.start_timeout_seconds`.
    """
    address = recipe.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    with ExitStack() as undoing:
        undoing.callback(ray.shutdown)
        if address == "local":
            device = _local_device(recipe)
            # No more than the run reserves: Ray starts a worker for each before anyone asks for it.
            _connect(address, {"num_cpus": plan_devices(recipe, device).bundles, "include_dashboard": False})
        else:
            _connect(address, {})
            device = _device_of(ray.cluster_resources(), recipe)
        devices = plan_devices(recipe, device)
        names = node_names()
        group, nodes = _reserve(devices, recipe, names, NodeWatch({}, check_stop))
        watch = NodeWatch({node: names[node] for node in nodes}, check_stop)
        on = [names[node] for node in nodes]
        gpus = _gpus(group, on, recipe.cluster.start_timeout_seconds, watch) if device == "cuda" else {}
        undoing.pop_all()
    places = tuple(Place(node, gpus.get(index)) for index, node in enumerate(nodes))
    return Runtime(device, devices, group, places, watch)


def _reserve(
    devices: DevicePlan, recipe: AnyRecipe, names: Mapping[str, str], watch: NodeWatch
) -> tuple[PlacementGroup, tuple[str, ...]]:
    """A placement group with one bundle for each device, and the node of each. Raises RankError at the deadline."""
    deadline = time.monotonic() + recipe.cluster.start_timeout_seconds
    bundle = {"GPU": 1.0, "CPU": 1.0} if devices.resource == "GPU" else {"CPU": 1.0}
    tensor = recipe.train.layout.tensor
    while True:
        free = {
            node: int(min(has.get(resource, 0.0) for resource in bundle))
            for node, has in available_resources_per_node().items()
            if node in names
        }
        if nodes := nodes_of_devices(devices, tensor, dict(sorted(free.items(), key=lambda item: names[item[0]]))):
            selectors = [{NODE_LABEL: node} for node in nodes]
            group = placement_group([dict(bundle) for _ in nodes], strategy="PACK", bundle_label_selector=selectors)
            if _is_ready(group, watch):
                return group, nodes
            remove_placement_group(group)  # somebody else was faster
        if time.monotonic() > deadline:
            break
        watch.check()
        time.sleep(LOOK_SECONDS)
    engine = len(devices.bundles_of_engine[0]) if devices.bundles_of_engine else 0
    whole = f", the {engine} of each engine on one node" if engine > 1 else ""
    raise RankError(
        Problem(
            where="cluster: the run's devices are not available",
            given="; ".join(f"{count} free {devices.resource} on {names[node]}" for node, count in sorted(free.items()))
            or "no node",
            needed=f"{devices.bundles} free {devices.resource}{whole}",
            fix="wait for other jobs to end, add nodes, or use a smaller train.layout",
        )
    )


def _is_ready(group: PlacementGroup, watch: NodeWatch) -> bool:
    """Whether the group is there within a time in which it would be if its devices were still free."""
    ready, deadline = group.ready(), time.monotonic() + RESERVE_SECONDS
    while time.monotonic() < deadline:
        watch.check()
        if ray.wait([ready], timeout=SLICE_SECONDS)[0]:
            return True
    return False


def _gpus(group: PlacementGroup, nodes: Sequence[str], timeout_seconds: float, watch: NodeWatch) -> dict[int, int]:
    """The GPU of each bundle, as its node counts them. nodes: names of their nodes. Raises RankError, naming nodes."""

    @ray.remote(num_gpus=1, num_cpus=0, max_retries=0)
    def gpu() -> int:
        return int(ray.get_gpu_ids()[0])

    names = [f"device {index} on {node}" for index, node in enumerate(nodes)]
    asked = {
        name: gpu.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index, name in enumerate(names)
    }
    found = wait_for(
        asked,
        doing="cluster: which GPUs the run has",
        timeout_seconds=timeout_seconds,
        error=RankError,
        watch=watch,
    )
    return {index: found[name] for index, name in enumerate(names)}


def _connect(address: str, settings: dict[str, Any]) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    local = address == "local"
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
    except Exception as error:  # what Ray raises of a node that is late, of a wrong token, and of much else
        raise RankError(
            Problem(
                where="cluster: Ray does not start" if local else "cluster: Ray cannot be reached",
                given=f"{address}: {error}",
                needed="a running Ray cluster, or local",
                fix="start the same command again; if it fails again, see /tmp/ray/session_latest/logs"
                if local
                else "check cluster.address, RAY_ADDRESS and RAY_AUTH_MODE, and that `ray status` works there",
            )
        ) from error


def _local_device(recipe: AnyRecipe) -> str:
    if recipe.cluster.device != "auto":
        return recipe.cluster.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_of(resources: Mapping[str, float], recipe: AnyRecipe) -> str:
    """On a cluster that was joined: GPUs wherever it has any. The driver's own machine may have none."""
    if recipe.cluster.device != "auto":
        return recipe.cluster.device
    return "cuda" if resources.get("GPU", 0) > 0 else "cpu"


def stop(runtime: Runtime) -> None:
    """Gives the devices back; ends Ray if it was started here."""
    remove_placement_group(runtime.group)
    ray.shutdown()
