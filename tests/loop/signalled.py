"""`megagrpo` that is sent a signal while its training ranks work, so that no test has to catch the moment.

python -m tests.loop.signalled SIGNAL CALL N COMMAND ...: at the Nth time that this process calls its ranks' CALL, such
as update or save. Nothing comes after that call before the signal was sent.
"""

from __future__ import annotations

import os
import signal
import sys
from threading import Timer
from typing import Any

from megagrpo import cli
from megagrpo.cluster.train_ranks import TrainRanks

AFTER_SECONDS = 0.1
true_wait = TrainRanks.wait


def main(name: str, call: str, nth: str, *command: str) -> int:
    left = int(nth)

    def signalled_wait(ranks: TrainRanks, doing: str, answers: Any) -> Any:
        nonlocal left
        left -= doing == call
        if doing != call or left:
            return true_wait(ranks, doing, answers)
        timer = Timer(AFTER_SECONDS, os.kill, (os.getpid(), signal.Signals[name]))
        timer.start()
        try:
            return true_wait(ranks, doing, answers)
        finally:
            timer.join()

    TrainRanks.wait = signalled_wait
    return cli.main(command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
