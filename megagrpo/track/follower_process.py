"""The follower's process as a run sees it: it runs on idle cores, and nothing in the run waits for it.

In the driver, the trackers' libraries would hold Python's lock, and a core that training ranks of this node need. In a
process of its own, their faults, threads and signals stay out of the run.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megagrpo.errors import first_line
from megagrpo.processes.lifetime import end_with_parent, let_family_idle

FINISH_SECONDS, REPORT_SECONDS, LEAVE_SECONDS = 60.0, 30.0, 10.0
"""Timeouts at the run's end: of the trackers, of the report before, and of the process's exit after."""
STARTS_MAX, AGAIN_SECONDS, LONG_SECONDS = 5, 10.0, 600.0
"""Maximum starts of a process that dies early, seconds between them, seconds of life after which they count anew."""
LAUNCH = f"""
import signal
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
from {end_with_parent.__module__} import end_with_parent
end_with_parent()
import sys
from megagrpo.cli import main
sys.exit(main())
"""
"""A command of megagrpo that ends with its parent alone. Slurm sends these signals to all processes, and the driver
decides what follows: nothing may be imported before."""


class FollowerProcess:
    """`megagrpo track sync --follow`, restarted when it dies. `say` receives its lines; a thread calls it."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory, self._say = directory, say
        self._ended, self._given_up = threading.Event(), False
        self._process: subprocess.Popen[str] | None = None
        # The thread starts it: a process ends with the thread that started it.
        self._thread = threading.Thread(target=self._keep, name="trackers", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until trackers have everything, for a minute and the report's timeout at most. Called once status.json
        has the run's end. If a full disk has kept it out, the process learns it from its closed standard input."""
        self._ended.set()
        if process := self._process:  # the run waits now: it gets time as others do, where it may
            let_family_idle(process.pid, False)
            if process.stdin:
                process.stdin.close()
        self._thread.join(FINISH_SECONDS + REPORT_SECONDS + LEAVE_SECONDS)
        if self._thread.is_alive():
            self._say(f"trackers: their process does not end; {self._brings_rest}")
            self._given_up = True
            if process := self._process:
                process.kill()
            self._thread.join(LEAVE_SECONDS)  # it may hang in a file system that is gone

    @property
    def _brings_rest(self) -> str:
        return f"megagrpo track sync {self._directory} brings the rest"

    def _keep(self) -> None:
        """Starts the process, passes on its lines, and restarts it when it dies."""
        left = STARTS_MAX
        while not self._given_up:
            begun = time.monotonic()
            try:
                code = self._run()
            except OSError as error:
                why = f"does not start: {first_line(error)}"
            else:
                if self._given_up or (code == 0 and self._ended.is_set()):
                    return
                why = f"has ended with status {code}"
            left = STARTS_MAX if time.monotonic() - begun > LONG_SECONDS else left - 1
            if not left:
                self._say(f"trackers: their process {why}; {self._brings_rest}")
                return
            self._say(f"warning: trackers: their process {why}; it is started again")
            self._ended.wait(AGAIN_SECONDS)

    def _run(self) -> int:
        """Runs the process until it ends. Returns its exit status. Raises OSError."""
        with started_process(self._directory) as process:
            self._process = process
            if self._ended.is_set() and process.stdin:
                process.stdin.close()
            for line in process.stdout or ():
                if line.endswith("\n"):  # else it died in the middle of it
                    self._say(line.removesuffix("\n"))
            self._process = None
            return process.wait()


def started_process(directory: Path) -> subprocess.Popen[str]:
    """Starts the process. Raises OSError."""
    return subprocess.Popen(
        # -P: files of the current directory are no modules
        [sys.executable, "-P", "-c", LAUNCH, "track", "sync", "--follow", str(directory)],
        stdin=subprocess.PIPE,  # closed at the run's end
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C is the driver's
    )
