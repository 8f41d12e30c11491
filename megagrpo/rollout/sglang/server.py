"""One SGLang server of our own: started in a process group, waited for until it generates, ended with all of it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.errors import EngineError, Problem
from megagrpo.ports import free_port
from megagrpo.rollout.sglang.launch import DEVICE_VARIABLE
from megagrpo.rollout.sglang.processes import (
    kill_group,
    members,
    note_leftovers,
    remove,
    remove_leftovers,
    shared_files,
)

LAUNCH = Path(__file__).with_name("launch.py")
POLL_SECONDS = 0.25
HEALTH_SECONDS = 60.0  # one /health generates a token, which on a busy machine takes long the first time
END_SECONDS = 10.0
LOG_LINES_QUOTED = 25
LOG_BYTES_READ = 1 << 16


class Server:
    """A started server. `wait_until_ready` before use, `close` at the end; it also ends when this process does.

    `arguments` are fields of SGLang's ServerArgs (see arguments.py); host, port and API key are added here. `python` is
    the interpreter of an environment with SGLang. `log` gets all output of the server. `environment` is added to ours.
    What an earlier server with this log left behind on this machine, killed together with its owner, is removed first.

    Raises EngineError if the interpreter cannot be started.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        name: str,
        log: Path,
        python: str | None = None,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log = name, log
        self.api_key = secrets.token_urlsafe(32)
        port = free_port(host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._directory = tempfile.mkdtemp(prefix="sglang-")  # a short path: SGLang makes sockets in it
        self._shared: set[Path] = set()
        settings = {
            "owner": os.getpid(),
            "directory": self._directory,
            "arguments": {**arguments, "host": host, "port": port, "api_key": self.api_key},
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        self._note = log.with_name(f"{log.name}.leftovers.json")
        remove_leftovers(self._note)
        # SGLang writes its arguments to the log, the API key among them.
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o600)
        try:
            with tempfile.TemporaryFile(dir=self._directory) as given:
                given.write(json.dumps(settings).encode())
                given.seek(0)
                self._process = subprocess.Popen(
                    [python or sys.executable, str(LAUNCH)],
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={
                        **os.environ,
                        **(environment or {}),
                        "TMPDIR": self._directory,
                        DEVICE_VARIABLE: str(arguments.get("device", "")),
                    },
                )
        except OSError as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise EngineError(
                Problem(f"{name}: the server cannot be started", given=str(error), fix="check rollout.sglang.python")
            ) from error
        finally:
            os.close(output)
        self._note_leftovers()

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Returns once the server has generated a token. Raises EngineError, with the log's end, if it does not."""
        deadline = time.monotonic() + timeout_seconds
        listening = False
        while True:
            self.check_running()
            self._note_leftovers()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise EngineError(
                    self.problem(
                        "the server is not ready",
                        given=f"{'no token' if listening else 'no answer'} after {timeout_seconds:g} s",
                        needed=f"{self.url}/health to answer",
                        fix="raise cluster.start_timeout_seconds, or see the log",
                    )
                )
            # /ping answers as soon as the server listens and costs nothing; /health generates.
            listening = listening or self._answers("/ping", min(5.0, remaining))
            if listening and self._answers("/health", min(HEALTH_SECONDS, remaining)):
                self._note_leftovers()
                return
            time.sleep(POLL_SECONDS)

    def check_running(self) -> None:
        """Raises EngineError, with the log's end, if the server has ended."""
        if (code := self._process.poll()) is not None:
            raise EngineError(self.problem("the server has ended", given=f"exit status {code}"))

    def problem(self, what: str, given: str = "", needed: str = "", fix: str = "") -> Problem:
        """A problem of this server that quotes the end of its log."""
        return Problem(f"{self.name}: {what}", f"{given}; {self.log} ends with\n{self.log_end()}", needed, fix)

    def log_end(self) -> str:
        """The last lines of the log, without the API key."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES_READ))
                end = log.read()
        except OSError as error:
            return f"nothing that can be read: {error}"
        # What is read may begin within a line that holds the key: only whole lines are shown.
        whole = end if len(end) < LOG_BYTES_READ else end.partition(b"\n")[2]
        lines = whole.decode(errors="replace").replace(self.api_key, "***").splitlines()
        shown = [line for line in lines if line.strip() and "server_args=" not in line]
        return "\n".join(shown[-LOG_LINES_QUOTED:])

    def close(self) -> None:
        """Ends every process of the server and removes its files in shared memory. May be called twice."""
        group = self._process.pid
        self._shared |= shared_files(members(group))
        kill_group(group)
        deadline = time.monotonic() + END_SECONDS
        while (self._process.poll() is None or members(group)) and time.monotonic() < deadline:
            time.sleep(0.02)
        remove(self._shared)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._note.unlink(missing_ok=True)

    def _note_leftovers(self) -> None:
        found = shared_files(members(self._process.pid)) - self._shared
        if found or not self._note.exists():
            self._shared |= found
            note_leftovers(self._note, self._process.pid, self._directory, self._shared)

    def _answers(self, path: str, timeout_seconds: float) -> bool:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.api_key}"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
                return bool(response.status == 200)
        except OSError:  # refused, reset, timed out, or an HTTP status that says not yet
            return False
