"""torch's key-value store, which asks for no credentials, behind a gate: only a run's own nodes reach it.

The store's socket drops packets from every address but those from which a process has shown the run's secret at the
gate, a port beside it. On 127.0.0.1 there is no gate: only this machine reaches the store, from that address alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megagrpo.ports import own_address

LOOPBACK = "127.0.0.1"
NONCE_BYTES = 32
ANSWER_SECONDS = 10.0
"""From a connection at the gate to its proof."""
SO_ATTACH_FILTER, PACKET = 26, 0xFFF00000  # socket(7), linux/filter.h: where the IP header begins
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06


@dataclass(frozen=True)
class StoreAddress:
    """All that a process needs to reach the store. It travels through Ray, or in a request to a server with a key."""

    host: str
    port: int
    gate: int | None
    secret: str = field(repr=False)

    def connect(self, timeout_seconds: float) -> dist.TCPStore:
        """Raises dist.DistError or OSError."""
        if self.gate is not None:
            with socket.create_connection((self.host, self.gate), timeout_seconds) as gate:
                gate.sendall(_proof(self.secret, gate.recv(NONCE_BYTES, socket.MSG_WAITALL)))
                if not gate.recv(1):
                    raise ConnectionRefusedError("its gate refused this process")
        timeout = timedelta(seconds=timeout_seconds)
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)


class StoreHost:
    """Owns a store that listens on `host` alone, an address of this node by which all of the run reach it."""

    def __init__(self, host: str) -> None:
        listening, secret = _listen(host), secrets.token_hex(32)
        port, gate = listening.getsockname()[1], None
        if host != LOOPBACK:
            door = _listen(host)
            gate = door.getsockname()[1]
            threading.Thread(
                target=_Gate(listening.dup(), secret, own_address(host)).keep, args=(door,), daemon=True
            ).start()
            weakref.finalize(self, door.shutdown, socket.SHUT_RDWR)
        self.address = StoreAddress(host, port, gate, secret)
        self.store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


class _Gate:
    """Admits addresses to the `guarded` socket; `own` from the start."""

    def __init__(self, guarded: socket.socket, secret: str, own: str) -> None:
        self._guarded, self._secret, self._admitted, self._lock = guarded, secret, {own}, threading.Lock()
        _admit_only(guarded, self._admitted)

    def keep(self, door: socket.socket) -> None:
        with door, self._guarded, contextlib.suppress(OSError):  # the host is gone
            while True:
                connection, (peer, *_) = door.accept()
                threading.Thread(target=self._ask, args=(connection, peer), daemon=True).start()

    def _ask(self, connection: socket.socket, peer: str) -> None:
        with connection, contextlib.suppress(OSError):  # a peer that leaves or says nothing is not admitted
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(nonce := secrets.token_bytes(NONCE_BYTES))
            if hmac.compare_digest(connection.recv(NONCE_BYTES, socket.MSG_WAITALL), _proof(self._secret, nonce)):
                with self._lock:
                    self._admitted.add(peer)
                    _admit_only(self._guarded, self._admitted)
                connection.sendall(b"1")


def _listen(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), nonce, "sha256")


def _admit_only(listening: socket.socket, addresses: set[str]) -> None:
    """A filter of the kernel: by address, all words of a packet's source are compared, and the packet is taken."""
    program = b""
    for address in addresses:
        packed = ipaddress.ip_address(address.partition("%")[0]).packed
        words, at = struct.unpack(f"!{len(packed) // 4}I", packed), PACKET + (12 if len(packed) == 4 else 8)
        for index, word in enumerate(words):
            program += struct.pack("HBBI", LOAD, 0, 0, at + 4 * index)
            program += struct.pack("HBBI", JUMP_IF_EQUAL, 0, 2 * (len(words) - index) - 1, word)
        program += struct.pack("HBBI", RETURN, 0, 0, 0xFFFFFFFF)
    program += struct.pack("HBBI", RETURN, 0, 0, 0)
    kept = ctypes.create_string_buffer(program)
    length = len(program) // struct.calcsize("HBBI")
    listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", length, ctypes.addressof(kept)))
