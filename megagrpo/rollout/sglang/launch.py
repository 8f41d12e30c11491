"""Runs one SGLang server. Started by server.py, with an interpreter that may be of another environment.

    python launch.py < settings         settings: JSON, {"owner": pid, "directory": ..., "arguments": {...}}

The arguments, the API key among them, come on standard input so that `ps` does not show them. SGLang spawns its
processes anew, and each runs this module's top level again: what must hold in all of them stands there. On CPUs they
are forked from this process instead, which has it all.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

DEVICE_VARIABLE = "MEGAGRPO_SGLANG_DEVICE"
OWNER_CHECK_SECONDS = 0.5
PARENT_DEATH_SIGNAL = 1  # of prctl(2)
PACKAGE = Path(__file__).resolve().parents[2]


class MegagrpoFinder(importlib.abc.MetaPathFinder):
    """Finds the megagrpo that started the server, and nothing else of its environment."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megagrpo":
            return None
        return importlib.util.spec_from_file_location(
            fullname, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
        )


def prepare_process() -> None:
    # A script's own directory comes first on the path: its `server` and `engine` would hide other modules.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.meta_path.insert(0, MegagrpoFinder())
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        from megagrpo.rollout.sglang import cpu_shim

        cpu_shim.install()


def end_with_parent() -> None:
    """Ends this process when its parent is killed. SGLang asks for the same, but only once it is imported."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:  # it was killed before we asked
        os._exit(1)


def fork_processes() -> None:
    """Where SGLang spawns a process, this one is forked: each would import SGLang anew, for ten seconds of a core.

    For CPUs only: CUDA does not survive a fork.
    """
    multiprocessing.set_start_method("fork")
    vars(multiprocessing)["set_start_method"] = lambda *arguments, **options: None  # SGLang asks for "spawn"
    os.register_at_fork(after_in_child=end_with_parent)


def end_with(owner: int, directory: str) -> None:
    """Ends every process of this server once the process that started it is gone, however it ended."""
    from megagrpo.rollout.sglang.processes import kill_group, members, remove, shared_files

    while os.getppid() == owner:
        time.sleep(OWNER_CHECK_SECONDS)
    group = os.getpgrp()
    try:
        remove(shared_files(members(group)))
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        kill_group(group)


def main() -> None:
    settings = json.load(sys.stdin)
    watch = threading.Thread(target=end_with, args=(settings["owner"], settings["directory"]), daemon=True)
    watch.start()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        from megagrpo.rollout.sglang import cpu_shim

        fork_processes()
        cpu_shim.rest_while_paused()
    run_server(ServerArgs(**settings["arguments"]))


if __name__ == "__mp_main__":
    end_with_parent()
if __name__ in ("__main__", "__mp_main__"):
    prepare_process()
if __name__ == "__main__":
    main()
