"""Cleanup of what a process leaves when it is killed. Standard library only: SGLang's environment imports it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

REMOVE = 'exec rm -rf -- "$1"'
END = 'for it; do [ "$(sed "s/.*) //" /proc/${it%:*}/stat | cut -d " " -f 20)" = ${it#*:} ] && kill -9 ${it%:*}; done'


def remove_after_me(path: Path) -> BinaryIO:
    """Starts a shell, no child of this process, that removes the path once the pipe that is returned is closed: at the
    latest when this process has ended, however it ends."""
    return _after_me(REMOVE, str(path))


def end_after_me(processes: Iterable[int]) -> BinaryIO:
    """Starts a shell like remove_after_me's that kills the processes, unless their numbers then belong to others."""
    began = []
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            stat = Path(f"/proc/{process}/stat").read_text()
            began.append(f"{process}:{stat.rpartition(') ')[2].split()[19]}")
    return _after_me(END, *began)


def _after_me(command: str, *arguments: str) -> BinaryIO:
    reading, writing = os.pipe()
    shell = f'exec 3<&0; (trap "" INT TERM HUP; read _ <&3; {command}) >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", shell, "sh", *arguments], stdin=reading, start_new_session=True, check=True)
    os.close(reading)
    return os.fdopen(writing, "wb")
