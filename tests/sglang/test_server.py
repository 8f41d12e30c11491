"""A server answers only with its key, its failures are named, nothing of it stays, and it serves converted models."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrpo import cli
from megagrpo.errors import EngineError
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout import server as server_module
from megagrpo.rollout.server import (
    SHARED_MEMORY,
    Server,
    members,
    note_leftovers,
    remove_leftovers,
    shared_files,
)
from megagrpo.rollout.sglang.arguments import PROGRAM
from megagrpo.rollout.sglang.engine import AS_STARTED, check_server
from megagrpo.types import SamplingParams
from megagrpo.weights.families import read_architecture
from tests.engines.policy import check_logprobs
from tests.engines.servers import START_SECONDS, Served, serve, spec_of
from tests.loop.small_run import wait_until
from tests.rollout_engines import generate, model_directory, request
from tests.sglang.test_weights import check_holds

GONE_SECONDS = 120.0


@pytest.mark.parametrize(
    ("changed", "given", "fix"),
    [
        ({"attn_dp_size": 2}, "attn_dp_size 2", "change rollout.layout.attention_data, or start"),
        ({"pp_size": 2, "dtype": "float16"}, "dtype float16, pp_size 2", "rollout.layout.pipeline, or start"),
        ({"ep_num_redundant_experts": 4}, "ep_num_redundant_experts 4", "start the server so"),
    ],
)
def test_the_first_contact_names_every_argument_that_differs_from_the_recipe(
    tied_server: Served, changed: dict[str, object], given: str, fix: str
) -> None:
    info = tied_server.get("/server_info")
    checked = spec_of(tied_server.directory, tied_server.layout), read_architecture(tied_server.directory)
    check_server(info, *checked)
    with pytest.raises(EngineError) as caught:
        check_server(info | changed, *checked)
    (problem,) = caught.value.problems
    assert problem.given == given
    assert fix in problem.fix


def test_quantized_weights_and_experts_in_an_order_of_other_kernels_are_refused(tmp_path: Path) -> None:
    of = model_directory("qwen3_moe", tmp_path), EngineLayoutConfig(), "model.dtype=bfloat16"
    checked = spec_of(*of), read_architecture(of[0])
    sizes = {"tp_size": 1, "ep_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "dtype": "bfloat16"}
    info = AS_STARTED | sizes | {"device": "cuda", "moe_runner_backend": "triton", "quantization": None}
    info |= {"enable_return_routed_experts": True}
    check_server(info, *checked)
    check_server(info | {"device": "cpu", "moe_runner_backend": "auto"}, *checked)
    check_server(info | {"quantization": "fp8"}, spec_of(*of, "rollout.quantization=fp8"), checked[1])
    for changed in ({"moe_runner_backend": "flashinfer_trtllm"}, {"quantization": "fp8"}):
        with pytest.raises(EngineError, match=next(iter(changed))):
            check_server(info | changed, *checked)


def test_an_engine_over_a_server_of_another_layout_is_refused(tied_server: Served) -> None:
    with pytest.raises(EngineError, match="pp_size 1"), tied_server.borrowed("rollout.layout.pipeline=2"):
        pass


def test_a_server_has_its_load_in_its_own_directory_and_nothing_in_shared_memory(tied_server: Served) -> None:
    """Shared memory would stay if the server and its owner were killed at once; the directory does not."""
    assert list(Path(tied_server.server._directory).glob("sglang_loads_*"))
    assert not shared_files(members(tied_server.server._process.pid), PROGRAM.shared_memory)


@pytest.mark.long
def test_a_server_ends_with_the_process_that_started_it_even_if_it_is_stopped(tmp_path: Path) -> None:
    directory = model_directory("qwen2_tied", tmp_path / "model")
    started = f"""
import os, signal, time
from pathlib import Path
from megagrpo.recipe.schema import EngineLayoutConfig
from tests.engines.servers import start_server
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
        files = shared_files(running, PROGRAM.shared_memory)
        os.kill(int(group), signal.SIGSTOP)  # the launcher, which ends the others
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
    log, directory = tmp_path / "engine.log", Path(tempfile.mkdtemp(prefix="sglang-"))
    file = Path(SHARED_MEMORY) / f"sgl_shm_mq_test_{os.getpid()}"
    file.touch()
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    note_leftovers(tmp_path / "engine.log.leftovers.json", server.pid, str(directory), [file])

    def start_next() -> None:
        with pytest.raises(EngineError):
            Server(PROGRAM, {}, name="engine 0", log=log, python=str(tmp_path / "python"))

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


@pytest.mark.parametrize(
    ("program", "seconds", "words"),
    [
        ("echo 'no such model'; exit 1", START_SECONDS, r"the server has ended(.|\n)*no such model"),
        ("exec sleep 1000", 0.5, "not ready"),
    ],
    ids=["ends", "too slow"],
)
def test_a_server_that_does_not_start_is_named_and_quoted(
    program: str, seconds: float, words: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"  # in place of SGLang, whose import takes ten seconds
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    server = Server(PROGRAM, {}, name="engine 0", log=tmp_path / "engine.log", python=str(python))
    try:
        with pytest.raises(EngineError, match=words):
            server.wait_until_ready(seconds)
    finally:
        server.close()
    assert not members(server._process.pid)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "the server has ended"), (signal.SIGSTOP, r"was stopped \(SIGSTOP\)")]
)
def test_a_server_ends_in_seconds_when_one_of_its_processes_is_killed_or_stopped(
    number: signal.Signals, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package in SGLang's place has a process that sleeps, as a scheduler without work does."""
    monkeypatch.setattr(server_module, "STOPPED_SECONDS", 1)
    schedulers = (
        "import pathlib, subprocess, time\n"
        "def run_server(arguments):\n"
        "    subprocess.run(['true'])\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(subprocess.Popen(['sleep', '1000']).pid))\n"
        "    time.sleep(1000)\n"
    )
    for name, code in (
        ("__init__.py", ""),
        ("srt/__init__.py", ""),
        ("launch_server.py", schedulers),
        ("srt/plugins.py", "def load_plugins(): pass"),
        ("srt/server_args.py", "class ServerArgs:\n    def __init__(self, **arguments): pass"),
    ):
        (tmp_path / "sglang" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sglang" / name).write_text(code)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    settings = {"device": "cuda", "model_path": str(tmp_path)}  # what SGLang lacks on CPUs is not added
    server = Server(PROGRAM, settings, name="engine 0", log=tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)})
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", "its process", 60)
        with pytest.raises(EngineError, match="not ready"):
            server.wait_until_ready(0.1)
        os.kill(int((tmp_path / "pid").read_text()), number)
        wait_until(lambda: server._process.poll() is not None and not members(server._process.pid), "an end", 60)
        with pytest.raises(EngineError, match=words):
            server.check_running()
    finally:
        server.close()


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match=r"rollout\.sglang\.python"):
        Server(PROGRAM, {}, name="engine 0", log=tmp_path / "log", python=str(tmp_path / "python"))
    assert not list(tmp_path.glob("sglang-*"))


def test_a_server_with_another_layout_than_the_recipes_is_refused(tied_server: Served) -> None:
    with pytest.raises(EngineError, match="tp_size 1"), tied_server.borrowed("rollout.layout.tensor=2"):
        pass


# --- a server of its own ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves what model_directory("llama") is after conversion to torch_dist and back."""
    root = tmp_path_factory.mktemp("converted")
    original, megatron, hugging_face = model_directory("llama", root / "llama-0"), root / "torch_dist", root / "llama"
    for conversion, source, output in (
        ("hf-to-megatron", original, megatron),
        ("megatron-to-hf", megatron, hugging_face),
    ):
        assert cli.main(["convert", conversion, "--source", str(source), "--output", str(output)]) == 0
    with serve(hugging_face, "llama", EngineLayoutConfig()) as served:
        yield served


@pytest.mark.long
def test_a_converted_model_samples_what_the_original_does_and_takes_other_weights(converted_server: Served) -> None:
    original, other = converted_server.weights(0), converted_server.weights(1)
    # The second is longer than what the model's rotary embeddings were scaled from.
    prompts = ((5, 6, 9, 11), tuple(range(20, 110)))
    asked = [request(prompt, SamplingParams(24), seed=seed) for seed, prompt in enumerate(prompts)]
    check_logprobs(generate(converted_server.engine, asked), asked, {0: original})
    check_holds(converted_server.engine, original)
    with converted_server.trained() as (engine, trainer):
        trainer.sync(1, other)
        check_holds(engine, other)
        samples = generate(engine, asked)
    assert all((sample.versions == 1).all() for sample in samples)
    check_logprobs(samples, asked, {1: other})


def test_a_note_of_leftovers_removes_nothing_but_a_servers_own(tmp_path: Path) -> None:
    """Takes the note from the run's directory, which may come from elsewhere."""
    note, mine, file = tmp_path / "note.json", tmp_path / "sglang-mine", tmp_path / "sgl_file"
    mine.mkdir()
    file.touch()
    note_leftovers(note, 2**22 + 1, str(mine), [file])
    remove_leftovers(note, PROGRAM)
    assert mine.is_dir()
    assert file.exists()
    for wrong in (b"[]", b'{"host": 1}', b"\xff", b"[" * 100_000):
        note.write_bytes(wrong)
        remove_leftovers(note, PROGRAM)
