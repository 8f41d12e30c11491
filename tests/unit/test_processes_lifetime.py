"""A process ends with its parent, also while it is stopped, or with one that it does not know."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from megagrpo.processes.lifetime import end_with_parent


def test_a_stopped_process_ends_with_its_parent() -> None:
    said, say = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            if os.fork() == 0:
                end_with_parent()
                os.write(say, str(os.getpid()).encode())
            time.sleep(60)
        finally:
            os._exit(0)
    os.close(say)
    child = int(os.read(said, 16))
    ended = os.pidfd_open(child)
    os.kill(child, signal.SIGSTOP)
    assert not select.select([ended], [], [], 0.1)[0]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert select.select([ended], [], [], 10)[0]
    for descriptor in (said, ended):
        os.close(descriptor)


def test_processes_end_after_one_that_is_killed() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", "60"]) as meant:
        me = "import sys, time; from megagrpo.processes.lifetime import end_after_me"
        watching = f"{me}; watch = end_after_me(map(int, sys.argv[1:])); print(flush=True); time.sleep(60)"
        command = [sys.executable, "-c", watching, str(ended.pid), str(meant.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline()
            assert meant.poll() is None
            owner.kill()
        assert meant.wait(timeout=30) == -signal.SIGKILL
