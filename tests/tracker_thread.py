"""The process of a run's trackers as a thread of the test: without its start, and with what the test has patched."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from megagrpo.processes import lifetime
from megagrpo.track import follower

PATIENT, LAUNCH = 250.0, follower.LAUNCH


class FollowerThread:
    """A thread with the methods of a process that FollowerProcess uses."""

    pid, stdin = os.getpid(), None

    def __init__(self, directory: Path) -> None:
        read, write = os.pipe()
        self.stdout, self._said = os.fdopen(read), os.fdopen(write, "w", buffering=1)
        self._thread = Thread(target=self._work, args=(directory,))
        self._code = 1

    def _work(self, directory: Path) -> None:
        with self._said:
            follower.follow(directory, {}, lambda line: self._said.write(f"{line}\n"))
            self._code = 0

    def __enter__(self) -> FollowerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self.stdout.close()

    def wait(self) -> int:
        self._thread.join()
        return self._code


def trackers_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are patient, too: one that is slow because the machine is busy does not fail."""
    monkeypatch.setattr(follower, "started_process", FollowerThread)
    monkeypatch.setattr(lifetime, "let_family_idle", lambda pid: None)  # beside other tests it would get no time
    monkeypatch.setattr(follower, "write_report", lambda *_: None)
    monkeypatch.setattr(follower, "FINISH_SECONDS", PATIENT)
    monkeypatch.setattr(follower, "AGAIN_SECONDS_MAX", 1.0)


def trackers_in_patient_process(monkeypatch: pytest.MonkeyPatch, first: str = "") -> None:
    """The real process, as patient. first: code that it runs before anything else."""
    patient = f"follower.FINISH_SECONDS, follower.LOOK_SECONDS = {PATIENT}, 0.5"
    lines = (first, f"import {follower.__name__} as follower", patient, LAUNCH)
    monkeypatch.setattr(follower, "LAUNCH", "\n".join(lines))
    monkeypatch.setattr(follower, "FINISH_SECONDS", PATIENT)
    monkeypatch.setattr(follower, "RESTART_SECONDS", 0.1)
