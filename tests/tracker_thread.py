"""The process of a run's trackers as a thread of the test: without its start, and with what the test has patched."""

from __future__ import annotations

import json
import os
from threading import Thread

import pytest

from megagrpo.track import behind, tracker_process, wandb


class TrackerThread:
    """What TrackerProcess uses of a process."""

    pid = os.getpid()

    def __init__(self) -> None:
        read, write = os.pipe()
        self.stdin, self._messages = os.fdopen(write, "w"), os.fdopen(read)
        read, write = os.pipe()
        self.stdout, self._said = os.fdopen(read), os.fdopen(write, "w", buffering=1)
        self._thread = Thread(target=self._work)
        self._code = 1

    def _work(self) -> None:
        with self._messages, self._said:
            tracker_process.bring(self._messages, lambda line: self._said.write(f"{json.dumps(line)}\n"))
            self._code = 0

    def __enter__(self) -> TrackerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self.stdin.close()
        self.stdout.close()

    def wait(self) -> int:
        self._thread.join()
        return self._code


def trackers_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are patient, too: one that is slow because the machine is busy does not fail."""
    monkeypatch.setattr(tracker_process, "started_process", TrackerThread)
    monkeypatch.setattr(wandb, "let_family_idle", lambda pid: None)  # beside other tests it would get no time
    monkeypatch.setattr(tracker_process, "FINISH_TIMEOUT_SECONDS", 250.0)
    monkeypatch.setattr(behind, "AGAIN_SECONDS_MAX", 1.0)
