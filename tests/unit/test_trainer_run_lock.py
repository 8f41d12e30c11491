"""One process per run."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.errors import RecipeError
from megagrpo.trainer.run_lock import only_process_of

HOLD = "import sys, pathlib; from megagrpo.trainer.run_lock import only_process_of\n" + (
    "with only_process_of(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


def test_a_second_process_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RecipeError, match=str(first.pid)), only_process_of(tmp_path):
            pass
    finally:
        first.kill()
        first.communicate()
    with only_process_of(tmp_path):
        assert (tmp_path / "lock").read_text().strip().isdigit()


def test_a_file_system_without_locks_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*given: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RecipeError, match=r"not implemented(.|\n)*track\.directory"), only_process_of(tmp_path):
        pytest.fail("entered without a lock")
