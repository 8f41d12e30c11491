"""Ports for servers that start slowly."""

import random
import socket
from pathlib import Path

import pytest

from megagrpo.processes import ports
from megagrpo.processes.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_free_port_is_one_that_the_kernel_does_not_give_away(host: str) -> None:
    lowest_ephemeral = int(ports.EPHEMERAL.read_text().split()[0])
    port = free_port(host)
    assert ports.LOWEST <= port < lowest_ephemeral
    with socket.socket() as server:
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


def test_a_port_with_a_neighbour_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = free_port("127.0.0.1", range(1, 20))
    monkeypatch.setattr(ports, "LOWEST", base)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    ports.EPHEMERAL.write_text(f"{base + 15} 60999\n")
    with socket.socket() as neighbour:
        neighbour.bind(("127.0.0.1", base + 10))
        chosen = {free_port("", range(8, 11)) for _ in range(50)}
    # Those that reach up to the ephemeral range are left out, and those whose neighbour is in use.
    assert chosen == {base + 3, base + 4}
