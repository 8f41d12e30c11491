"""Workers of a Ray, and commands that join it, at the price of a fork: a nursery has imported what drivers, ranks and
engines need; each worker is a fork of it. What a worker then does, and how Ray, the driver and the kernel see it, is as
in a process of its own.

Ray starts workers by its interpreter. `Nursery.interpreter` is a small program in its place: it hands the words,
environment and files of a worker, or of a command of megagrpo, to the nursery, and stays until that one has ended; all
else runs by Python itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from megagrpo.processes.lifetime import end_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = "default_worker.py"
COMMAND = "megagrpo.cli"
# In this order: the first imports Megatron, with what it needs on CPUs. Not Ray, which would read the nursery's
# environment in place of a worker's.
IMPORTED = (
    "megagrpo.megatron.process",
    "megagrpo.megatron.rank",
    "megatron.core.models.mimo.optimizer",  # Megatron's optimizers import it when one is made
    "megagrpo.rollout.transformers_engine",
    "megagrpo.weights.transport.shared_memory",
    "transformers.models.qwen2.modeling_qwen2",
    "megagrpo.preflight.preflight",
)
INTERPRETER = """#!{python} -ISE
import json, os, socket, sys
words = sys.argv[1:]
command = {command!r} in words
if not (command or any(word.endswith({worker!r}) for word in words)):
    os.execv({python!r}, [{python!r}, *words])
nursery = socket.socket(socket.AF_UNIX)
nursery.connect({address!r})
socket.send_fds(nursery, [b"!"], [0, 1, 2])
nursery.sendall(json.dumps([words, dict(os.environ), os.getcwd()]).encode())
nursery.shutdown(socket.SHUT_WR)
code = nursery.recv(1)
sys.exit(code[0] if code else command)
"""


class Nursery:
    """A process that forks workers until it or its parent is killed.

    `directory`: short, for its socket. `python`: a path without spaces.
    """

    def __init__(self, directory: Path, python: Path, environment: dict[str, str]) -> None:
        address = str(directory / "nursery")
        self.interpreter = directory / "python"
        names = {"python": str(python), "worker": WORKER, "command": COMMAND, "address": address}
        self.interpreter.write_text(INTERPRETER.format(**names))
        self.interpreter.chmod(0o700)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(64)
        command = [python, "-c", f"from {__name__} import nurse; nurse({listening.fileno()})"]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, pass_fds=[listening.fileno()], start_new_session=True
        )
        listening.close()


def nurse(listening_fd: int) -> None:
    """Forks a worker for each connection, until the tests end."""
    end_with_parent()
    for module in IMPORTED:
        importlib.import_module(module)
    assert "ray" not in sys.modules
    assert threading.active_count() == 1, "a fork has the thread that forks, and no other"
    gc.collect()
    gc.freeze()  # or collections in workers would copy the pages that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the workers
    listening = socket.socket(fileno=listening_fd)
    while True:
        asked, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(asked)
        asked.close()


def work(asked: socket.socket) -> None:
    """Becomes the worker or the command that the interpreter was asked for."""
    _, files, _, _ = socket.recv_fds(asked, 1, 3)
    words, environment, directory = json.loads(asked.makefile("rb").read())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setpgid(0, 0)  # Ray kills a worker with its group
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if COMMAND in words:
        sys.argv = words[words.index(COMMAND) :]
        try:
            runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            asked.send(bytes([end.code or 0]))  # type: ignore[list-item]  a number
            raise
    first = next(index for index, word in enumerate(words) if word.endswith(WORKER))
    sys.argv = words[first:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
