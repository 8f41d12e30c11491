"""A real Ray cluster of two nodes on this machine: two raylets with addresses of their own, one device each."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from megagrpo.ports import free_port
from tests.loop import small_run

HEAD, WORKER = "127.0.0.11", "127.0.0.12"
START_SECONDS = 120.0
END_SECONDS = 30.0
MEMORY_BYTES = 100 << 20


class TwoNodes:
    """As a context. `environment` is what a driver needs."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mg-", dir="/tmp"))  # short: Ray makes sockets in it
        token = self._directory / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.address = f"{HEAD}:{free_port(HEAD)}"
        # Said in full: left open, Ray's choice depends on what else this user has run.
        self.environment = {
            **small_run.environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._raylets: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> TwoNodes:
        port = self.address.rpartition(":")[2]
        self._start(HEAD, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._directory}/ray")
        self.start_worker()
        return self

    def __exit__(self, *raised: object) -> None:
        for process in reversed(self._raylets.values()):
            end_all(process)

    def start_worker(self) -> None:
        """Starts the second node, also instead of one that was killed, and waits until the cluster has both."""
        self._start(WORKER, f"--address={self.address}")
        count = "import ray; ray.init(logging_level='error'); print(sum(n['Alive'] for n in ray.nodes()))"
        deadline = time.monotonic() + START_SECONDS
        while self._python(count) != "2":
            assert time.monotonic() < deadline, (self._directory / f"{WORKER}.log").read_text()
            time.sleep(0.5)

    def kill_worker(self) -> None:
        """kill -9 of everything on the second node."""
        end_all(self._raylets[WORKER])

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`megagrpo ...` on the head."""
        return subprocess.Popen(
            [sys.executable, "-m", "megagrpo.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )

    def _start(self, address: str, *arguments: str) -> None:
        with (self._directory / f"{address}.log").open("wb") as log:
            self._raylets[address] = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("ray")),
                    "start",
                    *arguments,
                    f"--node-ip-address={address}",
                    "--num-cpus=1",
                    f"--object-store-memory={MEMORY_BYTES}",
                    "--block",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"},
                start_new_session=True,
            )

    def _python(self, code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, timeout=START_SECONDS
        )
        return done.stdout.strip()


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
