"""Ports for servers that start slowly."""

import random
import socket
from pathlib import Path

import pytest

from megagrpo import ports
from megagrpo.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", ""])
def test_a_free_port_is_one_that_nobody_gets_without_asking_for_it(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
    lowest_ephemeral = int(ports.EPHEMERAL.read_text().split()[0])
    port = free_port(host)
    assert ports.LOWEST <= port < lowest_ephemeral
    with socket.socket(family) as server:
        server.bind((host, port))


def test_processes_with_the_same_seed_choose_other_ports() -> None:
    chosen = set()
    for _ in range(8):
        random.seed(0)
        chosen.add(free_port("127.0.0.1"))
    assert len(chosen) > 4


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port("127.0.0.1")))
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "LOWEST", taken)
        monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
        ports.EPHEMERAL.write_text(f"{taken + 1} 60999\n")
        assert free_port("127.0.0.1") != taken
