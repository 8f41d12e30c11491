"""TCP ports for servers that start to listen seconds after their port is chosen, and this node's address."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

LOWEST = 20000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 100


def free_port(host: str) -> int:
    """Returns a free port of this interface, which the kernel gives only to processes that ask for it.

    Until the server listens, a port of the ephemeral range can be given to any process that connects or binds to
    port 0. This port is from below that range, or from within it if none below is free.
    """
    highest = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    for port in random.SystemRandom().sample(range(LOWEST, highest), min(ATTEMPTS, max(0, highest - LOWEST))):
        with suppress(OSError), socket.socket() as probe:  # somebody has it
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def own_address(peer: str) -> str:
    """Returns this node's address on the way to `peer`. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
