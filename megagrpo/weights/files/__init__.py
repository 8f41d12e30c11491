"""Checkpoints on disk: ranks load their boxes from files and write them into files; directories appear all at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def publish(written: Path, directory: Path) -> None:
    """Renames `written` to `directory`, in place of an older one. No reader sees a mixture of both. Raises OSError."""
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    written.rename(directory)
    sync_directories([directory.parent])
    shutil.rmtree(replaced, ignore_errors=True)


def sync_directories(paths: Iterable[Path]) -> None:
    """Forces the entries of directories (names, renames) to disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
