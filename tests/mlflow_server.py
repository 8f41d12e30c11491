"""A real MLflow server, as `mlflow server` starts it, that can be stopped, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from megagrpo.processes.ports import free_port

START_SECONDS = 300.0


class MlflowServer:
    """Keeps everything in `directory`: tracking and registry in sqlite, artifacts behind the server. A context."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port("127.0.0.1")
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers."""
        store, artifacts = f"sqlite:///{self._directory}/server.db", self._directory / "artifacts"
        command = ["server", "--backend-store-uri", store, "--artifacts-destination", str(artifacts), "--workers", "1"]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # eight processes for judges
            )
        # It ends all of the server's processes once its input is closed: also when the tests are killed.
        command = ["sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(self._process.pid)]
        self._keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                assert self._process.poll() is None, (self._directory / "server.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes: SIGKILL, SIGSTOP, SIGCONT."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self._keeper.communicate()
        self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
