"""Addresses on which a run's processes listen, and those in the table of docs/security.md."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import psutil

from tests.loop.small_run import REPOSITORY

Listeners = Counter[tuple[str, str]]
"""Number of listening sockets by kind of process and address."""
PROCESSES = {
    "Ray: global control, raylets, workers, the driver": ("gcs_server", "raylet", "worker", "rank", "engine", "driver"),
    "Ray's runtime environment agent": ("agent",),
    "Ray's dashboard": (),
    "Ray's client server and autoscaler": (),
    "the store in which training ranks find each other (driver)": ("driver",),
    "the store of the weight sync (driver)": ("driver",),
    "the gates of both stores (driver)": ("driver",),
    "gloo, NCCL: training ranks, and `weights.transfer: process_group` or `two_hops`": ("rank",),  # not process_group
    "a server of SGLang or vLLM that the run started, of an engine or of `reward.models`: HTTP": ("server",),
    "the ranks of such a server among themselves (gloo, torch's store, NCCL)": ("server",),
    "an engine over several nodes: the store in which its ranks find each other, gloo, NCCL, SGLang's messages": (),
    "the gateway of agents (driver), if the recipe has `agent`": (),  # these runs have none
    "MLflow": (),
    "metrics for Prometheus (driver), with `track.prometheus_port`": (),
}
"""Kinds of processes of each row of the table."""
ONE_NODE = {"127.0.0.1": ["127.0.0.1"], "none": []}
"""Addresses for each word of the table's first column."""
OF_RAY_START = "of ray start"
"""Listeners that are not the run's: `ray start` starts them if grpcio or prometheus-client is installed."""
KINDS = {
    r".*\bgcs_server\b": "gcs_server",
    r".*\braylet/raylet\b": "raylet",
    r"ray::RuntimeEnvAgent": "agent",
    r"ray::RankActor": "rank",
    r"ray::EngineActor": "engine",
    r"ray::|.*/workers/default_worker\.py": "worker",  # the latter before it has a name
    r".*\bray\.util\.client\.server\b|.*/ray/autoscaler/_private/monitor\.py": OF_RAY_START,
    r"sglang::|VLLM::|.*/rollout/(sglang|vllm)/launch\.py": "server",
}


def listeners(driver: int, *nodes: int) -> Listeners:
    """Returns the listeners of a driver's processes, and of the Ray nodes that it has joined, now."""
    found, own = Counter[tuple[str, str]](), ""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = " ".join(psutil.Process(driver).cmdline())  # also of a child until it begins its own program
    for top in (driver, *nodes):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            for process in (psutil.Process(top), *psutil.Process(top).children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    command, sockets = " ".join(process.cmdline()), process.net_connections(kind="inet")
                    if not command:  # it ends
                        continue
                    kinds = (kind for pattern, kind in KINDS.items() if re.match(pattern, command))
                    kind = "driver" if command == own else next(kinds, command)
                    addresses = (each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN)
                    found.update((kind, address.removeprefix("::ffff:")) for address in addresses)
    return found


def check_table(found: Iterable[tuple[str, str]], column: int, meaning: Mapping[str, Collection[str]]) -> None:
    """Checks that every kind of process listens where its rows of the table say, and nowhere else. column: 1 or 2.
    meaning: the addresses for the beginning of a cell."""
    lines = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8").partition("| listens |")[2].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2 : lines.index("")]]
    assert [row[0] for row in rows] == list(PROCESSES)
    said: dict[str, set[str]] = {}
    for row in rows:
        for kind in PROCESSES[row[0]]:
            said.setdefault(kind, set()).update(meaning[re.split(r"[,;:(]", row[column])[0].strip()])
    by_kind: dict[str, set[str]] = {}
    for kind, address in found:
        if kind == OF_RAY_START:
            continue
        by_kind.setdefault(kind, set()).add(address)
    assert by_kind == {kind: said.get(kind) for kind in by_kind}
    assert {"driver", "gcs_server", "raylet", "agent", "rank", "engine"} <= by_kind.keys()
