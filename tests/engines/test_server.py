"""A server answers on loopback alone and only with its key; when a part of it is killed, nothing of it stays."""

import urllib.error
import urllib.request
from pathlib import Path

import psutil

from tests.engines.policy import WAIT_SECONDS
from tests.engines.servers import Served

PATHS = {"sglang": ["/server_info"], "vllm": ["/health", "/is_paused"]}


def status(url: str, key: str | None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_answers_on_loopback_alone_and_only_with_its_key_which_others_cannot_read(served: Served) -> None:
    server, paths = served.server, PATHS[served.kind]
    assert {status(server.url + path, server.api_key) for path in paths} == {200}
    for key in (None, "another"):
        assert {status(server.url + path, key) for path in (*paths, "/docs")} == {401}
    for process in served.processes:
        for shown in ("cmdline", "environ"):
            assert server.api_key.encode() not in Path(f"/proc/{process.pid}/{shown}").read_bytes()
    assert server.log.stat().st_mode & 0o077 == 0
    assert server.api_key not in server.log_end()
    listening = [
        socket.laddr
        for process in served.processes
        for socket in process.net_connections(kind="inet")
        if socket.status == psutil.CONN_LISTEN
    ]
    assert int(server.url.rpartition(":")[2]) in {address.port for address in listening}
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}, listening
