"""One server that megagrpo starts, of any engine: in a process group of its own, waited for until it generates, ended
with all that belongs to it. Linux. launching.py imports this module in the engine's environment: standard library only,
and errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.errors import EngineError, Problem
from megagrpo.processes.lifetime import remove_after_me
from megagrpo.processes.ports import free_port

HOST = "127.0.0.1"  # a server and its engine are on one node
POLL_SECONDS = 0.25
FIRST_TOKEN_SECONDS = 60.0  # on a busy machine
END_SECONDS = 10.0
STOPPED_SECONDS = 10  # longer than a debugger or profiler stops a process
LOG_LINES_QUOTED = 25
LOG_LINE_CHARACTERS = 2000
LOG_BYTES_READ = 1 << 16
SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class Program:
    """The program of an engine's servers, and how they differ from other engines'."""

    name: str
    """Its section in the recipe; the servers' directories begin with it."""
    launch: Path
    """Runs one server, with settings as JSON on standard input: `owner`, `directory`, `shared_memory`, `arguments`."""
    generates: tuple[str, Mapping[str, Any] | None]
    """A path that answers once the server has generated a token, and what is posted to it; None: it is a GET."""
    shared_memory: tuple[str, ...]
    """Prefixes of its files in /dev/shm, but for those in which weights travel: their sender removes them."""
    noise: tuple[str, ...]
    """Parts of lines of its log that say nothing about a failure."""
    later_ports: range = range(0)
    """Ports that its processes use, counted from the server's."""


class Server:
    """A started server. `wait_until_ready` before use, `close` at the end; it also ends when this process does, or when
    one of its processes is stopped (SIGSTOP) for STOPPED_SECONDS: requests to it would wait for their time limits.

    `arguments` are those of the engine; host, port and API key are added here. `python` is the interpreter of an
    environment with the engine. `log` gets all output of the server. `environment` is added to this process's. If an
    earlier server with this log was killed together with its owner, what it left is removed first.

    Raises EngineError if the interpreter cannot be started.
    """

    def __init__(
        self,
        program: Program,
        arguments: Mapping[str, Any],
        *,
        name: str,
        log: Path,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log, self._program = name, log, program
        self.api_key = secrets.token_urlsafe(32)
        port = free_port("", program.later_ports)  # SGLang binds to all interfaces, to look
        self.url = f"http://{HOST}:{port}"
        self._directory = tempfile.mkdtemp(prefix=f"{program.name}-")  # a short path: sockets are made in it
        self._watched = remove_after_me(Path(self._directory))
        self._shared: set[Path] = set()
        settings = {
            "owner": os.getpid(),
            "directory": self._directory,
            "shared_memory": program.shared_memory,
            "arguments": {**arguments, "host": HOST, "port": port, "api_key": self.api_key},
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        self._note = log.with_name(f"{log.name}.leftovers.json")
        remove_leftovers(self._note, program)
        # Engines write their arguments to the log, the API key among them.
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o600)
        try:
            with tempfile.TemporaryFile(dir=self._directory) as given:
                given.write(json.dumps(settings).encode())
                given.seek(0)
                self._process = subprocess.Popen(
                    [python or sys.executable, str(program.launch)],
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **(environment or {}), "TMPDIR": self._directory},
                )
        except OSError as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise EngineError(
                Problem(f"{name}: the server cannot be started", str(error), fix=f"check rollout.{program.name}.python")
            ) from error
        finally:
            os.close(output)
        self._members: list[int] = []
        self._stopped = ""
        self._note_leftovers()
        threading.Thread(target=self._end_if_stopped, name=f"watch of {name}", daemon=True).start()

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Returns once the server has generated a token. Raises EngineError with the end of the log if it does not."""
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
                        needed=f"{self.url}{self._program.generates[0]} to answer",
                        fix="raise cluster.start_timeout_seconds, or see the log",
                    )
                )
            # /ping answers as soon as the server listens, and costs nothing.
            listening = listening or self._answers("/ping", None, min(5.0, remaining))
            if listening and self._answers(*self._program.generates, min(FIRST_TOKEN_SECONDS, remaining)):
                self._note_leftovers()
                return
            time.sleep(POLL_SECONDS)

    def end(self, reason: Problem) -> None:
        """Ends the server's processes for a reason elsewhere, which the problems of this server then name."""
        self._stopped = f"{reason.where}: {reason.given}; "
        kill_group(self._process.pid)

    def check_running(self) -> None:
        """Raises EngineError with the end of the log if the server has ended."""
        if (code := self._process.poll()) is not None:
            raise EngineError(self.problem("the server has ended", given=f"exit status {code}"))

    def problem(self, what: str, given: str = "", needed: str = "", fix: str = "") -> Problem:
        """Returns a problem of this server that quotes the end of its log."""
        given = f"{self._stopped}{given}; {self.log} ends with\n{self.log_end()}"
        return Problem(f"{self.name}: {what}", given, needed, fix)

    def log_end(self) -> str:
        """Returns the last lines of the log, without the API key."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES_READ))
                end = log.read()
        except OSError as error:
            return f"nothing that can be read: {error}"
        # The first line may be the end of one that holds the key, and is left out.
        whole = end if len(end) < LOG_BYTES_READ else end.partition(b"\n")[2]
        lines = whole.decode(errors="replace").replace(self.api_key, "***").splitlines()
        shown = [line for line in lines if line.strip() and not any(part in line for part in self._program.noise)]
        return "\n".join(line[:LOG_LINE_CHARACTERS] for line in shown[-LOG_LINES_QUOTED:])

    def close(self) -> None:
        """Ends every process of the server and removes its files in shared memory. May be called twice."""
        group = self._process.pid
        self._shared |= shared_files(members(group), self._program.shared_memory)
        kill_group(group)
        deadline = time.monotonic() + END_SECONDS
        while (self._process.poll() is None or members(group)) and time.monotonic() < deadline:
            time.sleep(0.02)
        remove(self._shared)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._watched.close()
        self._note.unlink(missing_ok=True)

    def _end_if_stopped(self) -> None:
        # Looks are counted, not seconds: a machine that was itself asleep has not waited for the server.
        looks = 0
        while self._process.poll() is None:
            time.sleep(1.0)
            stopped = [process for process in self._members if state_in(self._process.pid, process) == "T"]
            looks = looks + 1 if stopped else 0
            if looks > STOPPED_SECONDS:
                self._stopped = (
                    f"its process {stopped[0]} was stopped (SIGSTOP) for {STOPPED_SECONDS} s: it was ended; "
                )
                kill_group(self._process.pid)

    def _note_leftovers(self) -> None:
        self._members = members(self._process.pid)
        shared = shared_files(self._members, self._program.shared_memory) - self._shared
        if shared or not self._note.exists():
            self._shared |= shared
            note_leftovers(self._note, self._process.pid, self._directory, self._shared)

    def _answers(self, path: str, body: Mapping[str, Any] | None, timeout_seconds: float) -> bool:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
                return bool(response.status == 200)
        except OSError:  # refused, reset, timed out, or an HTTP status that says not yet
            return False


# --- processes, and what they leave behind when they are killed ------------------------------------------------------


def members(group: int) -> list[int]:
    """Returns the running processes of a process group, zombies left out."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and state_in(group, int(entry)) not in "ZX"]


def state_in(group: int, process: int) -> str:
    """Returns the letter of a process's state, such as T if it is stopped; X, dead, if it is not of this group."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return "X"
    return fields[0] if int(fields[2]) == group else "X"


def shared_files(processes: Iterable[int], prefixes: Collection[str]) -> set[Path]:
    """Returns the shared memory and semaphores with these prefixes that the processes have mapped: a kill does not
    remove them.

    Found by inode, because a semaphore is mapped under another name than that of its file.
    """
    mapped = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        except OSError:
            continue
        mapped |= {int(line.split()[4]) for line in lines if SHARED_MEMORY in line}
    with os.scandir(SHARED_MEMORY) as entries:
        return {Path(entry) for entry in entries if entry.name.startswith(tuple(prefixes)) and entry.inode() in mapped}


def remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def kill_group(group: int) -> None:
    """Sends SIGKILL to every member. An engine's graceful end waits for requests that are not needed any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def note_leftovers(note: Path, group: int, directory: str, files: Iterable[Path]) -> None:
    """Writes down what a server keeps outside its log's directory. The next server with this log can then remove it if
    the owner was killed.

    The note names the machine: several may share the note's directory, but not memory and temporary files.
    """
    leftovers = {"group": group, "directory": directory, "files": sorted(map(str, files))}
    part = note.with_name(f"{note.name}.part")
    part.write_text(json.dumps({"host": socket.gethostname(), **leftovers}))
    part.replace(note)


def remove_leftovers(note: Path, program: Program) -> None:
    """Removes what the server of this note left on this machine, unless some of its processes still run.

    Any process may have written the note: only what a server's files and directory are called is removed, where it is.
    """
    try:
        left = json.loads(note.read_text())
        host, group, directory = left["host"], int(left["group"]), Path(left["directory"])
        files = [Path(file) for file in left["files"]]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return
    if host != socket.gethostname() or members(group):
        return
    remove(file for file in files if file.parent == Path(SHARED_MEMORY) and file.name.startswith(program.shared_memory))
    if directory.parent == Path(tempfile.gettempdir()) and directory.name.startswith(f"{program.name}-"):
        shutil.rmtree(directory, ignore_errors=True)
    note.unlink(missing_ok=True)
