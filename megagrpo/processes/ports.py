"""TCP ports for servers that start to listen seconds after their port is chosen, and this node's address."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from errno import EADDRINUSE
from pathlib import Path

LOWEST = 20000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 100


def free_port(host: str, later: Sequence[int] = ()) -> int:
    """Returns a free port of this interface, which the kernel gives only to processes that ask for it.

    Until the server listens, a port of the ephemeral range can be given to any process that connects or binds to
    port 0. This port is from below that range, or from within it if none below is free. So many ports after it as
    `later` says are free as well. Raises OSError if there is no such port.
    """
    highest = int(EPHEMERAL.read_text(encoding="ascii").split()[0]) - max(later, default=0)
    below = random.SystemRandom().sample(range(LOWEST, highest), min(ATTEMPTS, max(0, highest - LOWEST)))
    for port in (*below, *[0] * ATTEMPTS):
        with suppress(OSError, OverflowError), ExitStack() as probes:  # somebody has it, or it is above the last
            first, *others = (probes.enter_context(socket.socket()) for _ in (0, *later))
            first.bind((host, port))
            chosen = int(first.getsockname()[1])
            for probe, distance in zip(others, later, strict=True):
                probe.bind((host, chosen + distance))
            return chosen
    raise OSError(EADDRINUSE, f"no free port of {host or 'this machine'}")


def own_address(peer: str) -> str:
    """Returns this node's address on the way to `peer`. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
