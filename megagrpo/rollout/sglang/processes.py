"""The processes of one server, and what they leave behind when they are killed. Linux, standard library only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"
SGLANGS_OWN = ("sgl_", "sglang_", "sem.mp-")  # never the files in which weights travel: these are the sender's


def members(group: int) -> list[int]:
    """Running processes of a process group, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        state, process_group = fields[0], int(fields[2])
        if process_group == group and state not in "ZX":
            found.append(int(entry))
    return found


def shared_files(processes: Iterable[int]) -> set[Path]:
    """Shared memory and semaphores of SGLang that the processes have mapped: a killed process does not remove them.

    Found by inode, since a semaphore is mapped under another name than the one that stays.
    """
    mapped = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        except OSError:
            continue
        mapped |= {int(line.split()[4]) for line in lines if SHARED_MEMORY in line}
    with os.scandir(SHARED_MEMORY) as entries:
        return {Path(entry) for entry in entries if entry.name.startswith(SGLANGS_OWN) and entry.inode() in mapped}


def remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def kill_group(group: int) -> None:
    """SIGKILL to every member. SGLang's graceful end waits for requests, which nobody wants any more."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def note_leftovers(note: Path, group: int, directory: str, files: Iterable[Path]) -> None:
    """Writes down what a server has outside its log's directory, for whoever finds that it was not ended by its owner.

    The note says where: a machine's memory and temporary directory are its own, the note's directory may not be.
    """
    content = {
        "host": socket.gethostname(),
        "group": group,
        "directory": directory,
        "files": sorted(map(str, files)),
    }
    part = note.with_name(f"{note.name}.part")
    part.write_text(json.dumps(content))
    part.replace(note)


def remove_leftovers(note: Path) -> None:
    """Removes what the server of this note left on this machine, unless some of its processes still run."""
    try:
        left = json.loads(note.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return
    if left["host"] != socket.gethostname() or members(left["group"]):
        return
    remove(Path(file) for file in left["files"])
    shutil.rmtree(left["directory"], ignore_errors=True)
    note.unlink(missing_ok=True)
