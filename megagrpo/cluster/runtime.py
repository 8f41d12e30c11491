"""The Ray cluster of a run: joined or started here, its devices reserved, its files seen by every node."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from threading import Timer
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megagrpo.checkpoint.store import damaged, read_manifest
from megagrpo.cluster.waiting import SLICE_SECONDS, NodeWatch, RayPulse, Wait, end_process, node_names, on_node
from megagrpo.errors import PreflightError, Problem, RankError
from megagrpo.recipe.defaults import DevicePlan, checkpoint_directory, device_here, plan_devices, run_directory
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.boxes import Place

NODE_LABEL = "ray.io/node-id"
LOOK_SECONDS = 1.0
RESERVE_SECONDS = 30.0
"""Time for Ray to reserve devices that were free just before."""
OOM_SCORE = 500
"""Score of Ray's workers, by which the kernel kills when memory is out. Reward workers have 1000 and go first."""
APPEAR_SECONDS = 10.0
"""Time for a new file to appear on another node: network file systems cache that it does not exist."""


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
    pulse: RayPulse

    def start(self, actor_class: Any, bundles: Sequence[int], share: float, *arguments: Any) -> Any:
        """Starts an actor on a share of the first of its bundles, as `devices` names them, and returns its handle. One
        without bundles goes to any node of the cluster. ray.remote decorates `actor_class`."""
        if not bundles:
            return actor_class.options(num_cpus=0).remote(*arguments)
        resources = {"num_gpus": share, "num_cpus": 0} if self.devices.resource == "GPU" else {"num_cpus": share}
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundles[0])
        return actor_class.options(**resources, scheduling_strategy=place).remote(*arguments)

    @property
    def shares_gpus(self) -> bool:
        """Returns whether ranks and engines use the same GPUs and take turns with their memory."""
        of_engines = set(chain.from_iterable(self.devices.bundles_of_engine))
        return self.devices.resource == "GPU" and not of_engines.isdisjoint(self.devices.bundle_of_rank)

    def places_of(self, bundles: Iterable[int]) -> tuple[Place, ...]:
        """Returns the places of bundles, as `devices` names them: those of ranks, of an engine or of a model."""
        return tuple(self.places[bundle] for bundle in bundles)


def start(
    recipe: AnyRecipe,
    check_stop: Callable[[], None] = lambda: None,
    *,
    devices_of: Callable[[AnyRecipe, str], DevicePlan] = plan_devices,
) -> Runtime:
    """Joins `cluster.address` (or RAY_ADDRESS), or starts Ray on this machine, and reserves the run's devices:
    `devices_of` the recipe and cpu or cuda.

    `check_stop` is called a few times a second in every wait for actors; what it raises ends the wait. If anything is
    raised here, Ray is left again, or ended if it was started here.
    Raises RankError if there is no such cluster, or if the devices are not free in `cluster.start_timeout_seconds`.
    """
    address = recipe.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    with ExitStack() as undoing:
        undoing.callback(ray.shutdown)
        patience = recipe.cluster.start_timeout_seconds
        if address == "local":
            device = device_here(recipe)
            # As many CPUs as the run reserves: Ray starts a worker for each before any is asked for.
            config = {"worker_oom_score_adjustment": OOM_SCORE}
            cpus = devices_of(recipe, device).bundles
            settings = {"num_cpus": cpus, "include_dashboard": False, "_system_config": config}
            pulse = _connect(address, patience, settings)
        else:
            pulse = _connect(address, patience, {})
            device = recipe.cluster.device
            if device == "auto":  # the driver's machine may have no GPU
                device = "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
        undoing.callback(pulse.shut_down)
        devices = devices_of(recipe, device)
        names = node_names()
        group, nodes = _reserve(devices, recipe, names, NodeWatch({}, check_stop))
        watch = NodeWatch({node: names[node] for node in nodes}, check_stop)
        on = [names[node] for node in nodes]
        gpus = _gpus(group, on, recipe.cluster.start_timeout_seconds, watch) if device == "cuda" else {}
        pulse.names = watch.names
        undoing.pop_all()
    places = tuple(Place(node, gpus.get(index)) for index, node in enumerate(nodes))
    return Runtime(device, devices, group, places, watch, pulse)


def _reserve(
    devices: DevicePlan, recipe: AnyRecipe, names: Mapping[str, str], watch: NodeWatch
) -> tuple[PlacementGroup, tuple[str, ...]]:
    """Reserves a bundle for each device. Returns the group and the bundles' nodes. Raises RankError at the deadline."""
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
            ready, late = group.ready(), time.monotonic() + RESERVE_SECONDS
            while time.monotonic() < late:
                watch.check()
                if ray.wait([ready], timeout=SLICE_SECONDS)[0]:
                    return group, nodes
            remove_placement_group(group)  # another job was faster
        if time.monotonic() > deadline:
            break
        watch.check()
        time.sleep(LOOK_SECONDS)
    engine = len(devices.bundles_of_engine[0]) // devices.engine_nodes if devices.bundles_of_engine else 0
    on = "one node" if devices.engine_nodes == 1 else f"each of {devices.engine_nodes} nodes"
    whole = f", {engine} of each engine on {on}" if engine > 1 or devices.engine_nodes > 1 else ""
    raise RankError(
        Problem(
            where="cluster: the run's devices are not available",
            given="; ".join(f"{count} free {devices.resource} on {names[node]}" for node, count in sorted(free.items()))
            or "no node",
            needed=f"{devices.bundles} free {devices.resource}{whole}",
            fix="wait for other jobs to end, add nodes, or use a smaller train.layout",
        )
    )


def _gpus(
    group: PlacementGroup, nodes: Sequence[str], timeout_seconds: float, watch: NodeWatch
) -> dict[int, int | str]:
    """Returns, by bundle, its GPU on its node. nodes: the bundles' nodes, which a RankError names."""

    @ray.remote(num_gpus=1, num_cpus=0, max_retries=0)
    def gpu() -> int | str:
        name = str(ray.get_gpu_ids()[0])  # as CUDA_VISIBLE_DEVICES of the node has it: some batch systems put UUIDs
        return int(name) if name.isdecimal() else name

    names = [f"device {index} on {node}" for index, node in enumerate(nodes)]
    gpus = {
        name: gpu.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index, name in enumerate(names)
    }
    answers = Wait("cluster: which GPUs the run has", timeout_seconds, RankError, watch).for_all(gpus)
    return dict(enumerate(answers.values()))


def nodes_of_devices(devices: DevicePlan, tensor: int, free: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the node of every device, on as few nodes as possible; None if there is no room.

    The devices of an engine on one node are never split. A group of `tensor` ranks is split only if there is no room
    otherwise. free: free devices of each node; nodes with equally many are filled in this order.
    """
    whole_groups = tuple(tuple(range(first, first + tensor)) for first in range(0, len(devices.bundle_of_rank), tensor))
    engines = tuple(chain.from_iterable(map(devices.node_bundles, range(len(devices.bundles_of_engine)))))
    models = tuple(filter(None, devices.bundles_of_model))
    for unsplit in ((*engines, *whole_groups, *models), (*engines, *models)):
        # The smallest blocks of neighbouring devices that split none of these fill nodes in order, largest node first.
        inner = {device for block in unsplit for device in block[1:]}
        ends = [device for device in range(devices.bundles) if device not in inner]
        left = [after - before for before, after in pairwise([*ends, devices.bundles])][::-1]
        nodes: list[str] = []
        for node, room in sorted(free.items(), key=lambda item: -item[1]):
            while left and left[-1] <= room:
                nodes += [node] * left[-1]
                room -= left.pop()
        if not left:
            return tuple(nodes)
    return None


def _connect(address: str, patience_seconds: float, settings: dict[str, Any]) -> RayPulse:
    """Joins or starts Ray. Ends the process if Ray does not answer in time: its client cannot be interrupted."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray._private.serialization").setLevel(logging.CRITICAL)  # it logs what it raises, too
    ray_worker._worker_logs_enabled = False  # or it prints the state of a raylet that died
    # Ray has no public name for it: where this is false, Ray listens on loopback alone.
    ray_constants.ENABLE_RAY_CLUSTER = address != "local"
    if address == "local" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray's own is in a file that all may read

    def problem(given: object) -> RankError:
        where = "cluster: Ray does not start" if address == "local" else "cluster: Ray cannot be reached"
        fix = "check cluster.address, RAY_ADDRESS and RAY_AUTH_MODE, and that `ray status` works there"
        if address == "local":
            fix = "start the same command again; if it fails again, see /tmp/ray/session_latest/logs"
        return RankError(Problem(where, f"{address}: {given}", "a running Ray cluster, or local", fix))

    late = Timer(patience_seconds, end_process, [problem(f"no answer after {patience_seconds:g} s")])
    late.daemon = True
    late.start()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
    except Exception as error:  # Ray raises many types: a late node, a wrong token, ...
        raise problem(error) from error
    finally:
        late.cancel()
    return RayPulse()


def stop(runtime: Runtime) -> None:
    """Releases the devices; ends Ray if it was started here."""
    remove_placement_group(runtime.group)
    runtime.pulse.shut_down()


@ray.remote(num_cpus=0, max_retries=0)
def missing_files(paths: Sequence[str]) -> list[str]:
    """Returns the paths that do not appear on this node within APPEAR_SECONDS."""
    deadline = time.monotonic() + APPEAR_SECONDS
    while (missing := [path for path in paths if not Path(path).exists()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return missing


def damage_on_nodes(runtime: Runtime, timeout_seconds: float, root: Path) -> list[str]:
    """Returns the faults of a checkpoint, as checkpoint.store.damage. Each node of the run reads its share of the
    bytes, all at the same time. Raises RankError or NodeLostError, naming nodes, if there is no answer."""
    nodes = sorted({place.node for place in runtime.places})
    try:
        largest_first = sorted(read_manifest(root), key=lambda file: -file.size_bytes)
    except (OSError, ValueError) as error:
        return [str(error)]
    verify = ray.remote(num_cpus=0, max_retries=0)(damaged)
    results = {
        runtime.watch.names[node]: on_node(verify, node).remote(root, largest_first[index :: len(nodes)])
        for index, node in enumerate(nodes)
    }
    lines = Wait(f"verifying {root}", timeout_seconds, RankError, runtime.watch).for_all(results)
    return list(chain.from_iterable(lines.values()))


def check_files(runtime: Runtime, recipe: AnyRecipe, read: Sequence[Path]) -> None:
    """Checks that every other node of the run sees the directories that it writes to, and those that it reads.

    The former must be the very same as here. Raises PreflightError, naming nodes and directories; RankError or
    NodeLostError, naming nodes, if there is no answer.
    """
    others = {place.node for place in runtime.places} - {ray.get_runtime_context().get_node_id()}
    if not others:
        return
    names, written = node_names(), (run_directory(recipe), checkpoint_directory(recipe))
    probes = {directory.absolute() / f".seen_by_every_node_{secrets.token_hex(4)}": directory for directory in written}
    directories = {str(path): path for path in read} | {str(probe): path for probe, path in probes.items()}
    try:
        for probe in probes:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
        looking = {names[node]: on_node(missing_files, node).remote(list(directories)) for node in sorted(others)}
        seconds = recipe.cluster.start_timeout_seconds
        answers = Wait("looking for the run's files", seconds, RankError, runtime.watch).for_all(looking)
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)
    problems = [
        Problem(
            where=f"node {name}",
            given=f"{directories[path]}, which is not there" + (" as it is here" if Path(path) in probes else ""),
            needed="the run's directories shared between all nodes, and the model at the same path",
            fix="a shared file system: set track.directory, checkpoint.directory and model.path to places on it",
        )
        for name, paths in answers.items()
        for path in paths
    ]
    if problems:
        raise PreflightError(problems)
