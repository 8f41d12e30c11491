"""torch's key-value store, which asks for no credentials, behind a gate: only a run's own nodes reach it.

The store's socket drops packets from every address but those from which a process has shown the run's secret at the
gate, a port beside it. Where the kernel lets only root filter packets, the store is on 127.0.0.1, and this process
relays to it what comes from those addresses. A store for 127.0.0.1 has no gate: only this machine reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megagrpo.processes.ports import own_address

LOOPBACK = "127.0.0.1"
NONCE_BYTES = 32
ANSWER_SECONDS = 10.0
"""From a connection at the gate to its proof."""
SO_ATTACH_FILTER, PACKET = 26, 0xFFF00000  # socket(7), linux/filter.h: where the IP header begins
BACKLOG, PART_BYTES = 1024, 1 << 16
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06


@dataclass(frozen=True)
class StoreAddress:
    """All that a process needs to reach the store. It travels through Ray, or in a request to a server with a key."""

    host: str
    port: int
    gate: int | None
    secret: str = field(repr=False)

    def connect(self, timeout_seconds: float) -> dist.TCPStore:
        """Connects to the store, through its gate if it has one. Raises dist.DistError or OSError."""
        if self.gate is not None:
            with socket.create_connection((self.host, self.gate), timeout_seconds) as gate:
                gate.sendall(_proof(self.secret, gate.recv(NONCE_BYTES, socket.MSG_WAITALL)))
                if not gate.recv(1):
                    raise ConnectionRefusedError("its gate refused this process")
        timeout = timedelta(seconds=timeout_seconds)
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)


class StoreHost:
    """The owner of a store that listens on `host` alone, an address of this node by which all of the run reach it."""

    def __init__(self, host: str) -> None:
        listening, secret = _listen(host), secrets.token_hex(32)
        port, gate = listening.getsockname()[1], None
        if host != LOOPBACK:
            door, node = _listen(host), own_address(host)
            try:
                guard: _Filter | _Relay = _Filter(listening, node)
            except OSError:  # some kernels take filters from root alone
                guard = _Relay(listening, node)
            gate, listening = door.getsockname()[1], guard.behind
            threading.Thread(target=_keep, args=(door, guard, secret), daemon=True).start()
            weakref.finalize(self, door.shutdown, socket.SHUT_RDWR)
        self.address = StoreAddress(host, port, gate, secret)
        at, behind, *_ = listening.getsockname()
        self.store = dist.TCPStore(
            at, behind, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


def _keep(door: socket.socket, guard: _Filter | _Relay, secret: str) -> None:
    """Keeps a gate: has the guard admit the addresses from which the secret is shown, until the host is gone."""
    lock = threading.Lock()

    def ask(connection: socket.socket, peer: str) -> None:
        with connection, contextlib.suppress(OSError):  # a peer that leaves or says nothing is not admitted
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(nonce := secrets.token_bytes(NONCE_BYTES))
            if hmac.compare_digest(connection.recv(NONCE_BYTES, socket.MSG_WAITALL), _proof(secret, nonce)):
                with lock:
                    guard.admit(peer)
                connection.sendall(b"1")

    with door, contextlib.closing(guard), contextlib.suppress(OSError):
        while True:
            connection, (peer, *_) = door.accept()
            threading.Thread(target=ask, args=(connection, peer), daemon=True).start()


def _listen(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG)


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), nonce, "sha256")


class _Filter:
    """A guard that has the kernel drop packets to the store's own socket from all but admitted addresses."""

    def __init__(self, listening: socket.socket, node: str) -> None:
        self.behind, self._listening, self._admitted = listening, listening.dup(), {node}
        _admit_only(self._listening, self._admitted)

    def admit(self, peer: str) -> None:
        self._admitted.add(peer)
        _admit_only(self._listening, self._admitted)

    def close(self) -> None:
        self._listening.close()


class _Relay:
    """A guard that relays connections from admitted addresses to a store `behind` it, and closes all others."""

    def __init__(self, listening: socket.socket, node: str) -> None:
        self.behind, self._listening, self._admitted = _listen(LOOPBACK), listening, {node}
        self._port = self.behind.getsockname()[1]
        started: Future[Callable[[], object]] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True).start()
        self.close = started.result()

    def admit(self, peer: str) -> None:
        self._admitted.add(peer)

    async def _serve(self, started: Future[Callable[[], object]]) -> None:
        closing = asyncio.Event()
        server = await asyncio.start_server(self._take, sock=self._listening, backlog=BACKLOG)
        started.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, closing.set))
        await closing.wait()
        server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the store is gone
            if (writer.get_extra_info("peername") or [None])[0] in self._admitted:
                from_store, to_store = await asyncio.open_connection(LOOPBACK, self._port)
                await asyncio.gather(_pass(reader, to_store), _pass(from_store, writer))
        writer.close()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Relays all bytes until either end is gone, then closes `sink`."""
    with contextlib.suppress(OSError):
        while part := await source.read(PART_BYTES):
            sink.write(part)
            await sink.drain()
    sink.close()


def _admit_only(listening: socket.socket, addresses: Set[str]) -> None:
    """Sets a kernel filter that accepts a packet only if all words of its source address equal those of an address."""
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
