"""The kinds of sandbox that work on this machine: each is started, and a program in it tries to get out."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from functools import lru_cache

from megagrpo.errors import RewardError
from megagrpo.reward.sandbox.programs import Program
from megagrpo.reward.sandbox.sandbox import START_SECONDS, THREADS, Isolation, Kind, Limits, Sandbox, refusal

ISOLATIONS = ("auto", "bubblewrap", "seccomp", "none")
_PROBE = """
import os, socket, sys, threading
def refused(what):
    try: what()
    except OSError: return True
leaks = [name for name, what in {
    "files": lambda: open(PATH), "network": lambda: socket.socket(), "processes": os.fork,
}.items() if not refused(what)]
wait, started = threading.Event(), 0
threading.stack_size(1 << 16)  # memory must not be what ends it
try:
    for started in range(2 * LIMIT): threading.Thread(target=wait.wait, daemon=True).start()
except RuntimeError: pass
print(started, *leaks, flush=True)
os._exit(0)
"""


def working_kind(isolation: Isolation) -> Kind:
    """Returns the best kind that works on this machine: once started, it must hold a program that tries to get out.

    Raises RewardError if there is none. Never returns `none` in place of another.
    """
    kind, refused = search(isolation)
    if kind is None:
        raise refusal(f"isolation: {isolation}, which does not work here ({'; '.join(refused)})")
    return kind


def checked_kind(isolation: Isolation) -> Kind:
    """Returns working_kind(isolation) for a verifier's argument. Raises ValueError if unknown or not working."""
    if isolation not in ISOLATIONS:
        raise ValueError(f"isolation is {isolation!r}, not {', '.join(ISOLATIONS)}")
    try:
        return working_kind(isolation)
    except RewardError as error:
        raise ValueError("; ".join(f"{problem.given}: {problem.fix}" for problem in error.problems)) from None


@lru_cache
def search(isolation: Isolation) -> tuple[Kind | None, tuple[str, ...]]:
    """Returns the best kind, None if there is none, and the reasons why better ones were refused."""
    refused: list[str] = []
    for kind in _candidates(isolation):
        if kind.isolation == "none":
            return kind, ()
        try:
            leaks = _leaks(kind)
        except RewardError as error:
            refused += [problem.given for problem in error.problems]
        except OSError as error:
            refused.append(f"{kind}: {error}")
        else:
            if not leaks:
                return kind, tuple(dict.fromkeys(refused))
            refused.append(f"{kind}: does not contain {leaks}")
    return None, tuple(dict.fromkeys(refused))


def _candidates(isolation: Isolation) -> list[Kind]:
    root = os.geteuid() == 0
    contained = [Kind("bubblewrap", other_user=True, threads=True)] if root else []
    contained += [Kind("bubblewrap", user_namespace=True, threads=True), Kind("bubblewrap", user_namespace=True)]
    filtered = [Kind("seccomp", other_user=True, threads=True)] if root else []
    filtered += [Kind("seccomp")]
    return {
        "bubblewrap": contained,
        "seccomp": filtered,
        "auto": [*contained, *filtered],
        "none": [Kind("none")],
    }[isolation]


def _leaks(kind: Kind) -> str:
    """Returns what a program can do in this kind of sandbox and must not, or why it failed; empty if nothing."""
    sandbox = Sandbox(kind, Limits())
    with tempfile.NamedTemporaryFile() as secret, contextlib.closing(sandbox):
        os.chmod(secret.name, 0o644)
        source = f"PATH, LIMIT = {secret.name!r}, {THREADS}\n{_PROBE}"
        with Program(sandbox, source, deadline=time.monotonic() + START_SECONDS) as program:
            ran = program.run("", START_SECONDS)
    if ran.failure:
        return ran.failure
    started, *leaks = ran.value.split() or ["0", "nothing"]
    if kind.threads and not THREADS - 4 <= int(started) <= THREADS:  # fewer: the kernel counts others' too
        leaks.append("the number of threads")
    return ", ".join(leaks)
