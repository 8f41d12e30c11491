"""A process ends with its parent, also while it is stopped."""

from __future__ import annotations

import os
import select
import signal
import time

from megagrpo.parent_process import end_with_parent


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
