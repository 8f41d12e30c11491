"""MANIFEST.json: the list of a checkpoint's files with their sizes and checksums. It is written last, so its presence
means that everything else was written, and its content tells whether that is still so."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "MANIFEST.json"
FORMAT = 1
READERS = 8


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint, as it was when written. `path` is relative to the checkpoint, with forward slashes."""

    path: str
    size_bytes: int
    blake2b: str


def describe(root: Path, path: Path) -> SavedFile:
    """Size and checksum of the file `path` under the checkpoint directory `root`. Raises OSError."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))  # type: ignore[arg-type]
        size = os.fstat(stream.fileno()).st_size
    return SavedFile(path.relative_to(root).as_posix(), size, digest.hexdigest())


def write_manifest(root: Path, files: Iterable[SavedFile]) -> None:
    """Write MANIFEST.json and force it to disk. Raises OSError."""
    listed = sorted(files, key=lambda file: file.path)
    content = {"format": FORMAT, "files": [asdict(file) for file in listed]}
    write_durably(root / MANIFEST, json.dumps(content, indent=2))


def read_manifest(root: Path) -> list[SavedFile]:
    """The files that the checkpoint should have. Raises OSError, or ValueError if the manifest itself is damaged."""
    try:
        content = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        files = [SavedFile(**file) for file in content["files"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    if content["format"] != FORMAT:
        raise ValueError(f"{MANIFEST} has format {content['format']}, this version reads {FORMAT}")
    return files


def damage(root: Path, *, checksums: bool = True) -> list[str]:
    """What is wrong with the checkpoint at `root`, a line for each file; an empty list if it is whole.

    Sizes are always compared; `checksums` reads every byte as well, several files at a time.
    """
    try:
        expected = read_manifest(root)
    except (OSError, ValueError) as error:
        return [str(error)]
    with ThreadPoolExecutor(READERS) as readers:
        return [line for line in readers.map(lambda file: _file_damage(root, file, checksums), expected) if line]


def _file_damage(root: Path, expected: SavedFile, checksums: bool) -> str:
    path = root / expected.path
    try:
        size = path.stat().st_size
        if size != expected.size_bytes:
            return f"{expected.path} has {size} bytes instead of {expected.size_bytes}"
        if checksums and describe(root, path) != expected:
            return f"{expected.path} has another checksum than when it was written"
    except OSError as error:
        return f"{expected.path}: {error.strerror or error}"
    return ""


def write_durably(path: Path, text: str) -> None:
    """Write a text file and force it to disk. Raises OSError."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directories(paths: Sequence[Path]) -> None:
    """Force the entries of directories (names, renames) to disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
