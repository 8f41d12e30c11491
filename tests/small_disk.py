"""Disks that are small or full: for this process, or for all."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

FILLER = "filler"


@contextmanager
def small_disk(file_bytes: int) -> Iterator[None]:
    """No file can be longer: what is written beyond it is the error "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class MountedDisk:
    """A file system in memory at `directory`. A context; skips the test where it cannot be mounted."""

    def __init__(self, directory: Path, room: str = "16m") -> None:
        self._directory, self._room = directory, room

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._room}", "tmpfs", str(self._directory)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounts a file system: run it as root")
        return self

    def fill(self) -> None:
        """Until nothing more can be written."""
        with (self._directory / FILLER).open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        (self._directory / FILLER).unlink()

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", self._directory], check=True)
