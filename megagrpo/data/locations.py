"""The files that a path of the recipe stands for: one, all of a folder, or a pattern's; local, or through fsspec.

Paths are texts, because pathlib makes s3:/bucket of s3://bucket.
"""

from __future__ import annotations

import glob
import io
import json
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megagrpo.data.reasoning_gym import is_task, package_version, task_problem
from megagrpo.errors import DataError, Problem, few, first_line, pointer_problem

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".arrow")
NEEDED = "a parquet, JSONL, JSON or Arrow file, or a folder of such files"
POINTER_BYTES_MAX = 1024
"""A Git LFS pointer is smaller."""
NOT_DATA = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json", "indices.arrow")
"""Files that the `datasets` package writes beside its data files."""


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL such as s3://bucket/file.parquet."""
    return "://" in path


def suffix_of(path: str) -> str:
    """Returns the suffix that decides how a file is read; "" if its name ends in none of SUFFIXES."""
    return max((suffix for suffix in SUFFIXES if path.endswith(suffix)), key=len, default="")


def files_of(path: str) -> list[str]:
    """Returns the files that a path stands for, sorted: itself, those below a folder, or the matches of a pattern.

    Files of a folder that `datasets.Dataset.save_to_disk` wrote keep their own order. Hidden files are left out.
    Raises DataError if there is no file, or if the place cannot be reached.
    """
    if is_task(path):
        return [path]
    if not path:
        raise DataError(Problem("an empty path", needed=NEEDED))
    if not is_remote(path):
        return _files_in(_Local, path, path, os.fspath)
    with _remote(path) as (filesystem, inner):
        return _files_in(filesystem, path, inner, filesystem.unstrip_protocol)


def path_problem(path: str) -> Problem | None:
    """Returns the problem with the path of one file, None if there is none. Does not read rows."""
    if is_task(path):
        return task_problem(path)
    if not is_remote(path):
        local = Path(path)
        if not local.exists():
            return _missing(path)
        if not local.is_file():
            given = "a directory" if local.is_dir() else "a special file"
            return Problem(f"{path}: not a file", given, NEEDED)
    if not suffix_of(path):
        given, fix = f"extension {posixpath.splitext(path)[1]!r}", "convert it, or rename it if only the name is wrong"
        return Problem(f"{path}: unknown kind of file", given, needed=" or ".join(SUFFIXES), fix=fix)
    size, _ = size_and_version(path)
    if size == 0:
        return Problem(f"{path}: the file is empty", given="0 bytes", needed="at least one row")
    return None if size > POINTER_BYTES_MAX or is_remote(path) else pointer_problem(path, Path(path).read_bytes())


def near_file(path: Path) -> Path | None:
    """Returns a file beside a missing one with nearly the same name; None if there is none."""
    import difflib

    siblings = [p.name for p in path.parent.iterdir() if p.name != path.name] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return path.parent / near[0] if near else None


def is_absent(path: str) -> bool:
    """Returns whether a file may be on another machine: no file here has this or nearly this name, or no filesystem of
    this machine reaches it."""
    if is_task(path):
        return False
    if is_remote(path):
        try:
            return not files_of(path)
        except DataError:
            return True
    if glob.has_magic(path) and not Path(path).exists():
        return not any(True for _ in _glob(path))
    return not Path(path).exists() and near_file(Path(path)) is None


def open_file(path: str) -> BinaryIO:
    """Opens one file for reading bytes, unpacked if its name ends in .gz or .zst. Raises DataError if a URL fails."""
    if not is_remote(path):
        opened: Any = open(path, "rb")  # noqa: SIM115  (the reader closes it)
    else:
        with _remote(path) as (filesystem, inner):
            opened = filesystem.open(inner, "rb")
    if path.endswith((".gz", ".zst")):
        import pyarrow as pa

        kind = "gzip" if path.endswith(".gz") else "zstd"
        opened = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(opened, "r"), kind), 2**18)
    return opened


def arrow_source(path: str) -> pa.NativeFile:
    """Opens one file for pyarrow; a local file is mapped, not read."""
    import pyarrow as pa

    return pa.PythonFile(open_file(path), "r") if is_remote(path) else pa.memory_map(path)


def size_and_version(path: str) -> tuple[int, str]:
    """Returns the size of a file in bytes, and a text that changes when the file is written again."""
    if is_task(path):
        return 0, package_version()
    if not is_remote(path):
        status = os.stat(path)
        return status.st_size, f"{status.st_mtime_ns}"
    with _remote(path) as (filesystem, inner):
        info = filesystem.info(inner)
    version = next((info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if info.get(key)), "")
    return int(info.get("size") or 0), str(version)


def _missing(path: str) -> Problem:
    near, start = near_file(Path(path)), "" if is_remote(path) else "; relative paths start at the working directory"
    return Problem(path, "no such file", NEEDED, f"did you mean {near}?" if near else f"check the path{start}")


def _below(folder: str) -> Iterator[str]:
    """Yields all files below a folder."""
    return (os.path.join(directory, name) for directory, files in _walk(folder) for name in files)


def _walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yields a folder and all folders below it except hidden ones, each with the names of its files.

    Follows links to folders, but enters each folder once, and none above the first.
    """
    first = os.path.realpath(folder)
    entered = {first, *map(str, Path(first).parents)}
    for directory, folders, files in os.walk(folder, followlinks=True):
        yield directory, files
        below, folders[:] = sorted(name for name in folders if not name.startswith(".")), []
        for name in below:
            if (real := os.path.realpath(os.path.join(directory, name))) not in entered:
                entered.add(real)
                folders.append(name)


def _glob(pattern: str) -> Iterator[str]:
    """Yields the matches of glob.glob, without the loops of links that its `**` walks."""
    head, stars, rest = pattern.partition("**/")
    if not stars or head[-1:] not in ("", "/"):
        yield from glob.iglob(pattern)
        return
    for top in glob.iglob(head) if head else ["."]:
        for folder, _ in _walk(top):
            names = _glob(os.path.join(glob.escape(folder), rest))
            yield from names if head else (name.removeprefix("./") for name in names)


class _Local:
    """Files of this machine, with the functions of a filesystem of fsspec."""

    exists, isdir = os.path.exists, os.path.isdir
    glob, find = _glob, _below


def _files_in(filesystem: Any, path: str, inner: str, name_of: Callable[[str], str]) -> list[str]:
    """Returns the files at `path`, which the filesystem calls `inner`. Raises DataError if there is none."""

    def of_folder(folder: str) -> list[str]:
        return _folder_files(name_of(folder), sorted(map(name_of, filesystem.find(folder))))

    if glob.has_magic(path) and (is_remote(path) or not os.path.exists(path)):
        names: list[str] = []
        for name in filesystem.glob(inner):
            names += of_folder(name) if filesystem.isdir(name) else [name_of(name)] if _is_data(name) else []
        names = sorted(set(names)) if is_remote(path) else _once(names)
        given = "no data file fits this pattern"
        fix = "correct the pattern; relative ones start at the working directory"
    elif filesystem.isdir(inner):
        names = of_folder(inner)
        given, fix = "a folder without data files", "name another folder, or put files in it"
    elif filesystem.exists(inner):
        return [path]
    else:
        raise DataError(_missing(path))
    if not names:
        raise DataError(Problem(path, given, f"files that end in {', '.join(SUFFIXES)}", fix))
    return names


def _once(names: Iterable[str]) -> list[str]:
    """Returns the names, sorted. Of several paths through links to the same folder, keeps the shortest."""
    by_place: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        folder, base = os.path.split(name)
        by_place.setdefault(os.path.join(os.path.realpath(folder), base), name)
    return sorted(by_place.values())


def _is_data(name: str) -> bool:
    base = posixpath.basename(name)
    return bool(suffix_of(base)) and base not in NOT_DATA and not base.startswith((".", "_"))


def _folder_files(folder: str, below: list[str]) -> list[str]:
    """Returns the data files among the sorted files below a folder, in the order of the list that `datasets` wrote, if
    there is one. Raises DataError if a listed file is missing, or if the folder has several splits."""
    by_name = {
        posixpath.basename(name): name for name in below if posixpath.dirname(name).rstrip("/") == folder.rstrip("/")
    }
    if "dataset_dict.json" in by_name:
        splits = _listed(by_name["dataset_dict.json"], lambda content: list(map(str, content["splits"])))
        given = f"a folder of several splits: {', '.join(splits)}"
        fix = f"write {folder.rstrip('/')}/{splits[0] if splits else 'SPLIT'}"
        raise DataError(Problem(folder, given, needed="the folder of one split", fix=fix))
    if "state.json" in by_name:
        listed = _listed(
            by_name["state.json"], lambda content: [str(of["filename"]) for of in content.get("_data_files", ())]
        )
        if absent := [name for name in listed if name not in by_name]:
            given = f"no file {few(absent)}"
            needed = f"the {len(listed)} files that its state.json lists"
            raise DataError(Problem(folder, given, needed, "copy the folder again, with all of its files"))
        if listed:
            return [by_name[name] for name in listed]
    return [name for name in below if _is_data(name)]


def _listed(path: str, names_in: Callable[[Any], list[str]]) -> list[str]:
    """Returns the names that a file of the `datasets` package lists. Raises DataError."""
    try:
        with open_file(path) as file:
            return names_in(json.loads(file.read()))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        given = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(Problem(path, given, "a file as `datasets` writes it", "save the data set again")) from None


@contextmanager
def _remote(path: str) -> Iterator[tuple[Any, str]]:
    """Yields the filesystem of a URL, and its name there. Raises the filesystem's exceptions as DataError."""
    try:
        from fsspec.core import url_to_fs

        yield url_to_fs(path)
    except DataError:
        raise
    except ImportError as error:
        package = path.partition("://")[0]
        fix = f"pip install the package of fsspec for {package}:// (s3fs for s3, gcsfs for gs)"
        raise DataError(Problem(path, first_line(error), "a filesystem that fsspec knows", fix)) from None
    except Exception as error:  # noqa: BLE001  (each filesystem has exceptions of its own, such as botocore's)
        given = f"{type(error).__name__}: {first_line(error)}"
        fix = "check the URL's protocol and name, and that this machine may read it"
        raise DataError(
            Problem(f"{path}: cannot be reached", given, "a file that can be read from here", fix)
        ) from None
