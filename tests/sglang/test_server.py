"""A server answers only with its key, its failures are named, and nothing of it stays."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megagrpo.errors import EngineError
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.sglang.engine import SglangEngine
from megagrpo.rollout.sglang.server import SHARED_MEMORY, Server, members, note_leftovers, shared_files
from megagrpo.types import SamplingParams
from tests.rollout_engines import model_directory, request
from tests.sglang.servers import START_SECONDS, WAIT_SECONDS, Served, settings, start_server

GONE_SECONDS = 120.0


def status(server: Server, path: str, key: str | None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, headers=headers), timeout=WAIT_SECONDS
        ) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_answers_on_loopback_alone_and_only_with_its_key_which_others_cannot_read(tied_server: Served) -> None:
    server = tied_server.server
    assert status(server, "/server_info", server.api_key) == 200
    assert status(server, "/server_info", None) == 401
    assert status(server, "/server_info", "another") == 401
    for process in members(server._process.pid):
        for shown in ("cmdline", "environ"):
            assert server.api_key.encode() not in Path(f"/proc/{process}/{shown}").read_bytes()
    assert server.log.stat().st_mode & 0o077 == 0
    assert server.api_key not in server.log_end()
    port = int(server.url.rpartition(":")[2])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {line[1] for line in lines if line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port}
    assert listening == {f"0100007F:{port:04X}"}


@pytest.mark.long
def test_a_server_that_is_killed_is_named_with_its_log_and_nothing_of_it_stays(tmp_path: Path) -> None:
    directory = model_directory("qwen2_tied", tmp_path / "model")
    server = start_server(directory, EngineLayoutConfig(), tmp_path / "engine.log", name="engine 7")
    engine = None
    try:
        server.wait_until_ready(START_SECONDS)
        engine = SglangEngine(server, **(settings(directory, EngineLayoutConfig()) | {"name": "engine 7"}))
        assert len(engine.generate([request([5, 6], SamplingParams(3))])[0].tokens)
        group = server._process.pid
        processes, files = members(group), shared_files(members(group))
        assert len(processes) > 2
        assert files
        scheduler = next(
            process for process in processes if "scheduler" in Path(f"/proc/{process}/cmdline").read_text()
        )
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(EngineError) as caught:
            engine.generate([request([5, 6], SamplingParams(200), seed=seed) for seed in range(100)])
        assert "engine 7" in str(caught.value)
        assert f"{server.log} ends with" in str(caught.value)
    finally:
        (engine or server).close()
    assert not members(group)
    assert not [file for file in files if file.exists()]
    assert not Path(server._directory).exists()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([request([5, 6], SamplingParams(3))])


@pytest.mark.long
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    directory = model_directory("qwen2_tied", tmp_path / "model")
    started = f"""
import os, signal, time
from pathlib import Path
from megagrpo.recipe.schema import EngineLayoutConfig
from tests.sglang.servers import start_server
server = start_server(Path({str(directory)!r}), EngineLayoutConfig(), Path({str(tmp_path / "log")!r}))
print(server._process.pid, server._directory, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        group, directory_of_sockets = owner.stdout.readline().split()
        deadline = time.monotonic() + START_SECONDS
        while len(running := members(int(group))) < 3:  # launcher, scheduler, detokenizer
            assert running, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        files = shared_files(running)
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while members(int(group)):
        assert time.monotonic() < deadline, members(int(group))
        time.sleep(0.1)
    assert not [file for file in files if file.exists()]
    assert not Path(directory_of_sockets).exists()


def test_the_next_server_removes_what_a_server_killed_with_its_owner_left(tmp_path: Path) -> None:
    log, directory = tmp_path / "engine.log", tmp_path / "sglang-left"
    directory.mkdir()
    file = Path(SHARED_MEMORY) / f"sgl_shm_mq_test_{os.getpid()}"
    file.touch()
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    note_leftovers(tmp_path / "engine.log.leftovers.json", server.pid, str(directory), [file])

    def start_next() -> None:
        with pytest.raises(EngineError):
            Server({}, name="engine 0", log=log, python=str(tmp_path / "python"))

    try:
        start_next()
        assert file.exists(), "removed under a server that runs"
        assert directory.exists()
        server.kill()
        server.wait()
        start_next()
        assert not file.exists()
        assert not directory.exists()
    finally:
        server.kill()
        server.wait()
        file.unlink(missing_ok=True)


def test_a_server_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    # In place of SGLang, whose import takes ten seconds: a program that ends as SGLang does without a model.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such model'\nexit 1\n")
    python.chmod(0o755)
    server = Server({}, name="engine 0", log=tmp_path / "engine.log", python=str(python))
    try:
        with pytest.raises(EngineError, match=r"the server has ended(.|\n)*no such model"):
            server.wait_until_ready(START_SECONDS)
    finally:
        server.close()


def test_a_server_that_is_not_ready_in_time_is_named(tmp_path: Path) -> None:
    server = start_server(
        model_directory("qwen2_tied", tmp_path / "model"), EngineLayoutConfig(), tmp_path / "engine.log"
    )
    try:
        with pytest.raises(EngineError, match="not ready"):
            server.wait_until_ready(0.5)
    finally:
        server.close()
    assert not members(server._process.pid)


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match=r"rollout\.sglang\.python"):
        Server({}, name="engine 0", log=tmp_path / "log", python=str(tmp_path / "python"))
    assert not list(tmp_path.glob("sglang-*"))


def test_a_server_with_another_layout_than_the_recipes_is_refused(tied_server: Served) -> None:
    with pytest.raises(EngineError, match="tp_size 1"), tied_server.borrowed(layout=EngineLayoutConfig(tensor=2)):
        pass
