"""Removal of what a process leaves when it is killed. Standard library only: SGLang's environment imports it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import BinaryIO


def remove_after_me(path: Path) -> BinaryIO:
    """Starts a shell, no child of this process, that removes the path once the pipe that is returned is closed: at the
    latest when this process has ended, however it ends."""
    reading, writing = os.pipe()
    shell = 'exec 3<&0; (trap "" INT TERM HUP; read _ <&3; exec rm -rf -- "$0") >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", shell, str(path)], stdin=reading, start_new_session=True, check=True)
    os.close(reading)
    return os.fdopen(writing, "wb")
