"""Workers of a Ray at the price of a fork: a nursery has imported what ranks and engines need; each worker is a fork of
it. What a worker then does, and how Ray, the driver and the kernel see it, is as in a process of its own.

Ray starts workers by its interpreter. `Nursery.interpreter` is a small program in its place: it hands a worker's words,
environment and files to the nursery, and stays until that worker has ended; all else runs by Python itself.
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

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = "default_worker.py"
# In this order: the first imports Megatron, with what it needs on CPUs. Not Ray, which would read the nursery's
# environment in place of a worker's.
IMPORTED = (
    "megagrpo.megatron.process",
    "megagrpo.megatron.rank",
    "megatron.core.models.mimo.optimizer",  # Megatron's optimizers import it when one is made
    "megagrpo.rollout.transformers_engine",
    "megagrpo.weights.transport.shared_memory",
    "transformers.models.qwen2.modeling_qwen2",
)
INTERPRETER = """#!{python} -ISE
import json, os, socket, sys
words = sys.argv[1:]
if not any(word.endswith({worker!r}) for word in words):
    os.execv({python!r}, [{python!r}, *words])
nursery = socket.socket(socket.AF_UNIX)
nursery.connect({address!r})
socket.send_fds(nursery, [b"!"], [0, 1, 2])
nursery.sendall(json.dumps([words, dict(os.environ), os.getcwd()]).encode())
nursery.shutdown(socket.SHUT_WR)
nursery.recv(1)
"""


class Nursery:
    """A process that forks workers until it is killed. `directory`: short, for its socket. `python`: a path without
    spaces."""

    def __init__(self, directory: Path, python: Path, environment: dict[str, str]) -> None:
        address = str(directory / "nursery")
        self.interpreter = directory / "python"
        self.interpreter.write_text(INTERPRETER.format(python=str(python), worker=WORKER, address=address))
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
    """Forks a worker for each connection."""
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
    """Becomes the worker that the interpreter was asked for."""
    _, files, _, _ = socket.recv_fds(asked, 1, 3)
    words, environment, directory = json.loads(asked.makefile("rb").read())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setpgid(0, 0)  # Ray kills a worker with its group
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    first = next(index for index, word in enumerate(words) if word.endswith(WORKER))
    sys.argv = words[first:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
