"""Whether every node of a run sees the files that the run needs there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megagrpo.cluster.nodes import node_names
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import wait_for
from megagrpo.errors import PreflightError, Problem, RankError

APPEAR_SECONDS = 10.0
"""For a new file to be seen on another node: network file systems remember for a while that it was not there."""


@ray.remote(num_cpus=0, max_retries=0)
def missing(paths: Sequence[str]) -> list[str]:
    """Those that do not exist on this node."""
    deadline = time.monotonic() + APPEAR_SECONDS
    while (found := [path for path in paths if not Path(path).exists()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def check_files(runtime: Runtime, written: Sequence[Path], read: Sequence[Path], timeout_seconds: float) -> None:
    """Looks on every node of the run other than this one for directories that the run writes to and reads from.

    The former must be the very same as here. Raises PreflightError, naming nodes and directories; RankError or
    NodeLostError, naming nodes, if there is no answer.
    """
    others = {place.node for place in runtime.places} - {ray.get_runtime_context().get_node_id()}
    if not others:
        return
    names = node_names()
    probes = {directory.absolute() / f".seen_by_every_node_{secrets.token_hex(4)}": directory for directory in written}
    directories = {str(path): path for path in read} | {str(probe): path for probe, path in probes.items()}
    try:
        for probe in probes:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
        answers = wait_for(
            {
                names[node]: missing.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
                ).remote(list(directories))
                for node in sorted(others)
            },
            doing="looking for the run's files",
            timeout_seconds=timeout_seconds,
            error=RankError,
            watch=runtime.watch,
        )
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
