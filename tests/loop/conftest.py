"""Fixtures of the tests of whole runs: one set of inputs, one run to its end, and a Ray that runs can join."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.loop import small_run
from tests.loop.listeners import listeners
from tests.loop.ray_nodes import RayNodes

ACTOR = re.compile(r"ray::(\w*Actor)\b")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    small_run.make_inputs(directory)
    return directory


@dataclass(frozen=True)
class Finished:
    """A run that was not interrupted."""

    directory: Path
    printed: str


@dataclass(frozen=True)
class Watched(Finished):
    """`actors`: the class of each Ray actor that it ever had, by process id; `listeners`: by kind of process and
    address, wherever one of its processes ever listened."""

    actors: Mapping[int, str]
    listeners: frozenset[tuple[str, str]]


@pytest.fixture(scope="session")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory, ray: Mapping[str, str]) -> Finished:
    """Tracked by MLflow. It keeps all batches, and lists each model that it exports."""
    output = tmp_path_factory.mktemp("finished")
    values = small_run.recipe(inputs, output)
    values["track"]["mlflow"] = {}
    command = ["sh", "-c", f"ls $0/model.safetensors >> {output}/listed", "{directory}"]
    values["checkpoint"] |= {"keep_batches": small_run.STEPS, "export_every_steps": 2, "after_export": command}
    return Finished(output / values["name"], small_run.train(small_run.write(values, output), environment=ray))


def watched(process: subprocess.Popen[str], directory: Path) -> Watched:
    """Looks at the processes of a started run until it has ended."""
    actors: dict[int, str] = {}
    found: set[tuple[str, str]] = set()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(small_run.end, process)
        while not ended.done():
            actors |= actors_of(process.pid)
            found |= listeners(process.pid).keys()
            time.sleep(1.0)
    return Watched(directory, ended.result(), actors, frozenset(found))


def actors_of(pid: int) -> dict[int, str]:
    """Returns the actors that a driver has now. A child of an actor has its name until it begins a program."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):  # the driver has ended
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.ppid() not in found and (match := ACTOR.match(" ".join(child.cmdline()))):
                    found[child.pid] = match[1]
    return found


@pytest.fixture(scope="session")
def ray() -> Iterator[Mapping[str, str]]:
    """The environment of a run that joins a Ray of four CPUs, enough for two runs of two ranks at once: Ray's start
    and end take longer than a small run's steps."""
    with RayNodes(cpus_per_node=4, nursery=True) as nodes:
        yield nodes.environment
