"""Disks that are full: for this process, or for all."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

ROOM = "16m"


@contextmanager
def small_disk(file_bytes: int) -> Iterator[None]:
    """No file can be longer: what is written beyond it is the error "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FullDisk:
    """A file system in memory, full, at `directory`. A context; skips the test where it cannot be mounted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        if os.geteuid() or self._mount("size=4k").returncode:
            pytest.skip("mounts a file system: needs root")
        (self._directory / "full").write_bytes(bytes(4096))
        return self

    def make_room(self) -> None:
        self._mount(f"remount,size={ROOM}").check_returncode()

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", self._directory], check=True)

    def _mount(self, options: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self._directory], capture_output=True)
