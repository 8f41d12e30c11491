"""Code of every launcher of servers, inside their processes: it makes this megagrpo importable there, changes the
engine's modules as they are imported, and ends the server with its owner. Standard library only, and torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.processes.lifetime import end_with_parent
from megagrpo.rollout.server import kill_group, members, remove, shared_files

OWNER_CHECK_SECONDS = 0.5
Changes = Mapping[str, Callable[[Any], None]]
"""By the name of a module: what changes it once it is imported."""


class Finder(importlib.abc.MetaPathFinder):
    """A finder that makes `changes` of an engine's modules in each process that imports them."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self.changes[fullname](module)

        vars(spec.loader)["exec_module"] = run_and_change
        return spec


def prepare_process(launcher: str, changes: Changes, *, spawned: bool) -> None:
    """Prepares a process of a server, before it imports the engine. `launcher` is the file that runs in it.

    A script's own directory comes first on the path: its `server` and `engine` would hide other modules.
    """
    own_directory = str(Path(launcher).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != own_directory]
    sys.meta_path.insert(0, Finder(changes))
    if spawned:  # engines ask for the same, but only once they are imported
        end_with_parent()


def listen_on_loopback() -> None:
    """Makes a server's ranks, all on one node, meet on loopback: torch's store would listen to any machine."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    tcp_store = rendezvous.TCPStore

    def on_its_host(host_name: str, port: int, **options: Any) -> Any:
        if options["is_master"]:
            options["master_listen_fd"] = socket.create_server((host_name, port)).detach()
        return tcp_store(host_name, port, **options)

    rendezvous.TCPStore = on_its_host


def end_with_owner(owner: int, directory: str, shared_memory: Collection[str]) -> None:
    """Ends every process of this server once the process that started it is gone, or one of its own was killed: an
    engine itself notices that only after minutes. Returns at once; a thread waits."""
    watch = threading.Thread(target=_end_with, args=(owner, directory, shared_memory), daemon=True)
    watch.start()
    end_with_parent(signal.SIGCONT)  # wakes a stopped server, which then ends with its parent


def _end_with(owner: int, directory: str, shared_memory: Collection[str]) -> None:
    while os.getppid() == owner and not child_was_killed():
        time.sleep(OWNER_CHECK_SECONDS)
    group = os.getpgrp()
    try:
        remove(shared_files(members(group), shared_memory))
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        kill_group(group)


def child_was_killed() -> bool:
    """Returns whether a direct child was killed and is not reaped yet. Leaves the reaping to the engine."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none
        return False
    return ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
