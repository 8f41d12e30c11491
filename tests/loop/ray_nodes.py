"""A real Ray cluster on this machine: a head and, where a test wants it, a second node with an address of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from megagrpo.processes.ports import free_port
from tests.loop import small_run
from tests.loop.ray_nursery import Nursery

START_SECONDS = 300.0
END_SECONDS = 60.0
MEMORY_BYTES = 100 << 20
HEAD = """
import signal, sys
from megagrpo.processes.lifetime import end_with_parent
from ray.scripts.scripts import main
end_with_parent(signal.SIGTERM)
sys.executable = sys.argv.pop(1)
main()
"""
"""`ray`, whose processes run by an interpreter of ours, and end with the tests."""
JOIN = """
import sys, time, ray
ray.init(logging_level="error")
deadline = time.monotonic() + 10
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.monotonic() < deadline or sys.exit(1)
    time.sleep(0.2)
"""


class RayNodes:
    """A context with Ray's head, which runs join. `environment`: variables that a driver needs to join. nursery: the
    head's workers are forks of one process, as are commands that join it and only have to end."""

    def __init__(self, cpus_per_node: int, *, nursery: bool = False) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mg-", dir="/tmp"))  # short: Ray makes sockets in it
        # A head ends where its interpreter's path has a space: Ray has a shell start its client server.
        self._environment = self._directory / "environment"
        self._environment.symlink_to(Path(sys.executable).parent.parent)
        token = self._directory / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        # Addresses that only this cluster uses. Ray takes 127.0.0.1 for the address of an outside interface.
        network = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}"
        self.head, self.worker = f"{network}.11", f"{network}.12"
        self.address = f"{self.head}:{free_port(self.head)}"
        # Said in full: left open, Ray's choice depends on what else this user has run.
        self.environment = {
            **small_run.own_environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._cpus = cpus_per_node
        self._python = self._environment / "bin" / Path(sys.executable).name
        self._nursery = Nursery(self._directory, self._python, self._of_nodes()) if nursery else None
        if self._nursery:
            self.environment[small_run.NURSERY] = str(self._nursery.interpreter)
        self._raylets: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> RayNodes:
        port = self.address.rpartition(":")[2]
        temporary = f"--temp-dir={self._directory}/ray"
        with ExitStack() as failing:
            failing.callback(self.__exit__)
            self._start(1, self.head, "--head", f"--port={port}", "--include-dashboard=false", temporary)
            failing.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        for process in reversed(self._raylets.values()):
            end_all(process)
        if self._nursery:
            end_all(self._nursery.process)
        shutil.rmtree(self._directory, ignore_errors=True)

    def start_worker(self) -> None:
        """Starts the second node, also instead of one that was killed, and waits until the cluster has both."""
        self._start(2, self.worker, f"--address={self.address}")

    def kill(self, address: str) -> None:
        """kill -9 of everything on the node `head` or `worker`."""
        end_all(self._raylets[address])

    def pids(self) -> list[int]:
        """The process that each node descends from."""
        return [process.pid for process in self._raylets.values()]

    def _of_nodes(self) -> dict[str, str]:
        return {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}

    def _launch(self, address: str, *arguments: str) -> None:
        with (self._directory / f"{address}.log").open("wb") as log:
            self._raylets[address] = subprocess.Popen(
                [
                    str(self._python),
                    "-c",
                    HEAD,
                    str(self._nursery.interpreter if self._nursery else self._python),
                    "start",
                    *arguments,
                    f"--node-ip-address={address}",
                    f"--num-cpus={self._cpus}",
                    f"--object-store-memory={MEMORY_BYTES}",
                    "--block",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._of_nodes(),
                start_new_session=True,
            )

    def _start(self, nodes: int, address: str, *arguments: str) -> None:
        """Starts a node and waits until the cluster has `nodes`. Ray's own patience is half a minute: it may need more
        than one try."""
        deadline = time.monotonic() + START_SECONDS
        self._launch(address, *arguments)
        while self._joined(nodes) != 0:
            assert time.monotonic() < deadline, (self._directory / f"{address}.log").read_text()
            if self._raylets[address].poll() is not None:
                self._launch(address, *arguments)
            time.sleep(0.5)

    def _joined(self, nodes: int) -> int:
        """Exit code of a driver that waits for so many nodes."""
        command = [sys.executable, "-c", JOIN, str(nodes)]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=START_SECONDS
        )
        return done.returncode


def end_all(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a process and of all that it has started."""
    if process.poll() is not None:
        return
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(timeout=END_SECONDS)
    psutil.wait_procs(family, timeout=END_SECONDS)
