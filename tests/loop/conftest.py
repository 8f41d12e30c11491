"""What the tests of whole runs share: one set of inputs, one run to its end, and a Ray that runs can join."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.loop import small_run
from tests.loop.ray_nodes import RayNodes

ACTOR = re.compile(r"ray::(\w*Actor)\b")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    small_run.make_inputs(directory)
    return directory


@dataclass(frozen=True)
class Finished:
    """A run that was not interrupted. `actors`: the class of each Ray actor that it ever had, by process id;
    `listeners`: every address on which one of its processes ever listened, and the names of those processes."""

    directory: Path
    printed: str
    actors: Mapping[int, str]
    listeners: Mapping[str, frozenset[str]]


@pytest.fixture(scope="session")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Tracked by MLflow, on a Ray of its own."""
    output = tmp_path_factory.mktemp("finished")
    values = small_run.recipe(inputs, output)
    values["track"]["mlflow"] = {}
    process = small_run.start(small_run.write(values, output))
    actors: dict[int, str] = {}
    listeners: dict[str, frozenset[str]] = {}
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(small_run.end, process)
        while not ended.done():
            actors |= actors_of(process.pid)
            for address, names in listeners_of(process.pid).items():
                listeners[address] = listeners.get(address, frozenset()) | names
            time.sleep(0.5)
    return Finished(output / values["name"], ended.result(), actors, listeners)


def actors_of(pid: int) -> dict[int, str]:
    """Those that a driver has now."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):  # the driver has ended
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if match := ACTOR.match(" ".join(child.cmdline())):
                    found[child.pid] = match[1]
    return found


def listeners_of(pid: int) -> dict[str, frozenset[str]]:
    """By address: the names of those of a driver's processes that listen there now."""
    found: dict[str, frozenset[str]] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        driver = psutil.Process(pid)
        for process in (driver, *driver.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                name = (process.cmdline() or [""])[0].rpartition("/")[2]
                for socket in process.net_connections(kind="inet"):
                    if socket.status == psutil.CONN_LISTEN:
                        address = socket.laddr.ip.removeprefix("::ffff:")
                        found[address] = found.get(address, frozenset()) | {name}
    return found


@pytest.fixture(scope="session")
def ray() -> Iterator[Mapping[str, str]]:
    """The environment of a run that joins a Ray of four CPUs, enough for two runs of two ranks at once: Ray's start
    and end take longer than a small run's steps."""
    with RayNodes(cpus_per_node=4) as nodes:
        yield nodes.environment
