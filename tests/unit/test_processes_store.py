"""The store in which a run's processes find each other: who reaches it, and who does not."""

from __future__ import annotations

import errno
import hmac
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megagrpo.processes import store
from megagrpo.processes.store import LOOPBACK, NONCE_BYTES, StoreAddress, StoreHost

OWN, OTHER, THIRD = "127.0.0.31", "127.0.0.32", "127.0.0.33"
"""Addresses of this machine that stand for those of three nodes."""


def reaches(host: str, port: int, source: str) -> bool:
    """Returns True if a connection is made and stays open: its packets may be dropped, or it closed."""
    try:
        made = socket.create_connection((host, port), timeout=0.3, source_address=(source, 0))
    except TimeoutError:
        return False
    with made:
        try:
            return bool(made.recv(1))
        except TimeoutError:  # a store says nothing first
            return True


@pytest.fixture(params=["as the kernel lets us", "without filters"], autouse=True)
def filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels take filters of packets from root alone."""

    def refuse(listening: socket.socket, addresses: object) -> None:
        raise PermissionError

    if request.param == "without filters":
        monkeypatch.setattr(store, "_admit_only", refuse)


def knock(address: StoreAddress, source: str, secret: str) -> bytes:
    assert address.gate is not None
    with socket.create_connection((OWN, address.gate), timeout=5.0, source_address=(source, 0)) as gate:
        gate.sendall(hmac.digest(secret.encode(), gate.recv(NONCE_BYTES, socket.MSG_WAITALL), "sha256"))
        return gate.recv(1)


def test_only_an_address_that_has_shown_the_secret_reaches_the_store() -> None:
    owner = StoreHost(OWN)
    address = owner.address
    owner.store.set("key", "value")
    assert not reaches(OWN, address.port, OTHER)
    assert knock(address, OTHER, "guessed") == b""
    assert not reaches(OWN, address.port, OTHER)
    assert knock(address, OTHER, address.secret) == b"1"
    assert reaches(OWN, address.port, OTHER)
    assert not reaches(OWN, address.port, THIRD)
    assert address.connect(5.0).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError, match="refused this process"):
        replace(address, secret="guessed").connect(5.0)
    assert address.secret not in repr(address)


@pytest.mark.parametrize("host", [LOOPBACK, OWN, "::1"])
def test_a_store_listens_on_its_address_alone(host: str) -> None:
    owner = StoreHost(host)
    owner.address.connect(5.0).set("key", "value")
    own = set()
    for open_file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it
            own.add(open_file.readlink().name)
    sockets = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    # Another process may listen on the same port of another address.
    listening = {
        address.partition(":")[0]
        for _, address, _, state, *_, inode in (line[:10] for line in sockets)
        if state == "0A" and f"socket:[{inode}]" in own and int(address.partition(":")[2], 16) == owner.address.port
    }
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = [packed[at : at + 4][::-1].hex().upper() for at in range(0, len(packed), 4)]
    assert listening == {"".join(words)}


def test_a_gate_closes_with_its_store() -> None:
    address = StoreHost(OWN).address
    with pytest.raises((OSError, dist.DistError)):
        address.connect(1.0)
    deadline = time.monotonic() + 5.0
    while socket.socket().connect_ex((OWN, address.port)) != errno.ECONNREFUSED:
        assert time.monotonic() < deadline, "the store's port is closed, too"
        time.sleep(0.01)
