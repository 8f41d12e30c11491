"""Commands on a real pseudo-terminal, and what they have drawn there."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A process whose standard input, output and error are a terminal of 140 columns."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], rows: int = 45) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 140, 0, 0))
        kept = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=kept | {"TERM": "xterm-256color"}
        )
        os.close(theirs)
        self.drawn = ""

    def read_until(self, text: str, seconds: float = 600.0) -> None:
        """Fails with what was drawn if that has no such text by then, or the process ends before."""
        deadline = time.monotonic() + seconds
        while text not in plain(self.drawn):
            assert time.monotonic() < deadline, self.drawn
            assert self._read(), self.drawn

    def write(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self, code: int = 0) -> str:
        """All that was drawn, once the process has ended."""
        while self._read():
            pass
        os.close(self._ours)
        assert self.process.wait(60) == code, self.drawn
        return self.drawn

    def _read(self) -> bool:
        try:
            read = os.read(self._ours, 65536).decode(errors="replace")
        except OSError as error:
            if error.errno != errno.EIO:  # the process has closed its side
                raise
            read = ""
        self.drawn += read
        return bool(read)


def plain(drawn: str) -> str:
    """Without escape codes."""
    return ESCAPES.sub("", drawn)
